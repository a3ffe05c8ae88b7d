"""What FLOPs allow in every preset, worked out in closed form and not measured; docs/benchmarks/notes.md has it:
`python -m tests.stts_hf.benchmark.ideals`.
"""

import math
from typing import Any

from stts_hf.benchmark.geometries import GEOMETRIES
from stts_hf.benchmark.presets import PRESETS, Workload
from stts_hf.modeling.configuration_stts import STTSConfig
from stts_hf.modeling.configuration_stts_smolvlm import STTSSmolVLMConfig
from tests.stts_hf.benchmark import formulas

AFTER = "evs"  # a selector that drops where the tower ends


def num_frames(workload: Workload) -> int:
    """Of the tower: Qwen3-VL merges two video frames into one."""
    is_raster = isinstance(GEOMETRIES[workload.geometry].config(), STTSConfig | STTSSmolVLMConfig)
    return workload.frames if is_raster else -(-workload.frames // 2)


def flops(workload: Workload, ratio: float | None, lengths: list[int] | None = None) -> float:
    """
    FLOPs of one pass, as `stts_hf.benchmark.meters` counts them with scaled dot product attention.

    lengths: how many patches of each frame of the tower survive; by default they are spread evenly over the frames.
    """
    config: Any = GEOMETRIES[workload.geometry].config()
    vision, blocks, frames = config.vision_config, math.prod(GEOMETRIES[workload.geometry].grid), num_frames(workload)
    is_molmo2, is_smolvlm = isinstance(config, STTSConfig), isinstance(config, STTSSmolVLMConfig)
    is_raster = is_molmo2 or is_smolvlm
    window = 9 if is_molmo2 else (config.scale_factor if is_smolvlm else vision.spatial_merge_size) ** 2
    layers = vision.num_hidden_layers if is_raster else vision.depth
    heads = vision.num_attention_heads if is_raster else vision.num_heads
    patches, width = window * blocks, vision.hidden_size
    everything = frames * patches
    if lengths is None:
        lengths = [round((1 - (ratio or 0.0)) * patches)] * frames
    left = sum(lengths) // window  # blocks
    in_tower = [patches] * frames if ratio is None or workload.selector == AFTER else lengths
    kept = sum(in_tower)

    # Products and attention in the layers of ViT and LLM, which checkpointing computes again; products elsewhere.
    pooling = 0
    if is_molmo2:
        embedding = formulas.patch_embedding(config, everything)
        outside = embedding + formulas.connector_linears(config, kept // window)
        pooling = formulas.connector_attention(config, kept // window)
    elif is_smolvlm:
        embedding = formulas.patch_embedding(config, everything)
        outside = embedding + 2 * kept * width * config.text_config.hidden_size
    else:
        embedding = 2 * everything * vision.in_channels * vision.temporal_patch_size * vision.patch_size**2 * width
        merger = 2 * (window * width) ** 2 + 2 * window * width * vision.out_hidden_size
        outside = embedding + (1 + len(vision.deepstack_visual_indexes)) * (kept // window) * merger
    patches_of_layers = layers * everything
    if ratio is None:
        linears = formulas.vision_linears(config, layers, everything)
        attention = formulas.vision_attention(config, layers, in_tower)
    else:
        dense = (vision.pruning_layer if workload.pruning_layer is None else workload.pruning_layer) + 1
        patches_of_layers = dense * everything + (layers - dense) * kept
        linears = formulas.vision_linears(config, dense, everything)
        linears += formulas.pruning_layer_linears(config, frames, patches, kept)
        if not is_raster:  # one product for queries, keys and values, of all patches
            linears += 2 * (everything - kept) * width**2
        linears += formulas.vision_linears(config, layers - dense - 1, kept)
        head_dim = width // heads
        if workload.selector == "scorer":
            outside += formulas.scorer(config, frames * blocks, window)
            if ratio > 0:
                head_dim = formulas.biased_head_dim(head_dim, workload.dtype)
        attention = formulas.vision_attention(config, dense, [patches] * frames)
        attention += 4 * kept * patches * heads * head_dim
        attention += formulas.vision_attention(config, layers - dense - 1, in_tower)
    tokens = 0
    if workload.mode != "tower":
        tokens = left + frames * (2 + workload.timestamp_tokens) + workload.text_tokens
        linears += formulas.text_linears(config, tokens)
        of_text = formulas.text_attention(config, tokens)
        attention += of_text if is_molmo2 else of_text * (tokens + 1) // (2 * tokens)  # causal
        outside += formulas.head(config, tokens if workload.mode == "training" else 1)
    total: float = linears + attention + outside + pooling
    if workload.mode == "training":
        total += 2 * (linears + outside) + 2.5 * (attention + pooling) - embedding  # pixels have no gradient
        if workload.checkpointing:
            total += linears + attention - formulas.last_products(config, patches_of_layers, tokens)
    return workload.batch * total


def main() -> None:
    ratios = (0.0, 0.3, 0.4, 0.5, 0.7)
    print("| FLOP ideal over stock | stock, TFLOP | ViT's share |", *(f"{k:.0%} | after the ViT |" for k in ratios))
    print("|---|---:|---:|" + "---:|" * 2 * len(ratios))
    for name, preset in PRESETS.items():
        for workload in preset.workloads:
            if "moe" in workload.geometry or "3-5" in workload.geometry:
                continue  # there are no formulas of experts and recurrent layers
            stock = flops(workload, None)
            tower = flops(workload._replace(mode="tower"), None) * (3 if workload.mode == "training" else 1)
            tokens = workload.batch * num_frames(workload) * math.prod(GEOMETRIES[workload.geometry].grid)
            cells = [f"{name}: {workload.geometry}, {workload.frames} frames, {tokens} tokens, {workload.mode}"]
            cells += [f"{stock / 1e12:.4g}", f"{tower / stock:.0%}" if workload.mode == "inference" else ""]
            for ratio in ratios:
                ideals = (stock / flops(workload._replace(selector=it), ratio) for it in ("scorer", AFTER))
                cells += [f"{ideal:.3f}" for ideal in ideals]
            print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
