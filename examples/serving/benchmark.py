"""Requests per second and time to first token of vLLM with stock models and with STTS, in one run on this CPU:

    python -m examples.serving.benchmark [REPORT.md] [--stock PYTHON]        # in the repository

Models of random weights, small, but with the released ones' shape: as many patches and tokens a frame, a tower that
takes about half of a prompt's work, of whose layers a fifth runs before anything is dropped. Videos of 16 frames of
noise, 16 new tokens, float32, nothing cached. The servers of a model take turns in five rounds, of which the median and
the spread are printed; the last column is the rate beside that of the first server in the same round. Stock vLLM
computes another function for Molmo2 (stock_molmo2.py). Its Qwen3-VL takes no videos with transformers 5.23, which STTS
needs: it runs in the environment of `--stock`, or is left out.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from transformers import (
    Molmo2Config,
    Molmo2ForConditionalGeneration,
    Molmo2ImageProcessor,
    Molmo2Processor,
    Molmo2VideoProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
)

from stts_hf import (
    STTSConfig,
    STTSForConditionalGeneration,
    STTSProcessor,
    STTSQwen3VLConfig,
    STTSQwen3VLForConditionalGeneration,
)

MOLMO2, QWEN3_VL = Path("hub_configs/stts-tiny"), Path("hub_configs/stts-qwen3-vl-tiny")  # whose tokenizers they take
FRAMES, SIDE, PATCH = 16, 378, 14
SIDE_OF_QWEN, PATCH_OF_QWEN = 288, 16  # 81 tokens for two frames
VIDEOS = {"Molmo2": ("<|video|>", SIDE), "Qwen3-VL": ("<|vision_start|><|video_pad|><|vision_end|>", SIDE_OF_QWEN)}
LAYERS, PRUNING_LAYER = 12, 1
TOWER: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 384}
TEXT: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "head_dim": 64}
TEXT |= {"num_attention_heads": 8, "num_key_value_heads": 2}
RATIOS = 0.0, 0.5
HEAD = (
    "| | server | tokens of a prompt | at once | requests per second | seconds to first token | beside the first |",
    "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
)
REQUESTS, ROUNDS = {1: 4, 8: 8}, 5  # how many, by how many at once


def make_checkpoints(folder: Path) -> None:
    """Each model as a stock and as STTS's checkpoint: `folder/Molmo2/stock`, `folder/Molmo2/stts` and so on."""
    torch.manual_seed(0)
    make_molmo2(folder / "Molmo2")
    make_qwen3_vl(folder / "Qwen3-VL")


