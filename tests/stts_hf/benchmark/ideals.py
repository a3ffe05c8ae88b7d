"""Prints what FLOPs allow in every preset, worked out and not measured: `python -m tests.stts_hf.benchmark.ideals`."""

from stts_hf.benchmark.geometries import GEOMETRIES
from stts_hf.benchmark.presets import PRESETS, Workload
from stts_hf.modeling.configuration_stts import STTSConfig
from tests.stts_hf.benchmark import formulas


def flops(workload: Workload, ratio: float | None, lengths: list[int] | None = None) -> float:
    """
    FLOPs of one pass, as `torch.utils.flop_counter` counts them with scaled dot product attention.

    lengths: how many patches of each frame of a row survive; by default they are spread evenly over the frames.
    """
    config = GEOMETRIES[workload.geometry].config()
    vision = config.vision_config
    rows, cols = vision.block_grid
    blocks, patches, frames = rows * cols, 9 * rows * cols, workload.frames
    if lengths is None:
        lengths = [round((1 - (ratio or 0.0)) * patches)] * frames
    kept = sum(lengths)
    layers, dense = vision.num_hidden_layers, vision.pruning_layer + 1

    # Products and attention in the layers of ViT and LLM, which checkpointing computes again; products elsewhere.
    outside = formulas.patch_embedding(config, frames * patches) + formulas.connector_linears(config, kept // 9)
    patches_of_layers = layers * frames * patches
    if ratio is None:
        linears = formulas.vision_linears(config, layers, frames * patches)
        attention = formulas.vision_attention(config, layers, [patches] * frames)
    else:
        patches_of_layers = dense * frames * patches + (layers - dense) * kept
        head_dim = formulas.biased_head_dim(config, workload.dtype) if ratio > 0 else None
        outside += formulas.scorer(config, frames * blocks)
        linears = formulas.vision_linears(config, dense, frames * patches)
        linears += formulas.pruning_layer_linears(config, frames, patches, kept)
        linears += formulas.vision_linears(config, layers - dense - 1, kept)
        attention = formulas.vision_attention(config, dense, [patches] * frames)
        attention += formulas.pruning_layer_attention(config, patches, kept, head_dim)
        attention += formulas.vision_attention(config, layers - dense - 1, lengths)
    tokens = 0
    if workload.mode != "tower":
        tokens = kept // 9 + frames * (2 + workload.timestamp_tokens) + workload.text_tokens
        linears += formulas.text_linears(config, tokens)
        attention += formulas.text_attention(config, tokens)
        outside += formulas.head(config, tokens if workload.mode == "training" else 1)
    pooling = formulas.connector_attention(config, kept // 9)
    total: float = linears + attention + outside + pooling
    if workload.mode == "training":
        total += 2 * (linears + outside) + 2.5 * (attention + pooling)
        total -= formulas.patch_embedding(config, frames * patches)  # pixels have no gradient
        if workload.checkpointing:
            total += linears + attention - formulas.last_products(config, patches_of_layers, tokens)
    return workload.batch * total


def main() -> None:
    for preset in PRESETS.values():
        for workload in preset.workloads:
            if not isinstance(GEOMETRIES[workload.geometry].config(), STTSConfig):
                continue  # ideals_qwen3_vl
            stock = flops(workload, None)
            ideals = [
                f"k = {ratio:g}: {stock / flops(workload, ratio):.3f}" for ratio in sorted({0.0, *workload.ratios})
            ]
            frames = workload.batch * workload.frames
            what = f"{preset.name:<16}{workload.mode:<10} {workload.backend:<15}{frames:>5} frames"
            print(f"{what} {stock / 1e12:>9.3f} TFLOP  ", *ideals)


if __name__ == "__main__":
    main()
