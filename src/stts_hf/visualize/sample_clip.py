"""A clip to try things on, made here rather than shipped: a still scene in which something moves."""

import os
import sys
from fractions import Fraction
from typing import Any

import av
import numpy as np

_SKY, _SEA, _SAND = (112, 156, 196), (52, 94, 122), (186, 164, 122)


def write_sample_clip(
    path: str | os.PathLike, seconds: float = 8.0, fps: float = 25, size: tuple[int, int] = (360, 640)
) -> None:
    """Writes a clip of a still beach over which a ball flies; half-way a box appears on the sand and stays.

    The background does not change at all before compression, so a token scorer should keep the ball, its shadow and the
    frame in which the box appears. Every run writes the same pictures.

    Args:
        path: where to write; the ending picks the container (`.mp4`, `.mkv`, ...).
        seconds: length of the clip; it holds `round(seconds * fps)` frames.
        fps: frames per second.
        size: height and width in pixels, even numbers of at least 64.

    Raises:
        ValueError: an argument is out of range.
    """
    height, width = size
    num_frames = round(seconds * fps)
    if height < 64 or width < 64 or height % 2 or width % 2:
        raise ValueError(f"size must be two even numbers of at least 64 (height, width), got {size}.")
    if fps <= 0 or num_frames < 1:
        raise ValueError(f"seconds and fps must give at least one frame, got seconds={seconds} and fps={fps}.")
    scene = _background(height, width)
    with av.open(os.fspath(path), "w") as container:
        codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
        stream: Any = container.add_stream(codec, rate=Fraction(fps).limit_denominator(1001))
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        stream.bit_rate = 8 * height * width
        stream.thread_type = "FRAME"  # one slice a frame, as files usually have, whatever the number of cores
        for number in range(num_frames):
            picture = _draw(scene, number / max(num_frames - 1, 1), number / fps)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))


def _background(height: int, width: int) -> np.ndarray:
    """Sky, sea and sand with a little texture, float `(height, width, 3)`."""
    rows = np.linspace(0, 1, height)[:, None, None]
    columns = np.linspace(0, 1, width)[None, :, None]
    shore = 0.62 + 0.04 * np.sin(9 * columns)
    scene = np.where(rows < 0.35, np.array(_SKY) + 60 * rows, np.array(_SEA) + 40 * (rows - 0.35))
    scene = np.where(rows > shore, np.array(_SAND) - 40 * (rows - shore), scene)
    waves = 8 * np.sin(60 * rows + 14 * columns) * (rows > 0.35) * (rows < shore)
    cells = np.random.default_rng(0).normal(0, 6, (-(-height // 6), -(-width // 6), 1))
    textured = scene + waves + cells.repeat(6, axis=0).repeat(6, axis=1)[:height, :width]
    return textured.astype(np.float32)


def _draw(scene: np.ndarray, progress: float, time: float) -> np.ndarray:
    """The scene at `time` (seconds), `progress` of the way (0 to 1) through the clip, uint8 `(height, width, 3)`."""
    height, width = scene.shape[:2]
    picture = scene.copy()
    if progress >= 0.5:
        side = round(0.2 * height)
        top, left = round(0.7 * height), round(0.72 * width)
        picture[top : top + side, left : left + side] = (150, 84, 46)
        picture[top + 3 : top + side - 3, left + 3 : left + side - 3] = (196, 122, 66)
        picture[top + side // 2 - 2 : top + side // 2 + 2, left : left + side] = (150, 84, 46)
    radius = 0.09 * height
    ground = 0.86 * height
    ball_x = (0.08 + 0.84 * progress) * width
    ball_y = ground - radius - 0.45 * height * abs(np.sin(2.2 * time))
    # Only the upright strip that holds the ball and its shadow is painted.
    first, last = max(0, int(ball_x - radius) - 1), int(ball_x + radius) + 2
    strip = picture[:, first:last]
    rows, columns = np.mgrid[:height, first : first + strip.shape[1]]
    right, down = (columns - ball_x) / radius, (rows - ball_y) / radius
    strip[right**2 + ((rows - ground) / (0.25 * radius)) ** 2 < 1] *= 0.6
    stripe = np.sin(3 * np.arctan2(down, right) + 5 * time) > 0
    colour = np.where(stripe[..., None], (226, 62, 48), (246, 240, 228))
    shading = 1.1 - 0.35 * np.hypot(right + 0.4, down + 0.4)
    inside = np.hypot(right, down) < 1
    strip[inside] = (colour * shading[..., None])[inside]
    return picture.clip(0, 255).astype(np.uint8)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("Usage: python -m stts_hf.visualize.sample_clip CLIP.mp4")
    write_sample_clip(sys.argv[1])
