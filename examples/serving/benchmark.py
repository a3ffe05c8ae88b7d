"""Requests per second and time to first token of vLLM with stock models and with STTS, in one run on this CPU:

    python -m examples.serving.benchmark [REPORT.md] [--stock PYTHON]        # in the repository

Models of random weights, small, but with the released ones' shape: as many patches and tokens a frame, a tower that
takes about half of a prompt's work, of whose layers a fifth runs before anything is dropped. Videos of 16 frames of
noise, 16 new tokens, float32, nothing cached. Stock vLLM computes another function for Molmo2 (stock_molmo2.py). Its
Qwen3-VL takes no videos with transformers 5.23, which STTS needs: it runs in the environment of `--stock`, or is left
out.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

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
# None: vLLM's own model.
SERVERS = [(model, ratio) for model in ("Molmo2", "Qwen3-VL") for ratio in (None, 0.0, 0.5)]


def make_checkpoints(folder: Path) -> None:
    """Each model as a stock and as STTS's checkpoint: `folder/Molmo2/stock`, `folder/Molmo2/stts` and so on."""
    torch.manual_seed(0)
    make_molmo2(folder / "Molmo2")
    make_qwen3_vl(folder / "Qwen3-VL")


def make_molmo2(folder: Path) -> None:
    tokenizer: Any = STTSProcessor.from_pretrained(MOLMO2).tokenizer
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
    processor: Any = Qwen3VLProcessor.from_pretrained(QWEN3_VL)
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


def measure(folder: str, model: str, ratio: float | None, python: str) -> list[dict[str, float]]:
    """Of one server, in a process of its own: with requests one by one, then eight at once."""
    video, side = VIDEOS[model]
    command = [python, "-m", "examples.serving.one_server", f"{folder}/{model}/{'stock' if ratio is None else 'stts'}"]
    command += ["--video", video, "--frames", str(FRAMES), "--side", str(side)]
    if ratio is not None:
        command += ["--pruning-ratio", str(ratio)]
    elif model == "Molmo2":
        command += ["--as-released"]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    rows: list[dict[str, float]] = json.loads(ended.stdout.splitlines()[-1])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Requests per second of vLLM with stock models and with STTS.")
    parser.add_argument("report", type=Path, nargs="?", help="Markdown file for the table")
    parser.add_argument("--stock", metavar="PYTHON", help="of an environment with the transformers that vLLM asks for")
    arguments = parser.parse_args()
    lines = [
        "| model | server | tokens of a prompt | requests at once | requests per second | median time to first token |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoints(Path(folder))
        for model, ratio in SERVERS:
            python = sys.executable
            if (model, ratio) == ("Qwen3-VL", None):
                if arguments.stock is None:
                    continue
                python = arguments.stock
            server = "stock vLLM" if ratio is None else f"STTS, {ratio:.0%}"
            for row in measure(folder, model, ratio, python):
                cells = [model, server, row["length"], row["at once"], f"{row['rate']:.2f}", f"{row['first']:.2f} s"]
                lines.append(f"| {' | '.join(map(str, cells))} |")
                print(lines[-1], flush=True)
    report = "\n".join(lines)
    print(f"\n{report}")
    if arguments.report:
        arguments.report.write_text(report + "\n")


if __name__ == "__main__":
    main()
