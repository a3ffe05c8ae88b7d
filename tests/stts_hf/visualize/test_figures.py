"""The figures show the numbers they were given."""

import numpy as np
import pytest
import torch

from stts_hf.visualize.figures import COLOURS, comparison, heat_maps, score_range, timeline

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


def test_scores_that_are_no_numbers_have_no_say_either():
    found = scores(4)
    found[1, 0], found[2, 0] = np.nan, np.inf
    assert 0 <= score_range(found)[0] < score_range(found)[1] <= 1


@pytest.mark.parametrize("tubelet", [1, 2], ids=["frames", "tubelets"])
def test_the_timeline_counts_what_is_kept(tubelet):
    mask = torch.from_numpy(scores(4) > 0.5)
    times = [0.5 * place for place in range(4 * tubelet)]
    figure = timeline({"scorer": mask, "cosine": ~mask}, times, tubelet)
    lines, labels = figure.axes[0].get_legend_handles_labels()
    kept = [sum(row) for row in mask.tolist()]
    assert labels == [f"scorer: {sum(kept)} of 24", f"cosine: {24 - sum(kept)} of 24"]
    assert np.asarray(lines[0].get_ydata())[:4].tolist() == kept  # type: ignore[attr-defined]
    assert np.asarray(lines[0].get_xdata())[:4].tolist() == times[::tubelet]  # type: ignore[attr-defined]
    assert lines[0].get_color() == COLOURS["scorer"]  # type: ignore[attr-defined]


def test_heat_maps_show_the_scores_of_each_frame_in_one_range():
    found = {"scorer": scores(3), "cosine": 3 * scores(3)}
    figure = heat_maps(frames(3), found, GRID, [0, 1, 2])
    pictures = [axes for axes in figure.axes if len(axes.get_images()) == 2]
    assert len(pictures) == 6
    for axes, want in zip(pictures, [*found["scorer"], *found["cosine"]], strict=True):
        np.testing.assert_array_equal(images_of(axes)[1], want.reshape(GRID))
    assert pictures[3].get_images()[1].get_clim() == pytest.approx(score_range(found["cosine"]))


def test_a_share_below_a_percent_is_not_said_to_be_none():
    mask = np.arange(2 * 500).reshape(2, 500) < 4
    figure = comparison(frames(2), {"scorer": mask}, (20, 25), [0.0, 0.5])
    assert any("0.4% kept" in axes.get_ylabel() for axes in figure.axes)


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


def test_a_video_of_one_frame_is_drawn():
    for figure in (
        comparison(frames(1), {"scorer": np.ones((1, 6), dtype=bool)}, GRID, [0.0]),
        heat_maps(frames(1), {"scorer": np.zeros((1, 6))}, GRID, [0.0]),
        timeline({"scorer": np.ones((1, 6), dtype=bool)}, [0.0]),
    ):
        figure.canvas.draw()


@pytest.mark.parametrize("drawn", [comparison, heat_maps])
def test_what_does_not_fit_is_refused_by_name(drawn):
    values = scores(3) > 0.5 if drawn is comparison else scores(3)
    name = "keep_mask" if drawn is comparison else "token_scores"
    with pytest.raises(ValueError, match=rf"^`{name}` has shape \(3, 6\), but 2 frames .* need \(2, 6\)"):
        drawn(frames(2), {"scorer": values}, GRID, [0, 1])
    with pytest.raises(ValueError, match="`columns` is 0"):
        drawn(frames(3), {"scorer": values}, GRID, [0, 1, 2], columns=0)


def test_a_timeline_of_another_video_is_refused_by_name():
    with pytest.raises(ValueError, match=r"^`keep_mask` has shape \(3, 6\), but 2 frames .* need \(2, 6\)"):
        timeline({"scorer": scores(3) > 0.5}, [0, 1])
