"""The shipped clip is what the generator draws, and is copied to where a user asks for it."""

import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest

from examples.clips.sample_clip import sample_frames
from stts_hf.visualize.sample_clip import write_sample_clip
from tests.clips import decode_everything

BLOCK = 8


def block_means(frames: list[np.ndarray]) -> np.ndarray:
    """Colours of blocks of 8 x 8 pixels."""
    height, width = frames[0].shape[:2]
    blocks = np.stack(frames).astype(float).reshape(len(frames), height // BLOCK, BLOCK, width // BLOCK, BLOCK, 3)
    return blocks.mean((2, 4))


def test_the_shipped_clip_shows_what_the_generator_draws(tmp_path):
    write_sample_clip(tmp_path / "clip.mp4")
    times, frames, duration = decode_everything(tmp_path / "clip.mp4")
    assert (times, duration) == ([Fraction(number, 8) for number in range(31)], Fraction(31, 8))
    drawn = list(sample_frames((number / 8 for number in range(31)), 3.875, 360, 360))
    # H.264 is lossy and halves the resolution of colours, so that pixels at edges are up to 90 of 255 away; their mean
    # over a block is at most 5 away. From one frame to the next some block changes by more than 90.
    assert np.abs(block_means(frames) - block_means(drawn)).max() < 8


def test_a_copy_replaces_what_was_there(tmp_path):
    (tmp_path / "CLIP.MP4").write_text("of before")
    write_sample_clip(tmp_path / "CLIP.MP4")
    write_sample_clip(str(tmp_path / "clip.mp4"))
    assert (tmp_path / "CLIP.MP4").read_bytes() == (tmp_path / "clip.mp4").read_bytes()


def test_another_suffix_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"path must end in \.mp4, got '.*clip\.mkv': choose a name such as clip\.mp4"):
        write_sample_clip(tmp_path / "clip.mkv")
    assert not any(tmp_path.iterdir())


def test_a_missing_folder_is_not_made(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_sample_clip(tmp_path / "missing" / "clip.mp4")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("words", [[], ["clip.mp4", "8"]], ids=["nothing", "two"])
def test_the_command_takes_one_path(words, tmp_path):
    command = [sys.executable, "-m", "stts_hf.visualize.sample_clip", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "Usage: python -m stts_hf.visualize.sample_clip CLIP.mp4\n")
    assert not any(tmp_path.iterdir())
