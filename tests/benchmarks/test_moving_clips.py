"""What a ranking keeps of what moves, on clips whose motion is known."""

import math

import numpy as np
import pytest
import torch

from examples.benchmarks.moving_clips import correlate, draw_clips, share_kept

MOVING = np.zeros((3, 4))
MOVING[1:, :2] = 1.0


def test_a_perfect_ranking_keeps_all_that_moves_and_its_opposite_nothing():
    scores = torch.from_numpy(MOVING) + torch.arange(12).view(3, 4) / 100
    for sign, kept in ((1, 1.0), (-1, 0.0)):
        # Frame 0 stays, so of 12 blocks 8 are those of frame 0 and half of the others.
        assert share_kept(sign * scores, MOVING, 1 / 3) == kept
    assert correlate(scores, MOVING) > 0.8 > -0.8 > correlate(-scores, MOVING)


def test_ranks_that_tie_share_their_mean():
    first, second = torch.tensor([[0, 0, 0, 0], [1, 2, 2, 3]]), np.array([[9, 9, 9, 9], [10, 30, 20, 40]])
    # Ranks 1, 2.5, 2.5, 4 and 1, 3, 2, 4; frame 0 does not count.
    assert correlate(first, second) == pytest.approx(4.5 / math.sqrt(22.5))


def test_what_is_constant_has_no_figure():
    assert math.isnan(correlate(torch.ones(3, 4), MOVING))
    assert math.isnan(share_kept(torch.rand(3, 4), np.zeros((3, 4)), 0.5))


def test_shapes_move_and_snow_does_not():
    first, second = draw_clips(2, 6, 96, 12)
    assert first.frames.shape == (6, 96, 96, 3)
    assert first.frames.dtype == np.uint8
    assert not np.array_equal(first.moving, second.moving)
    for clip in (first, second):
        assert not clip.moving[0].any()
        assert clip.moving[1:].any((1, 2)).all()
        changed = np.abs(np.diff(clip.frames.astype(int), axis=0)).max(-1).reshape(5, 12, 8, 12, 8).mean((2, 4))
        assert (changed[~clip.moving[1:]] > 20).any()
