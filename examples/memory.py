"""
Memory of one prompt on a GPU, computed from a model's sizes and not measured; README has the table:

    python -m examples.memory                  # bfloat16, the presets in `hub_configs`
    python -m examples.memory --check          # the same formula beside what benchmarks measured

Weights are counted on the meta device. The cache holds `2 * layers * key-value heads * head size` numbers a token. Of
activations, the formula counts the widest moment: in the tower an MLP or rotary positions over all patches, as layers
up to `l + 1` see them, or in the language model an MLP over the tokens that are left, beside the cache and, on Molmo2,
the mask.
"""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from stts_hf.auto_classes import register_auto_classes
from stts_hf.benchmark.geometries import GEOMETRIES
from stts_hf.modeling.configuration_stts import STTSConfig

HUB_CONFIGS = Path(__file__).parents[1] / "hub_configs"
PRESETS = ("stts-molmo2-4b", "stts-molmo2-8b", "stts-qwen3-vl-2b", "stts-qwen3-vl-4b", "stts-qwen3-vl-8b")
BLOCKS = {64: 364, 256: 91}  # of a tubelet of 720p, by frames: Qwen's processor has a budget of pixels
RATIOS = (0.0, 0.5, 0.8)
TEXT = 64  # tokens of the question and the template
# What benchmarks measured: geometry, frames, bytes of a number, tokens of the text and of a timestamp, MiB by ratio; on
# a CPU docs/benchmarks/paper-small-prompt and qwen-small, on an H100 gpu-molmo2 and gpu-qwen.
MEASURED = (
    ("molmo2-small", 64, 4, 858, 3, {0.0: 350.3, 0.3: 274.8, 0.4: 249.9, 0.5: 238.6}),
    ("qwen3-vl-small", 64, 4, 64, 1, {0.3: 374.2, 0.5: 271.5, 0.7: 168.9}),
    ("molmo2-4b", 256, 2, 2267, 7, {0.0: 7191.8, 0.3: 5051.4, 0.5: 4295.9, 0.7: 4295.9}),
    ("qwen3-vl-4b", 64, 2, 128, 6, {0.0: 3377.1, 0.3: 2389.1, 0.5: 1730.1, 0.7: 1661.8}),
)


class Memory(NamedTuple):
    """Of one prompt: tokens of the language model, and bytes beside the weights, of which the cache stays."""

    tokens: int
    cache: int
    peak: int


def prompt_memory(
    config: Any, frames: int, blocks: int, ratio: float, *, size: int = 2, text: int = TEXT, time: int | None = None
) -> Memory:
    """frames: of the video. blocks: of a frame of the tower. size: bytes of a number. time: tokens of a timestamp."""
    vision, language = config.vision_config, config.text_config
    is_molmo2 = isinstance(config, STTSConfig)
    window = 9 if is_molmo2 else vision.spatial_merge_size**2
    in_tower = frames if is_molmo2 else -(-frames // vision.temporal_patch_size)
    kept = in_tower * blocks - int(ratio * in_tower * blocks)
    time = (7 if is_molmo2 else 6) if time is None else time
    tokens = kept + in_tower * (2 + time) + text
    widths = language.num_hidden_layers * language.num_key_value_heads * language.head_dim
    cache = 2 * widths * tokens * size
    mlp = 2 * (vision.hidden_size + vision.intermediate_size)
    # Qwen rotates queries and keys in float32: with what they are made of, 17 widths in half precision, 9 in full.
    rotary = 0 if is_molmo2 else (17 if size == 2 else 9) * vision.hidden_size
    tower = in_tower * blocks * window * max(mlp, rotary) * size
    layer = tokens * (3 * language.intermediate_size + 4 * language.hidden_size) * size
    # What goes in: features of the ViT's last layers, or merged tokens with those of deepstack.
    features = kept * window * vision.hidden_size * 2 if is_molmo2 else kept * language.hidden_size * 4
    mask = tokens**2 if is_molmo2 else 0  # a bool per pair, with sdpa
    return Memory(tokens, cache, max(tower, cache + layer + features * size + mask))


def count_weights(config: Any) -> int:
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    return sum(weight.numel() for weight in model.parameters())


def table() -> list[str]:
    register_auto_classes()
    lines = ["| GB in bfloat16 | weights | cache of 1,000 tokens | 64 frames at 0 / 50 / 80 % | 256 frames |"]
    lines.append("|---|---:|---:|---:|---:|")
    for preset in PRESETS:
        config = AutoConfig.from_pretrained(HUB_CONFIGS / preset)
        weights = 2 * count_weights(config)
        cells = []
        for frames, of_qwen in BLOCKS.items():
            blocks = 81 if isinstance(config, STTSConfig) else of_qwen
            found = [prompt_memory(config, frames, blocks, ratio) for ratio in RATIOS]
            cells.append(" / ".join(f"{(weights + memory.peak) / 1e9:.1f}" for memory in found))
        cache = found[0].cache / found[0].tokens / 1e6
        name = config.family.removeprefix("dense ") + "-" + preset.rpartition("-")[2].upper()
        lines.append(f"| {' | '.join([name, f'{weights / 1e9:.1f}', f'{cache:.2f}', *cells])} |")
    return lines


def check() -> list[str]:
    lines = []
    for name, frames, size, text, time, measured in MEASURED:
        geometry = GEOMETRIES[name]
        blocks = geometry.grid[0] * geometry.grid[1]
        for ratio, seen in measured.items():
            found = prompt_memory(geometry.config(), frames, blocks, ratio, size=size, text=text, time=time)
            lines.append(f"{name}, k = {ratio}: {found.peak / 2**20:.0f} MiB computed, {seen:.0f} MiB measured")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="Computes the memory of one prompt on a GPU.")
    parser.add_argument("--check", action="store_true", help="compare the formula with what benchmarks measured")
    print(*(check() if parser.parse_args().check else table()), sep="\n")


if __name__ == "__main__":
    main()
