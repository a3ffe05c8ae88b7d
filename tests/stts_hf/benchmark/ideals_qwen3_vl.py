"""FLOPs of Qwen3-VL in closed form, and the table of them in docs/benchmarks/notes.md:
`python -m tests.stts_hf.benchmark.ideals_qwen3_vl`.
"""

import dataclasses
import math
from typing import Any

from stts_hf.benchmark.geometries import GEOMETRIES
from stts_hf.benchmark.presets import PRESETS, Workload
from tests.stts_hf.benchmark import formulas

AFTER = "evs"


def tubelets(workload: Workload) -> int:
    return -(-workload.frames // 2)


def flops(workload: Workload, ratio: float | None, lengths: list[int] | None = None) -> float:
    """
    FLOPs of one pass of a workload, as `stts_hf.benchmark.meters` counts them with scaled dot product attention.

    lengths: how many patches of each tubelet survive; by default they are spread evenly over the tubelets.
    """
    config: Any = GEOMETRIES[workload.geometry].config()
    vision, side = config.vision_config, config.vision_config.spatial_merge_size
    frames, blocks = tubelets(workload), math.prod(GEOMETRIES[workload.geometry].grid)
    patches, layers = side**2 * blocks, vision.depth
    if lengths is None:
        lengths = [round((1 - (ratio or 0.0)) * patches)] * frames
    left = sum(lengths) // side**2  # blocks
    in_tower = [patches] * frames if ratio is None or workload.selector == AFTER else lengths
    kept, everything = sum(in_tower), frames * patches
    width = vision.hidden_size

    # Products and attention in the layers of ViT and LLM, which checkpointing computes again; products elsewhere.
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    embedding = 2 * everything * values * width
    merger = 2 * (side**2 * width) ** 2 + 2 * side**2 * width * vision.out_hidden_size
    outside = embedding + (1 + len(vision.deepstack_visual_indexes)) * (kept // side**2) * merger
    patches_of_layers = layers * everything
    if ratio is None:
        linears = formulas.vision_linears(config, layers, everything)
        attention = formulas.vision_attention(config, layers, in_tower)
    else:
        dense = (vision.pruning_layer if workload.pruning_layer is None else workload.pruning_layer) + 1
        patches_of_layers = dense * everything + (layers - dense) * kept
        linears = formulas.vision_linears(config, dense, everything)
        linears += 6 * everything * width**2 + 2 * kept * width**2 + 4 * kept * width * vision.intermediate_size
        linears += formulas.vision_linears(config, layers - dense - 1, kept)
        head_dim = width // vision.num_heads
        if workload.selector == "scorer":
            outside += formulas.scorer(config, frames * blocks, side**2)
            if ratio > 0:
                head_dim = 8 * math.ceil((head_dim + (1 if workload.dtype == "float32" else 3)) / 8)
        attention = formulas.vision_attention(config, dense, [patches] * frames)
        attention += 4 * kept * patches * vision.num_heads * head_dim
        attention += formulas.vision_attention(config, layers - dense - 1, in_tower)
    tokens = 0
    if workload.mode != "tower":
        tokens = left + frames * (2 + workload.timestamp_tokens) + workload.text_tokens
        linears += formulas.text_linears(config, tokens)
        attention += formulas.text_attention(config, tokens) * (tokens + 1) // (2 * tokens)  # causal
        outside += formulas.head(config, tokens if workload.mode == "training" else 1)
    total: float = linears + attention + outside
    if workload.mode == "training":
        total += 2 * (linears + outside) + 2.5 * attention - embedding  # pixels have no gradient
        if workload.checkpointing:
            total += linears + attention - formulas.last_products(config, patches_of_layers, tokens)
    return workload.batch * total


def main() -> None:
    """Prints the table."""
    ratios = (0.3, 0.5, 0.7)
    print("| FLOP ideal over stock | stock, TFLOP | ViT's share |", *(f"{k:.0%} | after the ViT |" for k in ratios))
    print("|---|---:|---:|" + "---:|" * 2 * len(ratios))
    for name in ("qwen", "qwen-small"):
        for workload in PRESETS[name].workloads:
            stock = flops(workload, None)
            tower = flops(dataclasses.replace(workload, mode="tower"), None) * (3 if workload.mode == "training" else 1)
            tokens = tubelets(workload) * math.prod(GEOMETRIES[workload.geometry].grid)
            cells = [f"{workload.geometry}, {workload.frames} frames, {tokens} tokens, {workload.mode}"]
            cells += [f"{stock / 1e12:.4g}", f"{tower / stock:.0%}" if workload.mode == "inference" else ""]
            for ratio in ratios:
                ideals = (stock / flops(dataclasses.replace(workload, selector=it), ratio) for it in ("scorer", AFTER))
                cells += [f"{ideal:.2f}" for ideal in ideals]
            print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
