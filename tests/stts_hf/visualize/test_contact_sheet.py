"""The contact sheet is measured in pixels of plain frames, where every pixel's expected colour is known."""

import numpy as np
import pytest
from PIL import ImageDraw

from stts_hf.visualize.contact_sheet import contact_sheet
from stts_hf.visualize.dimming import dim_dropped_blocks


def plain_frames(num_frames: int, height: int = 90, width: int = 160) -> np.ndarray:
    frames = np.empty((num_frames, height, width, 3), dtype=np.uint8)
    frames[:] = (200, 60, 40)
    return frames


def test_kept_blocks_keep_their_colours_and_dropped_ones_turn_dark_and_grey():
    keep = np.array([True, False, True, True])
    tile = np.asarray(dim_dropped_blocks(plain_frames(1)[0], keep, (2, 2)))
    centres = {name: tile[y, x].astype(int) for name, (y, x) in {"kept": (22, 40), "dropped": (22, 120)}.items()}
    assert centres["kept"].tolist() == [200, 60, 40]
    assert centres["dropped"].max() < 70
    assert np.ptp(centres["dropped"]) <= 12


@pytest.mark.parametrize("size", [(160, 90), (41, 300)], ids=["divides", "does_not_divide"])
def test_blocks_cover_the_whole_extent_in_proportion(size):
    # Only the last block of a 9 x 9 grid is kept: it must reach the bottom right corner and start at 8/9 of the sides.
    keep = np.zeros(81, dtype=bool)
    keep[-1] = True
    width, height = size
    tile = np.asarray(dim_dropped_blocks(plain_frames(1, height, width)[0], keep, (9, 9)))
    coloured = (tile == (200, 60, 40)).all(-1)
    assert coloured[-1, -1]
    rows, cols = np.nonzero(coloured)
    # The border line takes one pixel of the block's side.
    assert abs(rows.min() - height * 8 / 9) <= 2
    assert abs(cols.min() - width * 8 / 9) <= 2


@pytest.mark.parametrize("num_frames", [4, 3], ids=["whole", "one_lacking"])
def test_the_frames_of_a_tubelet_lie_side_by_side_and_share_their_blocks(num_frames):
    """Of two tubelets of 1 x 2 blocks: the first keeps all, the second its right block, in both frames."""
    frames = plain_frames(num_frames)
    frames[1] = (40, 60, 200)
    keep = np.array([[True, True], [False, True]])
    sheet = np.asarray(contact_sheet(frames, keep, (1, 2), columns=1, tubelet=2))
    red, blue = ((sheet == colour).all(-1) for colour in ((200, 60, 40), (40, 60, 200)))
    first = np.nonzero(blue.any(1))[0]  # rows of the first tile
    assert np.nonzero(red[first].any(0))[0].max() < np.nonzero(blue.any(0))[0].min()
    second = red[first.max() + 1 :]
    halves = np.split(np.nonzero(second.any(0))[0], np.nonzero(np.diff(np.nonzero(second.any(0))[0]) > 1)[0] + 1)
    width = np.ptp(np.nonzero(blue.any(0))[0]) + 1
    assert [abs(len(half) - width / 2) <= 2 for half in halves] == [True, True]


@pytest.mark.parametrize("num_frames", [5, 128])
def test_the_sheet_shows_every_frame_at_a_readable_size(num_frames):
    keep = np.ones((num_frames, 81), dtype=bool)
    sheet = np.asarray(contact_sheet(plain_frames(num_frames), keep, (9, 9), [0.5 * i for i in range(num_frames)]))
    shown = (sheet == (200, 60, 40)).all(-1).sum()
    assert sheet.shape[1] <= 1920
    assert shown >= num_frames * 150 * 84


def test_a_share_below_a_percent_is_not_said_to_be_none(monkeypatch):
    texts = []
    monkeypatch.setattr(ImageDraw.ImageDraw, "text", lambda self, place, text, **options: texts.append(text))
    keep = np.arange(2 * 500).reshape(2, 500) < 4
    contact_sheet(plain_frames(2), keep, (20, 25), columns=2)
    assert "4 of 1000 video tokens kept (0.4%)" in " ".join(texts)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"frames": plain_frames(2).astype(np.float32)}, TypeError, "`frames` has dtype float32"),
        ({"keep_mask": np.ones((2, 81), dtype=np.int64)}, TypeError, "`keep_mask` has dtype int64"),
        ({"keep_mask": np.ones((3, 81), dtype=bool)}, ValueError, r"need \(2, 81\)"),
        ({"timestamps": [0.0]}, ValueError, r"`timestamps` has shape \(1,\), .* need \(2,\)"),
        ({"columns": 0}, ValueError, "`columns` is 0"),
    ],
    ids=["float", "int_mask", "mask_rows", "times", "columns"],
)
def test_what_does_not_fit_is_refused_by_name(change, error, words):
    arguments = {"frames": plain_frames(2), "keep_mask": np.ones((2, 81), dtype=bool), "grid": (9, 9), **change}
    with pytest.raises(error, match=words):
        contact_sheet(**arguments)
