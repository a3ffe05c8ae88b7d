"""The tower computes what it must and nothing else: FLOPs counted on the way equal those written out."""

import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.modeling.towers import video_inputs
from tests.stts_hf.benchmark import formulas
from tests.tiny import patch_grid, tiny_config, tiny_model

FRAMES = [4, 2]


def count(feature_layers, pruning_ratio: float, **overrides) -> tuple[int, int]:
    """FLOPs counted and expected. Plain matrix products, as the counter knows not all kernels of a CPU."""
    config = tiny_config(feature_layers=feature_layers, **overrides)
    model = tiny_model(config)
    tower = model.model.vision_tower
    outputs = []
    hook = tower.register_forward_hook(lambda module, args, output: outputs.append((args[1], output)))
    counter = FlopCounterMode(tower, display=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        model.model.get_video_features(**video_inputs(config, FRAMES), pruning_ratio=pruning_ratio)
    hook.remove()
    ((pruning, output),) = outputs
    counted = counter.get_flop_counts()["STTSVisionModel"]
    kept = torch.cat(output.keep_mask).view(sum(FRAMES), -1).sum(-1) * pruning.block_patches.shape[1]
    expected = expected_flops(config, kept.tolist(), max(feature_layers), pruning_ratio)
    return sum(counted.values()), expected


def expected_flops(config, kept: list[int], last_layer: int, pruning_ratio: float) -> int:
    """kept: surviving patches of each frame."""
    rows, cols = patch_grid(config.vision_config)
    size, layer = rows * cols, config.vision_config.pruning_layer
    patches = sum(FRAMES) * size
    total = formulas.patch_embedding(config, patches)
    total += formulas.vision_layers(config, layer + 1, [size] * sum(FRAMES))
    total += formulas.scorer(config, patches // math.prod(config.vision_config.pooling_size))
    if sum(kept) and last_layer > layer:
        longer = formulas.biased_head_dim(config.vision_config.head_dim, "float32") if pruning_ratio > 0 else None
        total += formulas.pruning_layer(config, sum(FRAMES), size, kept, longer)
        total += formulas.vision_layers(config, last_layer - layer - 1, kept)
    return total


@pytest.mark.parametrize("pruning_ratio", [0.0, 0.3, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("feature_layers", [(5, 1), (4, 2), (3,)], ids=["to_the_last", "one_less", "only_l_plus_1"])
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
