"""How many blocks are kept and which: the paper's counts, the naive reference, ties, and random rankings."""

import math
from fractions import Fraction

import pytest
import torch

from stts_hf.modeling.scoring_stts import num_kept_blocks, random_ranking, select_blocks
from tests.modeling.hidden_clips import GEOMETRIES, make_clips, random_scores
from tests.naive import naive_keep_mask
from tests.paper import KEPT_BLOCKS


@pytest.mark.parametrize(
    ("ratio", "videos", "expected"),
    [
        *KEPT_BLOCKS,
        pytest.param(0, [64, 64], 10368, id="128-frames-0"),
        pytest.param(1, [256], 0, id="256-frames-100"),
    ],
)
def test_counts_are_the_papers(ratio, videos, expected):
    assert sum(num_kept_blocks(frames, 81, ratio) for frames in videos) == expected


@pytest.mark.parametrize("percent", range(0, 100, 5))
def test_budget_is_exact_for_decimal_ratios(percent):
    ratio = percent / 100
    for frames in [*range(1, 130), 256, 1024]:
        for blocks in (1, 9, 80, 81):
            dropped = min(math.floor(Fraction(percent, 100) * frames * blocks), (frames - 1) * blocks)
            assert num_kept_blocks(frames, blocks, ratio) == frames * blocks - dropped, (frames, blocks)


@pytest.mark.parametrize(("ratio", "expected"), [(0, 9), (0.5, 9), (0.999, 9), (1, 0)])
def test_a_single_frame_loses_nothing_below_ratio_one(ratio, expected):
    assert num_kept_blocks(1, 9, ratio) == expected


def test_a_budget_beyond_the_other_frames_leaves_frame_zero():
    grids = [(3, 2, 2)]
    kept = num_kept_blocks(3, 4, 0.9)  # floor(10.8) of 12, but only 8 may go
    keep_mask, kept_blocks = select_blocks(torch.arange(12, 0, -1).float() * -1, grids, [kept])
    assert kept_blocks.tolist() == [0, 1, 2, 3]
    assert keep_mask.tolist() == [True] * 4 + [False] * 8


@pytest.mark.parametrize("ratio", [0, 0.2, 0.5, 0.77, 0.95, 1])
@pytest.mark.parametrize("levels", [1000, 3, 1], ids=["no-ties", "many-ties", "all-equal"])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_selection_is_the_naive_one(geometry, ratio, levels):
    clips = make_clips(*GEOMETRIES[geometry])
    scores = (random_scores(clips).detach() * levels).floor() / levels
    num_kept = [num_kept_blocks(frames, rows * cols, ratio) for frames, rows, cols in clips.grids]
    keep_mask, kept_blocks = select_blocks(scores, clips.grids, num_kept)
    expected = torch.cat([naive_keep_mask(video, ratio).flatten() for video in clips.split(scores)])
    assert torch.equal(keep_mask, expected)
    assert torch.equal(kept_blocks, expected.nonzero().squeeze(-1))


def test_scores_that_are_no_numbers_go_first_but_not_before_frame_zero():
    scores = torch.tensor([math.nan, 0.1, math.nan, 0.9, math.inf, math.nan])
    keep_mask, _ = select_blocks(scores, [(3, 1, 2)], [4])
    assert keep_mask.tolist() == [True, True, False, True, True, False]


def test_infinite_scores_do_not_displace_frame_zero():
    scores = torch.tensor([0.5, 0.5, math.inf, math.inf, math.inf, math.inf])
    keep_mask, _ = select_blocks(scores, [(3, 1, 2)], [3])
    assert keep_mask.tolist() == [True, True, False, False, False, True]


def test_a_seeded_random_ranking_of_a_video_does_not_depend_on_its_batch():
    grids = [(3, 2, 2), (2, 3, 3)]
    together = random_ranking(grids, torch.device("cpu"), seed=4)
    apart = [random_ranking([grid], torch.device("cpu"), seed=4) for grid in grids]
    assert torch.equal(together, torch.cat(apart))
    assert not torch.equal(together, random_ranking(grids, torch.device("cpu"), seed=5))


def test_a_random_ranking_without_a_seed_follows_the_global_generator():
    grids = [(3, 2, 2)]
    torch.manual_seed(0)
    first, second = random_ranking(grids, torch.device("cpu")), random_ranking(grids, torch.device("cpu"))
    torch.manual_seed(0)
    assert torch.equal(first, random_ranking(grids, torch.device("cpu")))
    assert not torch.equal(first, second)


def test_a_seeded_random_ranking_leaves_the_global_generator_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    random_ranking([(3, 2, 2)], torch.device("cpu"), seed=4)
    assert torch.equal(torch.rand(3), expected)
