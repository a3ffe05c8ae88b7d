"""Which frames of a video are shown, and when."""

from dataclasses import dataclass

import numpy as np
from transformers.video_utils import VideoMetadata

TOLERANCE = 1e-6  # seconds: a moment that rounding put just before a frame's time still means that frame


@dataclass
class STTSVideoMetadata(VideoMetadata):
    """`VideoMetadata` with the real time of every frame shown, so that it holds for variable frame rates too.

    Attributes:
        frames_indices: frames shown, counted in the order of showing.
        frame_times: seconds since the first frame of the video, one per frame shown.
        num_damaged: frames that should have been shown and are damaged. The whole frame before is shown instead, once,
            so that fewer frames than wanted may be left.
    """

    frame_times: list[float] | None = None
    num_damaged: int = 0

    @property
    def timestamps(self) -> list[float]:
        """Seconds since the first frame of the video, one per frame shown."""
        return super().timestamps if self.frame_times is None else self.frame_times

    def choose(self, indices: list[int]) -> None:
        """Shows these of all frames."""
        self.frames_indices = indices
        if self.frame_times is not None:
            self.frame_times = [self.frame_times[index] for index in indices]


def sample_times(times: np.ndarray, duration: float, num_frames: int | None, rate: float | None) -> list[int]:
    """Which frames to show, as the reference samples (Molmo2's `uniform_last_frame`): always up to and with the last.

    The frames on screen at `0, 1/rate, 2/rate, ... (< duration), duration` where the budget allows, else at
    `num_frames` evenly spaced moments including both ends. A budget of one frame shows the last.

    Args:
        times: when each frame is shown, float64 `(T,)`, ascending seconds from 0; the last stays until `duration`.
        num_frames: budget, `None` for no limit.
        rate: moments per second wanted, `None` for as many as the budget allows.

    Returns:
        Ascending indices of frames, none twice, so there may be fewer frames than moments.
    """
    if num_frames == 1:
        return [len(times) - 1]
    if num_frames is not None and (rate is None or (num_frames - 1) / rate < duration):
        step = duration / (num_frames - 1)
    elif rate is not None:
        step = min(1 / rate, duration)
    else:
        raise ValueError("Sampling needs num_frames, max_fps or fps, all of them are None. Set num_frames.")
    # Worked out per frame, not per moment: fps=1e6 asks for billions of moments, and shows each frame once.
    moments = np.ceil((times - TOLERANCE) / step) * step  # the first that each frame is there for
    shown = moments + TOLERANCE < np.append(times[1:], np.inf)
    shown[-1] = True
    return np.flatnonzero(shown).tolist()
