"""What a selector keeps of what moves."""

import numpy as np
import pytest
import torch

from stts_hf.evaluation.motion import correlate, draw_clips, share_kept

MOVING = np.zeros((3, 4))
MOVING[1:, :2] = 1.0


def test_a_perfect_ranking_keeps_all_that_moves_and_its_opposite_nothing():
    scores = torch.from_numpy(MOVING) + torch.arange(12).view(3, 4) / 100
    for sign, kept in ((1, 1.0), (-1, 0.0)):
        # Frame 0 stays, so of 12 blocks 8 are those of frame 0 and half of the others.
        assert share_kept(sign * scores, MOVING, 1 / 3) == kept
    assert correlate(scores, MOVING) > 0.8 > -0.8 > correlate(-scores, MOVING)


def test_frame_0_says_nothing():
    scores = torch.from_numpy(MOVING).clone()
    before = correlate(scores, MOVING)
    scores[0] = torch.tensor([9.0, -9.0, 3.0, 7.0])
    assert correlate(scores, MOVING) == before == pytest.approx(1.0)


def test_nothing_that_moves_is_no_number():
    assert np.isnan(share_kept(torch.rand(3, 4), np.zeros((3, 4)), 0.5))


def test_clips_come_with_their_motion():
    clips = list(draw_clips(2, 6, 96, 12))
    assert all(clip.frames.shape == (6, 96, 96, 3) and clip.frames.dtype == np.uint8 for clip in clips)
    assert all(clip.moving.shape == (6, 12, 12) and clip.moving.any() for clip in clips)
    assert not np.array_equal(clips[0].moving, clips[1].moving)