def make_molmo2(folder: Path) -> None:
    tokenizer: Any = STTSProcessor.from_pretrained(MOLMO2, trust_remote_code=False).tokenizer
    sizes: dict[str, Any] = {"size": {"height": SIDE, "width": SIDE}, "patch_size": PATCH}
    parts = Molmo2ImageProcessor(**sizes), Molmo2VideoProcessor(**sizes), tokenizer
    settings = STTSConfig.from_pretrained(MOLMO2).to_dict()
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32}
    vision = {**TOWER, **heads, "num_hidden_layers": LAYERS, "image_size": [SIDE, SIDE], "patch_size": PATCH}
    adapter = {**TOWER, **heads, "text_hidden_size": TEXT["hidden_size"], "vision_feature_layer": [LAYERS - 1]}
    kept = ("vocab_size", "additional_vocab_size", "rope_parameters")
    find = tokenizer.convert_tokens_to_ids
    for_stock: dict[str, Any] = {"image_col_id": find("<im_col>"), "image_low_res_id": find("<im_low>")}
    config = Molmo2Config(
        vision_config=vision | {"num_position_embeddings": (SIDE // PATCH) ** 2},
        text_config=TEXT | {name: settings["text_config"][name] for name in kept},
        adapter_config=settings["adapter_config"] | adapter,
        **for_stock,
        **{name: value for name, value in settings.items() if name.endswith(("_token_id", "_patch_id"))},
    )
    Molmo2ForConditionalGeneration(config).float().save_pretrained(folder / "stock")
    Molmo2Processor(*parts, use_frame_special_tokens=False).save_pretrained(folder / "stock")
    model = STTSForConditionalGeneration.from_pretrained(folder / "stock", pruning_layer=PRUNING_LAYER)
    model.save_pretrained(folder / "stts")
    STTSProcessor(*parts, use_frame_special_tokens=False).save_pretrained(folder / "stts")


def make_qwen3_vl(folder: Path) -> None:
    processor: Any = Qwen3VLProcessor.from_pretrained(QWEN3_VL, trust_remote_code=False)
    for part in (processor.image_processor, processor.video_processor):
        part.patch_size = PATCH_OF_QWEN
    processor.video_processor.size = {"shortest_edge": 4096, "longest_edge": FRAMES * SIDE_OF_QWEN**2}
    settings = STTSQwen3VLConfig.from_pretrained(QWEN3_VL).to_dict()
    vision = {**TOWER, "num_heads": 4, "depth": LAYERS, "patch_size": PATCH_OF_QWEN}
    vision |= {"out_hidden_size": TEXT["hidden_size"], "deepstack_visual_indexes": [3, 6, 9]}
    rope = settings["text_config"]["rope_parameters"] | {"mrope_section": [12, 10, 10]}
    config = Qwen3VLConfig(
        vision_config=vision | {"num_position_embeddings": 1024},
        text_config=TEXT | {"vocab_size": settings["text_config"]["vocab_size"], "rope_parameters": rope},
        **{name: value for name, value in settings.items() if name.endswith("_token_id")},
    )
    Qwen3VLForConditionalGeneration(config).float().save_pretrained(folder / "stock")
    pruning: Any = {"pruning_layer": PRUNING_LAYER}
    STTSQwen3VLForConditionalGeneration.from_pretrained(folder / "stock", **pruning).save_pretrained(folder / "stts")
    for name in ("stock", "stts"):
        processor.save_pretrained(folder / name)


class Server:
    """
    `one_server.py` in a process of its own; `ratio` of None is vLLM's own model, with `evs` the share that its own
    pruning drops. Leaving ends it.
    """

    def __init__(
        self,
        folder: Path,
        model: str,
        ratio: float | None,
        python: str,
        evs: float | None = None,
        frames: int = FRAMES,
        side: int | None = None,
        options: Sequence[str] = (),
    ):
        video, small = VIDEOS[model]
        checkpoint = folder / model / ("stock" if ratio is None else "stts")
        command = [python, "-m", "examples.serving.one_server", str(checkpoint)]
        command += ["--video", video, "--frames", str(frames), "--side", str(side or small), *options]
        if ratio is not None:
            command += ["--pruning-ratio", str(ratio)]
        elif model == "Molmo2":
            command += ["--as-released"]
        if evs is not None:
            command += ["--evs", str(evs)]
        self.name = "stock vLLM" if ratio is None else f"STTS, {ratio:.0%}"
        if evs is not None:
            self.name += f", EVS {evs:.0%}"
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.measure(1, 1)  # so that nothing is done for the first time

    def measure(self, at_once: int, number: int) -> dict[str, float]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(at_once, number, file=self.process.stdin, flush=True)
        for line in self.process.stdout:  # vLLM's own lines are there too
            if line.startswith("{"):
                measured: dict[str, float] = json.loads(line)
                return measured
        raise RuntimeError(f"The server of {self.name} ended with status {self.process.wait()}.")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.communicate()


def spread(values: Iterable[float]) -> str:
    """The median, and the least and the greatest."""
    values = sorted(values)
    return f"{statistics.median(values):.2f} ({values[0]:.2f} to {values[-1]:.2f})"


def compare(folder: Path, model: str, servers: Sequence[tuple[float | None, str]]) -> Iterator[str]:
    """Rows of a table: the servers of a model, each (ratio, python), in turn, round by round."""
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(Server(folder, model, *server)) for server in servers]
        for at_once, number in REQUESTS.items():
            rounds = [[server.measure(at_once, number) for server in running] for _ in range(ROUNDS)]
            for server, found in zip(running, zip(*rounds, strict=True), strict=True):
                faster = [one["rate"] / first["rate"] for one, (first, *_) in zip(found, rounds, strict=True)]
                cells = [model, server.name, found[0]["length"], at_once, spread(one["rate"] for one in found)]
                cells += [spread(one["first"] for one in found), spread(faster)]
                yield f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Requests per second of vLLM with stock models and with STTS.")
    parser.add_argument("report", type=Path, nargs="?", help="Markdown file for the table")
    parser.add_argument("--stock", metavar="PYTHON", help="of an environment with the transformers that vLLM asks for")
    arguments = parser.parse_args()
    lines = list(HEAD)
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoints(Path(folder))
        for model, stock in (("Molmo2", sys.executable), ("Qwen3-VL", arguments.stock)):
            servers: list[tuple[float | None, str]] = [(None, stock)] if stock else []
            servers += [(ratio, sys.executable) for ratio in RATIOS]
            for line in compare(Path(folder), model, servers):
                lines.append(line)
                print(line, flush=True)
    if arguments.report:
        arguments.report.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
