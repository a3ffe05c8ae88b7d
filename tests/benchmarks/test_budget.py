"""The mixture of videos keeps by threshold what its ratios keep, and more of busy videos than of still ones."""

import pytest
import torch

from examples.benchmarks.budget import CHANGES, MEAN, NOTHING, RATIOS, THRESHOLD, draw_video, measure_mixture
from stts_hf.benchmark.presets import Workload


@pytest.mark.parametrize("geometry", ["tiny", "qwen3-vl-tiny"])
def test_a_mixture_costs_by_threshold_what_its_ratios_cost(geometry):
    cell = measure_mixture(Workload("inference", geometry, 8, text_tokens=5, timestamp_tokens=2), 1)
    flops = {variant["name"]: variant["stages"]["total"]["flops"] for variant in cell["variants"]}
    assert list(flops) == [NOTHING, THRESHOLD, RATIOS, MEAN]
    assert flops[THRESHOLD] == flops[RATIOS] < flops[NOTHING]
    assert all(len(variant["stages"]["total"]["seconds"]) == 1 for variant in cell["variants"])


def test_videos_change_as_much_as_they_should():
    inputs = {"pixel_values_videos": torch.zeros(3 * 400, 5)}
    for share in set(CHANGES):
        frames = draw_video(inputs, 3, share, seed=0)["pixel_values_videos"].view(3, 400, 5)
        changed = ((frames[1:] - frames[:-1]).abs().amax(-1) > 0.2).float().mean()
        assert abs(float(changed) - share) < 0.05
