"""The tower computes what it must and nothing else: FLOPs counted on the way equal those written out."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.modeling.towers import video_inputs
from tests.tiny import patch_grid, tiny_config, tiny_model

FRAMES = [4, 2]


def count(feature_layers, pruning_ratio: float, **overrides) -> tuple[int, int]:
    """FLOPs counted and expected. Plain matrix products, as the counter knows not all kernels of a CPU."""
    config = tiny_config(feature_layers=feature_layers, **overrides)
    config.vision_config._attn_implementation = "eager"
    model = tiny_model(config)
    tower = model.model.vision_tower
    outputs = []
    hook = tower.register_forward_hook(lambda module, args, output: outputs.append((args[1], output)))
    counter = FlopCounterMode(tower, display=False)
    with torch.no_grad(), counter:
        model.model.get_video_features(**video_inputs(config, FRAMES), pruning_ratio=pruning_ratio)
    hook.remove()
    ((pruning, output),) = outputs
    counted = counter.get_flop_counts()["STTSVisionModel"]
    kept = output.keep_mask.view(sum(FRAMES), -1).sum(-1) * pruning.block_patches.shape[1]
    expected = expected_flops(config.vision_config, kept.tolist(), max(feature_layers), pruning_ratio)
    return sum(counted.values()), expected


def expected_flops(config, kept: list[int], last_layer: int, pruning_ratio: float) -> int:
    """kept: surviving patches of each frame. Two FLOPs for a product and its sum."""
    rows, cols = patch_grid(config)
    size, width, mlp = rows * cols, config.hidden_size, config.intermediate_size  # N, D, M
    patches, survivors = sum(FRAMES) * size, sum(kept)
    window = config.pooling_size[0] * config.pooling_size[1]
    blocks, layer = patches // window, config.pruning_layer
    projection, mlp_per_patch = width * width, 2 * width * mlp  # of q, k, v and o each

    embedding = patches * config.patch_size**2 * config.num_channels * width
    dense = patches * (4 * projection + mlp_per_patch + 2 * size * width)
    # Keys and values are never made: their weights meet the query and, per head, the weighted sum of a block's patches.
    over_window = window * config.num_attention_heads * width
    pooler = blocks * (4 * projection + width + 2 * over_window)
    scorer = pooler + blocks * (2 * width * mlp + mlp * mlp + mlp)
    # Layer l + 1: keys and values of all, everything else of the kept. The bias makes its heads longer, 8 -> 16.
    heads = config.num_attention_heads
    longer = heads * (16 if pruning_ratio > 0 else 8)
    biased = 2 * patches * projection + survivors * (2 * projection + mlp_per_patch + 2 * size * longer)
    sparse = survivors * (4 * projection + mlp_per_patch) + sum(2 * n * n * width for n in kept)
    total = embedding + (layer + 1) * dense + scorer
    if survivors:
        total += biased * (last_layer > layer) + sparse * max(last_layer - layer - 1, 0)
    return 2 * total


@pytest.mark.parametrize("pruning_ratio", [0.0, 0.3, 0.5, 0.8, 1.0])
@pytest.mark.parametrize(
    "feature_layers", [(5, 1), (4, 2), (3,), (2, 0)], ids=["to_the_last", "one_less", "only_l_plus_1", "none_after_l"]
)
def test_counted_flops_are_those_written_out(feature_layers, pruning_ratio):
    counted, expected = count(feature_layers, pruning_ratio)
    assert counted == expected


def test_without_loss_is_stock_and_the_scorer():
    """At `k = 0` the scorer is all that comes on top of the layers that stock Molmo2 runs."""
    counted, _ = count((5, 1), 0.0)
    config = tiny_config()
    config.vision_config._attn_implementation = "eager"
    model = tiny_model(config)
    inputs = video_inputs(config, FRAMES)
    with torch.no_grad(), FlopCounterMode(display=False) as stock:
        model.model.vision_tower(inputs["pixel_values_videos"])
    table = inputs["video_token_pooling"]
    patches = torch.randn(*table.shape, config.vision_config.hidden_size)
    grids = [tuple(grid) for grid in inputs["video_grids"].tolist()]
    with torch.no_grad(), FlopCounterMode(display=False) as scorer:
        model.model.vision_tower.scorer(patches, grids)
    assert counted == stock.get_total_flops() + scorer.get_total_flops()
