"""Fuzzing that is guided by coverage: what strangers' bytes may do to the readers is give a result or a clear error.

`make fuzz-bytes` runs it. libFuzzer changes the seeds and keeps what reaches new lines of `stts_hf`, which alone is
instrumented: FFmpeg, safetensors and transformers are not.
"""

import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import atheris  # type: ignore[import-not-found,import-untyped,unused-ignore]  # `make fuzz-bytes` installs it

with atheris.instrument_imports(include=["stts_hf"]):
    from stts_hf.checkpoints.families import family_of
    from stts_hf.checkpoints.files import read_json
    from stts_hf.checkpoints.settings import config_of_hugging_face
    from stts_hf.checkpoints.tensors import open_safetensors
    from stts_hf.data.lines import read_lines
    from stts_hf.data.loading import load_rows
    from stts_hf.inference.answers_file import open_answers, summary_path
    from stts_hf.modeling.video_processing_stts import sample_times
    from stts_hf.modeling.video_reading_stts import VideoFile

import av
import torch

from tests.checkpoints import TINIES
from tests.corpus.files import CASES

FOLDER = Path(tempfile.mkdtemp(prefix="fuzz_bytes_"))
LARGEST = 64 * 2**10  # bytes of an input
NO_PROCESSOR = SimpleNamespace(video_processor=None)


def videos(content: bytes) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of damage and early ends
        with VideoFile({"bytes": content}) as file:
            indices = sample_times(file.times, file.duration, 3, 2.0)
            shown, metadata = file.read(indices, (28, 28))
    assert 1 <= len(shown) == len(metadata.timestamps) <= len(indices)
    assert metadata.timestamps == sorted(metadata.timestamps)


def lines(content: bytes) -> None:
    path = FOLDER / "rows.jsonl"
    path.write_bytes(content)
    rows, _ = read_lines(path)
    with open_answers(path, {}) as answers:
        assert len(answers.answered) <= len(rows)


def questions(content: bytes) -> None:
    path = FOLDER / "questions.jsonl"
    path.write_bytes(content)
    assert len(load_rows(path)) > 0


def weights(content: bytes) -> None:
    """The first byte says whether the rest is a file of weights, or the index of one that lies beside it."""
    for path in FOLDER.glob("model*"):
        path.unlink()
    is_index = content[:1] == b"i"
    (FOLDER / ("model.safetensors.index.json" if is_index else "model.safetensors")).write_bytes(content[1:])
    if is_index:
        (FOLDER / "model-1.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    for tensor in open_safetensors(FOLDER).values():
        assert tensor.read().shape == tensor.shape


def settings(content: bytes) -> None:
    path = FOLDER / "config.json"
    path.write_bytes(content)
    family = family_of(read_json(path).get("model_type"), path)
    config = config_of_hugging_face(FOLDER, family, NO_PROCESSOR)
    assert config.model_type == family.config.model_type


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target for target in (videos, lines, questions, weights, settings)
}


def seeds(target: str) -> Iterator[bytes]:
    if target == "videos":
        for name, case in CASES.items():
            with tempfile.TemporaryDirectory() as folder:
                made: Any = case.make(Path(folder))
                if name != "device" and Path(made).is_file():
                    yield Path(made).read_bytes()
    elif target == "weights":
        header = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
        yield b"w" + len(header).to_bytes(8, "little") + header + bytes(8)
        yield b'i{"metadata":{},"weight_map":{"a":"model-1.safetensors"}}'
    elif target == "settings":
        yield from ((folder / "config.json").read_bytes() for folder in TINIES.values())
    else:
        yield b'{"id": [1]}\n{"id": null, "media_root": {"a": 1e999}}\n'
        yield b'{"id": "1", "answer": "red", "seconds": 0.5}\n{"id": "2", "error": "no video"}\n'
        yield b'{"video": "a.mp4", "question": "What?", "options": ["a", "b"], "answer": 1}\n[]\n'


def main(target: str, folder: Path, *options: str) -> None:
    av.logging.set_level(av.logging.PANIC)
    torch.set_num_threads(1)
    summary_path(FOLDER / "rows.jsonl").write_text('{"format": 1, "settings": {}}')
    inputs = folder / target
    inputs.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds(target)):
        if len(seed) <= LARGEST:
            (inputs / f"seed_{number}").write_bytes(seed)

    def read(content: bytes) -> None:
        try:
            TARGETS[target](content)
        except (ValueError, OSError) as error:
            if not str(error):
                raise AssertionError(f"a {type(error).__name__} without words") from error

    limits = [f"-max_len={LARGEST}", "-timeout=20", "-rss_limit_mb=3000", f"-artifact_prefix={folder}/{target}_"]
    atheris.Setup([sys.argv[0], *limits, "-print_final_stats=1", *options, str(inputs)], read)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
