"""Frames for pictures: decoded once more, small, in the video's aspect ratio."""

import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from stts_hf.modeling.video_reading_stts import VideoFile, upright
from stts_hf.video.processors import measure

from .dimming import fit, frame_at


def read_frames(video: Any, timestamps: Sequence[float], longest_side: int) -> np.ndarray:
    """Returns the frames on screen at `timestamps` (F,), in seconds, as uint8 (F, height, width, 3)."""
    # The first decoding has already warned of damaged files. The filter applies to this module's calls and stays:
    # `catch_warnings` would also hide the warnings of decoding threads.
    warnings.filterwarnings("ignore", category=UserWarning, module=re.escape(__name__))
    with VideoStream(video) as file:
        shown = on_screen(file, timestamps)
        height, width = file.shown_size(shown)
        frames, _ = file.read(shown, fit(height, width, longest_side))
    return frames.permute(0, 2, 3, 1).numpy()


def on_screen(file: VideoFile, timestamps: Sequence[float]) -> list[int]:
    """Returns the unique, ascending indices of the frames on screen at `timestamps`, in seconds."""
    return np.unique(frame_at(timestamps, file.times)).tolist()


class VideoStream(VideoFile):
    """A video file that yields frames one by one, with at most one in memory, and knows how players show them."""

    def shown_size(self, indices: Sequence[int]) -> tuple[int, int]:
        """Height and width of frames on screen: `measure`, where pixels are square. The model sees stored pixels."""
        height, width = measure(self, indices)
        aspect = float(self._stream.sample_aspect_ratio or 1)
        is_turned = height != width and (height, width) == (self._codec.width, self._codec.height)
        return (round(height * aspect), width) if is_turned else (height, round(width * aspect))

    def frames(self, indices: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
        """Yields index and frame, uint8 (H, W, 3), for ascending `indices`; skips damaged frames."""
        wanted = set(indices)
        start = int(self.keyframes[0])
        decoded = self._count_frames() if self.pts is None else self._frames_from(start, list(indices))
        for index, frame in decoded:
            if index in wanted:
                yield index, upright(frame)
