"""Which moments of a video the model sees: the paper's recipe, as plain functions."""

import math
from fractions import Fraction
from typing import Any

import numpy as np


def check_ratio(pruning_ratio: Any) -> None:
    """Raises `ValueError` unless `pruning_ratio` is a number from 0 to 1."""
    if not isinstance(pruning_ratio, int | float) or not 0 <= pruning_ratio <= 1:
        raise ValueError(f"pruning_ratio must be a number from 0 to 1, got {pruning_ratio!r}.")


def frame_budget(num_frames: int, pruning_ratio: float) -> int:
    """Frames that cost as many tokens after pruning as `num_frames` cost without (paper, test-time scaling).

    Returns `ceil(num_frames / (1 - pruning_ratio))`: 92, 107, 128 for 64 frames at 30, 40, 50 %. Exact where floating
    point is not: 7 frames at 0.3 give 10.

    Raises:
        ValueError: `pruning_ratio` is outside `[0, 1)`; at 1 nothing is left to fill up.
    """
    check_ratio(pruning_ratio)
    if pruning_ratio == 1:
        raise ValueError(
            "test_time_scaling=True needs pruning_ratio below 1, got 1: no video token is kept, so no number of frames "
            "makes up for it. Lower pruning_ratio or set test_time_scaling=False."
        )
    kept = 1 - Fraction(pruning_ratio).limit_denominator(1_000_000)
    return math.ceil(num_frames / kept)


def sample_times(duration: float, num_frames: int | None, rate: float | None) -> np.ndarray:
    """Moments to show, as the reference samples (Molmo2's `uniform_last_frame`): always up to and including the end.

    Args:
        duration: seconds from the first frame to the end of the last.
        num_frames: budget, `None` for no limit.
        rate: moments per second wanted, `None` for as many as the budget allows.

    Returns:
        float64 seconds, ascending: `0, 1/rate, 2/rate, ... (< duration), duration` where the budget allows, else
        `num_frames` evenly spaced moments including both ends. A budget of one frame shows the last.
    """
    if num_frames == 1:
        return np.array([duration])
    if num_frames is not None and (rate is None or (num_frames - 1) / rate < duration):
        return np.linspace(0.0, duration, num=num_frames)
    if rate is None:
        raise ValueError("Sampling needs num_frames, max_fps or fps, all of them are None. Set num_frames.")
    return np.append(np.arange(0.0, duration, 1 / rate), duration)


def sample_indices(total: int, fps: float, num_frames: int | None, rate: float | None) -> np.ndarray:
    """`sample_times` for `total` frames that are decoded already, `fps` of them per second: indices, none twice.

    As the reference does for arrays, the end is the last frame itself rather than the moment it leaves the screen.
    """
    if num_frames == 1:
        return np.array([total - 1])
    if total <= 2:
        return np.arange(total)
    if num_frames is not None and (rate is None or (num_frames - 1) / rate < total / fps):
        return np.linspace(0, total - 1, num=min(num_frames, total)).astype(int)
    if rate is None:
        raise ValueError("Sampling needs num_frames, max_fps or fps, all of them are None. Set num_frames.")
    return np.unique(np.append(np.round(np.arange(0.0, total - 1, fps / rate)), total - 1).astype(int))
