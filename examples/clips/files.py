"""Video files of drawn frames."""

import os
from collections.abc import Iterable

import numpy as np

from stts_hf.visualize.clip_files import video_writer


def write_video(path: str | os.PathLike, frames: Iterable[np.ndarray], fps: float, **options: str) -> None:
    """Writes frames, uint8 (height, width, 3) of even sizes, as H.264, or else MPEG-4. options: of the encoder."""
    with video_writer(path, fps, options) as write:
        for frame in frames:
            write(frame)
