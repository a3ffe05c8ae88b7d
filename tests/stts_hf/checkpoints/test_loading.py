"""A checkpoint is loaded by the package's code, whatever code lies in it."""

import ast
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from stts_hf import load
from stts_hf.checkpoints.files import fingerprint
from stts_hf.checkpoints.loading import load_config_and_processor, load_model
from tests.checkpoints import ALL_TINIES, TINIES, TINY, needs_num2words, weights_of
from tests.conftest import REPOSITORY

MODELING = REPOSITORY / "src" / "stts_hf" / "modeling"

TRAP = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\nraise SystemExit('the code ran')\n"
EVERY_CLASS = ("AutoConfig", "AutoModel", "AutoModelForMultimodalLM", "AutoProcessor", "AutoVideoProcessor")


def with_trap(source: Path, folder: Path) -> Path:
    """A copy of a checkpoint, every module of which would end the process, with classes of such a module for all."""
    shutil.copytree(source, folder)
    for module in [*folder.glob("*.py"), folder / "trap.py"]:
        module.write_text(TRAP)
    traps: dict[str, Any] = dict.fromkeys(EVERY_CLASS, "trap.Trap") | {"AutoTokenizer": [None, "trap.Trap"]}
    for file in (folder / f"{name}.json" for name in ("config", "processor_config", "tokenizer_config")):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": traps}))
    return folder


@pytest.mark.parametrize("backbone", TINIES)
def test_no_code_of_a_checkpoint_runs(backbone, tmp_path):
    folder = with_trap(TINIES[backbone], tmp_path / "checkpoint")
    config, processor = load_config_and_processor(str(folder))
    model = load_model(str(folder), config, torch.device("cpu"))
    assert type(model).__module__.startswith("stts_hf.")
    assert processor.tokenizer("moves")["input_ids"]
    assert not list(tmp_path.rglob("ran"))


def test_a_pickle_is_not_opened(tmp_path):
    folder = shutil.copytree(TINY, tmp_path / "checkpoint")
    (folder / "model.safetensors").unlink()
    torch.save({"lm_head.weight": torch.zeros(2)}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"holds no weights: copy its .*safetensors"):
        load(str(folder))


# Of a backbone: a file, the keys of what is broken there, what it becomes, and what the error names.
BROKEN: list[Any] = [
    ("qwen3_vl", "processor_config", ["video_processor", "fps"], "x", "fps must be .*'x'"),
    ("qwen3_vl", "processor_config", ["video_processor", "max_frames"], "x", "max_frames must be .*'x'"),
    ("molmo2", "processor_config", ["video_processor", "max_fps"], "x", "max_fps.*'x'"),
    ("qwen3_vl", "processor_config", ["video_processor", "patch_size"], 4, "`patch_size` of the video_processor is 4"),
    (
        "qwen2_5_vl",
        "processor_config",
        ["image_processor", "merge_size"],
        3,
        "`merge_size` of the image_processor is 3",
    ),
    ("qwen3_vl", "tokenizer", ["added_tokens"], [], "the tokenizer lacks <|image_pad|>"),
    pytest.param(
        "smolvlm",
        *(
            "processor_config",
            ["image_seq_len"],
            9,
            "`image_seq_len` of the video_processor is 9, but the config needs 16",
        ),
        marks=needs_num2words,
    ),
]


@pytest.mark.parametrize(("backbone", "name", "keys", "value", "named"), BROKEN)
def test_a_processor_that_could_read_no_video_of_the_model_is_refused(backbone, name, keys, value, named, tmp_path):
    folder = shutil.copytree(ALL_TINIES[backbone], tmp_path / "checkpoint")
    settings = json.loads((folder / f"{name}.json").read_text())
    place = settings[keys[0]] if keys[1:] else settings
    place[keys[-1]] = value
    (folder / f"{name}.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=named.replace("|", r"\|")):
        load_config_and_processor(str(folder))


def without(folder: Path, part: str) -> Path:
    """A copy of stts-tiny that lacks the weights with this in their names."""
    shutil.copytree(TINY, folder)
    weights = {name: weight for name, weight in weights_of(TINY).items() if part not in name}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_scorer_that_is_missing_is_fine_for_selectors_that_do_not_use_it(tmp_path):
    folder = str(without(tmp_path / "checkpoint", ".scorer."))
    for selector in ("cosine", "random"):
        assert load(folder, selector=selector).model.config.vision_config.selector == selector
    with pytest.raises(ValueError, match=r"lacks the weights of the scorer .*--selector cosine"):
        load(folder)


def test_a_fingerprint_reads_files_alone(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    expected = fingerprint(tmp_path)
    os.mkfifo(tmp_path / "model.safetensors")
    (tmp_path / "tokenizer.json").symlink_to("/dev/zero")
    assert fingerprint(tmp_path) == expected
    (tmp_path / "config.json").write_text("{ }")
    assert fingerprint(tmp_path) != expected


def processors_loaded(path: Path) -> list[str]:
    """The lines that load a processor or a tokenizer and do not refuse the code of the checkpoint."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return [
        f"{path}:{call.lineno}"
        for call in calls
        if re.search(r"(rocessor|AutoTokenizer)\.from_pretrained$", ast.unparse(call.func))
        and "trust_remote_code=False" not in ast.unparse(call)
    ]


def test_nothing_loads_a_processor_that_could_ask_to_run_code():
    files = [*(REPOSITORY / "src").rglob("*.py"), *(REPOSITORY / "examples").rglob("*.py")]
    assert [line for path in files if not path.is_relative_to(MODELING) for line in processors_loaded(path)] == []
