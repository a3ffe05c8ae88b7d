"""Draws the sample video that the package ships, in any size and length."""

import os
from collections.abc import Iterable, Iterator

import numpy as np

from .drawing import COLOURS, draw_background, draw_shape
from .files import write_video

# Start and end (fractions of the clip), shape, colour, radius and centre.
FLASHES = (
    (0.2, 0.32, "H", "white", 0.11, (0.18, 0.16)),
    (0.4, 0.48, "diamond", "green", 0.06, (0.5, 0.84)),
    (0.7, 0.78, "diamond", "pink", 0.06, (0.16, 0.84)),
)


def draw_sample_clip(
    path: str | os.PathLike, seconds: float = 3.875, fps: float = 8, size: tuple[int, int] = (360, 360)
) -> None:
    """
    Writes a clip of what `stts_hf.visualize.sample_clip` describes. Every run writes the same frames.

    Args:
        path: of the file; the suffix chooses the container (`.mp4`, `.mkv`, ...).
        seconds: length of the clip; it holds `round(seconds * fps)` frames.
        fps: frames per second.
        size: height and width in pixels, even numbers of at least 64.
    """
    height, width = size
    num_frames = round(seconds * fps)
    times = (number / fps for number in range(num_frames))
    bit_rate = str(8 * height * width)
    write_video(path, sample_frames(times, seconds, height, width), fps, b=bit_rate)


def sample_frames(times: Iterable[float], seconds: float, height: int, width: int) -> Iterator[np.ndarray]:
    """The sample clip's frames, uint8 (height, width, 3), at `times` of a clip of so many seconds."""
    generator = np.random.default_rng(0)
    background = draw_background(generator, height + 2, width + 2)[1:-1, 1:-1]
    noise = generator.normal(0, 1.5, (2 * height, 2 * width, 1)).astype(np.float32)
    for time in times:
        frame = background.copy()
        done = time / seconds
        draw_shape(frame, "square", COLOURS["blue" if done < 0.5 else "yellow"], 0.09, (0.82, 0.18))
        draw_shape(frame, "ring", COLOURS["red"], 0.11, (0.16 + 0.68 * done, 0.5))
        for start, end, shape, colour, radius, place in FLASHES:
            if start <= done < end:
                draw_shape(frame, shape, COLOURS[colour], radius, place)
        chance = np.random.default_rng((0, round(time * 1000)))
        top, left = chance.integers(0, (height, width))
        frame += noise[top : top + height, left : left + width] + chance.uniform(-3, 3)
        yield frame.clip(0, 255).astype(np.uint8)
