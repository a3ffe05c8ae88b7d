"""Prints what FLOPs allow in every preset, worked out and not measured: `python -m tests.stts_hf.benchmark.ideals`."""

from stts_hf.benchmark.geometries import geometry_config
from stts_hf.benchmark.presets import PRESETS
from stts_hf.benchmark.workloads import Workload
from tests.stts_hf.benchmark import formulas


def flops(workload: Workload, ratio: float | None) -> float:
    """FLOPs of one pass, with the survivors spread evenly over the frames."""
    config = geometry_config(workload.geometry)
    vision = config.vision_config
    rows, cols = vision.block_grid
    blocks, patches, frames = rows * cols, 9 * rows * cols, workload.frames
    kept = 1 - (ratio or 0.0)
    layers, dense = vision.num_hidden_layers, vision.pruning_layer + 1
    total = formulas.patch_embedding(config, frames * patches)
    if ratio is None:
        total += formulas.vision_layers(config, layers, [patches] * frames)
    else:
        lengths = [round(kept * patches)] * frames
        total += formulas.vision_layers(config, dense, [patches] * frames) + formulas.scorer(config, frames * blocks)
        total += formulas.pruning_layer(config, frames, patches, lengths)
        total += formulas.vision_layers(config, layers - dense - 1, lengths)
    total += formulas.connector(config, round(kept * frames * blocks))
    if workload.mode != "tower":
        tokens = round(kept * frames * blocks) + frames * (2 + workload.timestamp_tokens) + workload.text_tokens
        total += formulas.text_linears(config, tokens) + formulas.text_attention(config, tokens)
        total += formulas.head(config, tokens if workload.mode == "training" else 1)
    if workload.mode == "training":  # twice as much back, and once more where activations are computed again
        total *= 4 if workload.checkpointing else 3
    return workload.batch * total


def main() -> None:
    for preset in PRESETS.values():
        for workload in preset.workloads:
            stock = flops(workload, None)
            ideals = [f"k = {ratio:g}: {stock / flops(workload, ratio):.3f}" for ratio in workload.ratios]
            print(
                f"{preset.name:<16}{workload.mode:<10} {workload.total_frames:>5} frames {stock / 1e12:>9.3f} TFLOP  ",
                *ideals,
            )


if __name__ == "__main__":
    main()
