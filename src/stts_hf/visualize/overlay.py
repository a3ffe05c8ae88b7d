"""Writes a video with its dropped blocks dimmed, as MP4 with the video's timing."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import av
import numpy as np
from PIL import Image

from stts_hf.modeling.video_reading_stts import VideoFile

from .clip_files import video_writer
from .dimming import Array, as_array, check_outputs, dim_dropped_blocks, fit, frame_at
from .frames import VideoStream, on_screen

LONGEST_SIDE = 640  # pixels
MAX_FPS = 30
MAX_FRAMES = 5400  # three minutes at 30 per second; longer videos skip frames
# At most 2 Mbit/s, keyframes close together for seeking, no B-frames so that the last frame keeps its time.
BROWSER = {"crf": "23", "preset": "veryfast", "maxrate": "2M", "bufsize": "4M", "g": "60", "bf": "0"}


def write_overlays(
    video: Any,
    keep_masks: Mapping[str | os.PathLike, Array],
    grid: tuple[int, int],
    timestamps: Sequence[float],
    tubelet: int = 1,
    longest_side: int = LONGEST_SIDE,
    beside: bool = False,
) -> None:
    """
    Writes a video with its dropped blocks dimmed, one MP4 (H.264, yuv420p) for each of several masks. Each frame has
    the mask of the latest sampled frame. The video is decoded once, frame by frame; it keeps its timing, but has at
    most 30 frames a second, and 5400 in all.

    Args:
        video: a file, or what else `VideoFile` takes.
        keep_masks: by path of the MP4, as in `contact_sheet`; so are `grid`, `timestamps` and `tubelet`.
        longest_side: maximum pixels of a side; smaller videos keep their size, rounded to even numbers.
        beside: whether the video as it is stands on the left, so that the picture is twice as wide.

    Raises:
        ValueError: the video cannot be read, a mask does not fit, or PyAV was built without x264.
        TypeError: a mask that is not bool.
    """
    if "libx264" not in av.codecs_available:
        raise ValueError("Browsers play H.264, but the installed PyAV has no libx264. Install it by `pip install av`.")
    masks = {path: as_array(mask) for path, mask in keep_masks.items()}
    for mask in masks.values():
        check_outputs(len(timestamps), mask, grid, timestamps, None, tubelet)
    with VideoStream(video) as file, contextlib.ExitStack() as opened:
        indices = moments_to_show(file, timestamps)
        starts = file.times[indices]
        ends = dict(zip(indices, [*starts[1:], file.duration], strict=True))
        frame_of = dict(zip(indices, (frame_at(starts, timestamps) // tubelet).tolist(), strict=True))
        fps = min(max(len(indices) / file.duration, 1), MAX_FPS)
        writers = [
            (opened.enter_context(video_writer(path, fps, BROWSER, {"movflags": "faststart"})), mask)
            for path, mask in masks.items()
        ]
        shown: tuple[int, int] = file.shown_size(indices)
        height, width = fit(*shown, longest_side)
        for index, picture in file.frames(indices):
            small = np.asarray(Image.fromarray(picture).resize((width, height), Image.Resampling.BILINEAR))
            for write, mask in writers:
                tile = np.asarray(dim_dropped_blocks(small, mask[frame_of[index]], grid))
                write(np.hstack([small, tile]) if beside else tile, file.times[index], ends[index])


def moments_to_show(file: VideoFile, timestamps: Sequence[float]) -> list[int]:
    """Returns the indices of an overlay's frames: all, or within the limits with the sampled ones."""
    if file.fps <= MAX_FPS * 1.02 and len(file.times) <= MAX_FRAMES:
        return list(range(len(file.times)))
    moments = np.arange(0, file.duration, max(1 / MAX_FPS, file.duration / MAX_FRAMES))
    return on_screen(file, np.union1d(moments, timestamps).tolist())
