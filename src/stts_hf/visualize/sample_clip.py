"""The sample video: a still scene in which a few things happen. examples/clips/sample_clip.py draws it."""

import os
import shutil
import sys
from pathlib import Path


def write_sample_clip(path: str | os.PathLike) -> None:
    """
    Copies a clip in which a red ring moves to the right; a letter and two marks flash up, a square changes colour.

    The background is constant but for camera noise, so a token scorer should keep the ring, and the frames in which
    something flashes up. It holds 31 frames of 360 x 360 pixels, 8 a second.

    Args:
        path: of the copy, an `.mp4` in an existing folder.

    Raises:
        ValueError: if `path` has another suffix.
    """
    if Path(path).suffix.lower() != ".mp4":
        raise ValueError(f"path must end in .mp4, got {os.fspath(path)!r}: choose a name such as clip.mp4")
    shutil.copyfile(Path(__file__).with_suffix(".mp4"), path)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("Usage: python -m stts_hf.visualize.sample_clip CLIP.mp4")
    try:
        write_sample_clip(sys.argv[1])
    except (OSError, ValueError) as error:
        sys.exit(str(error))
