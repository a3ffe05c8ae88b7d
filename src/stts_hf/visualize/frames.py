"""The frames that pictures are made of, decoded once more, small and not squashed as the model's are."""

import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from stts_hf.modeling.video_reading_stts import VideoFile, upright
from stts_hf.video.processors import measure

from .dimming import fit


def read_frames(video: Any, timestamps: Sequence[float], longest_side: int) -> np.ndarray:
    """
    The frames of a video file, or what else `VideoFile` takes, that are on screen at `timestamps` (F,), in seconds: as
    uint8 (F, height, width, 3) in their own proportions. Raises `ValueError` where the file cannot be read.
    """
    # The first decoding has warned of damaged files already. The filter is for this module's calls and stays in place:
    # `catch_warnings` would also hide warnings of the thread that decodes the next videos meanwhile.
    warnings.filterwarnings("ignore", category=UserWarning, module=re.escape(__name__))
    with VideoFile(video) as file:
        shown = on_screen(file, timestamps)
        frames, _ = file.read(shown, fit(*measure(file, shown), longest_side))
    return frames.permute(0, 2, 3, 1).numpy()


def on_screen(file: VideoFile, timestamps: Sequence[float]) -> list[int]:
    """Indices of the frames on screen at `timestamps` (seconds since the first frame), ascending, none twice."""
    found = np.searchsorted(file.times, np.asarray(timestamps) + 1e-6, side="right") - 1
    return np.unique(found.clip(min=0)).tolist()


class VideoStream(VideoFile):
    """A video file whose frames come one by one, so that no more than one is in memory, however long it is."""

    def frames(self, indices: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
        """The frames of ascending `indices` in their own size, uint8 (H, W, 3), after their index; no damaged ones."""
        wanted = set(indices)
        start = int(self.keyframes[0])
        decoded = self._count_frames() if self.pts is None else self._frames_from(start, list(indices))
        for index, frame in decoded:
            if index in wanted:
                yield index, upright(frame)
