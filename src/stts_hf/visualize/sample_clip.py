"""A clip to try things on, made here rather than shipped: a still scene in which a few things happen."""

import os
import sys

from stts_hf.evaluation.clip_files import write_video
from stts_hf.evaluation.scenes import Scene, Thing


def write_sample_clip(
    path: str | os.PathLike, seconds: float = 3.875, fps: float = 8, size: tuple[int, int] = (360, 360)
) -> None:
    """Writes a clip in which a red ring moves to the right; a letter and two marks flash up, a square changes colour.

    The background does not change before compression but for the noise of a camera, so a token scorer should keep the
    ring, and the frames in which something flashes up. Every run writes the same pictures.

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
    times = (number / fps for number in range(num_frames))
    bit_rate = str(8 * height * width)
    write_video(path, sample_scene(seconds).frames(times, height, width), fps, b=bit_rate)


def sample_scene(seconds: float) -> Scene:
    """What happens in the sample clip, over as many seconds."""
    return Scene(
        seed=0,
        duration=seconds,
        things=(
            Thing("square", "blue", 0.09, (0.82, 0.18), changes_at=0.5 * seconds, later="yellow"),
            Thing("ring", "red", 0.11, (0.16, 0.5), (0.68 / seconds, 0.0)),
            Thing("H", "white", 0.11, (0.18, 0.16), shown=((0.2 * seconds, 0.32 * seconds),)),
            Thing("diamond", "green", 0.06, (0.5, 0.84), shown=((0.4 * seconds, 0.48 * seconds),)),
            Thing("diamond", "pink", 0.06, (0.16, 0.84), shown=((0.7 * seconds, 0.78 * seconds),)),
        ),
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("Usage: python -m stts_hf.visualize.sample_clip CLIP.mp4")
    write_sample_clip(sys.argv[1])
