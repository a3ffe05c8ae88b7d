"""The sample clip in other sizes: it decodes, its background holds still, and something moves in it."""

import numpy as np
import pytest

from examples.clips.sample_clip import draw_sample_clip
from tests.clips import decode_everything


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    path = tmp_path_factory.mktemp("clip") / "clip.mp4"
    draw_sample_clip(path, seconds=2.0, fps=25, size=(180, 320))
    return decode_everything(path)


def test_something_moves_in_every_frame_before_a_still_background(clip):
    pictures = np.stack(clip[1]).astype(int)
    assert (pictures.shape, clip[2]) == ((50, 180, 320, 3), 2)
    # Right of where the letter flashes up, above the ring and left of the square: noise and compression alone.
    still = pictures[:, 5:50, 110:220]
    assert np.abs(still - still[0]).mean() < 4
    assert (np.abs(np.diff(pictures, axis=0)).max(axis=(1, 2, 3)) > 50).all()


def test_same_pictures_every_time(clip, tmp_path):
    draw_sample_clip(tmp_path / "again.mp4", seconds=2.0, fps=25, size=(180, 320))
    again = decode_everything(tmp_path / "again.mp4")[1]
    assert all(np.array_equal(one, other) for one, other in zip(clip[1], again, strict=True))
