"""The comparison shows the numbers it was given."""

import numpy as np

from stts_hf.visualize.figures import comparison, score_range

GRID = (2, 3)


def frames(number: int) -> np.ndarray:
    return np.full((number, 40, 60, 3), 200, dtype=np.uint8)


def scores(number: int) -> np.ndarray:
    return np.random.default_rng(0).random((number, 6), dtype=np.float32)


def images_of(axes):
    return [np.asarray(image.get_array()) for image in axes.get_images()]


def test_frame_0_has_no_say_in_the_range_of_scores():
    found = scores(4)
    found[0] = 100
    assert score_range(found) == (found[1:].min(), found[1:].max())
    found[1, 0], found[2, 0] = np.nan, np.inf
    assert 0 <= score_range(found)[0] < score_range(found)[1] <= 1


def test_selectors_stand_side_by_side_on_frames_spread_over_the_video():
    mask = scores(20) > 0.5
    figure = comparison(frames(20), {"scorer": mask, "random": ~mask}, GRID, [0.5 * place for place in range(20)])
    rows = np.array(figure.axes).reshape(3, 8)
    # 19 gaps over 7 steps, rounded
    assert [axes.get_title() for axes in rows[0]] == [f"{t:.2f} s" for t in (0, 1.5, 2.5, 4, 5.5, 7, 8, 9.5)]
    assert [axes.get_xlabel() for axes in rows[1]] == [f"{mask[i].sum()}/6" for i in (0, 3, 5, 8, 11, 14, 16, 19)]
    scorer, random = images_of(rows[1, 0])[0], images_of(rows[2, 0])[0]
    for block in range(6):
        y, x = 10 + 20 * (block // 3), 10 + 20 * (block % 3)
        assert ((scorer[y, x] > 150).all(), (random[y, x] > 150).all()) == (mask[0, block], not mask[0, block])
