"""The comparison of selectors that need no training: FLOPs, and what rankings find on clips of known motion."""

import pytest
import torch

from examples.benchmarks.training_free import PROMPT, measure_methods

pytestmark = pytest.mark.slow
TINY = PROMPT._replace(
    geometry="qwen3-vl-tiny", frames=8, ratios=(0.5,), text_tokens=16, timestamp_tokens=2, decode_tokens=1
)


@pytest.fixture(scope="module")
def cells():
    with pytest.MonkeyPatch.context() as fewer:
        fewer.setattr("examples.benchmarks.training_free.CLIPS", 3)
        found = list(measure_methods(torch.device("cpu"), 1, None, TINY))
    return {cell["workload"]["selector"]: cell for cell in found}


def test_evs_saves_in_the_language_model_alone(cells):
    def flops(method, variant, stage):
        return cells[method]["variants"][variant]["stages"][stage]["flops"]

    assert (
        flops("evs", 1, "language_model") == flops("cosine", 1, "language_model") < flops("cosine", 0, "language_model")
    )
    assert flops("cosine", 1, "vision_tower") < flops("evs", 1, "vision_tower") == flops("evs", 0, "vision_tower")


@pytest.mark.parametrize("method", ["cosine", "evs", "random"])
def test_what_ranks_by_change_finds_what_moves(cells, method):
    """Random weights let change through; a random ranking of 1008 blocks correlates by 1 / 32, a standard deviation."""
    found = cells[method]["variants"][1]["motion"]["correlation"]
    assert len(found) == 3
    assert max(map(abs, found)) < 0.15 if method == "random" else sum(found) / 3 > 0.2
