"""Medians, spread, shares and break-even, on samples that were made up."""

import pytest

from stts_hf.benchmark.statistics import (
    break_even_frames,
    break_even_ratio,
    crossing,
    end_to_end,
    interquartile_range,
    median,
    speed_up,
    summarise,
)
from tests.stts_hf.benchmark.made_up import cell, pruned_twice, variant


def test_the_median_is_the_middle_sample_or_between_two():
    assert median([9.0, 1.0, 2.0]) == 2.0
    assert median([4.0, 1.0, 2.0, 9.0]) == 3.0


def test_no_samples_have_no_median():
    with pytest.raises(ValueError, match="`samples` is empty"):
        median([])


def test_the_spread_is_the_distance_of_the_quartiles():
    assert interquartile_range([1.0, 2.0, 3.0, 4.0, 5.0]) == 2.0
    assert interquartile_range([1.0, 2.0, 3.0, 4.0, 500.0]) == 2.0  # one that was disturbed does not count
    assert interquartile_range([7.0]) == 0.0


def test_the_speed_up_is_a_ratio_of_medians_not_a_median_of_ratios():
    assert speed_up([8.0, 1.0, 9.0], [2.0, 4.0, 100.0]) == 2.0


def test_ideal_and_share_follow_from_flops():
    summary = summarise(pruned_twice())
    total = summary["0.5"]["total"]
    assert total["median"] == 5.0
    assert total["speed_up"] == pytest.approx(1.6)
    assert total["ideal"] == pytest.approx(2.0)
    assert total["share"] == pytest.approx(0.8)
    assert summary["0"]["total"]["share"] == pytest.approx(0.8 / 0.8)
    assert summary["stock"]["total"]["speed_up"] == 1.0


def test_a_stage_without_products_has_no_ideal():
    found = summarise(cell([variant(None, {"total": ([2.0], 0)}), variant(0.5, {"total": ([1.0], 0)})]))
    assert found["0.5"]["total"]["speed_up"] == 2.0
    assert found["0.5"]["total"]["ideal"] is None
    assert found["0.5"]["total"]["share"] is None


def test_without_stock_nothing_is_claimed():
    broken = pruned_twice()
    broken["variants"][0] |= {"status": "out of memory"}
    found = summarise(broken)
    assert "stock" not in found
    assert found["0.5"]["total"]["median"] == 5.0
    assert found["0.5"]["total"]["speed_up"] is None


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(0.0, 0.8), (0.5, 1.3)], 0.2),
        ([(0.0, 1.1), (0.5, 1.3)], 0.0),
        ([(0.0, 0.7), (0.5, 0.9)], None),
        ([], None),
        ([(8, 0.5), (16, 0.9), (32, 1.7)], 18.0),
        ([(1, 2.0), (2, 0.5), (4, 1.5)], 3.0),
        ([(1, 2.0), (2, 0.5)], None),
    ],
    ids=["between", "from the start", "never", "nothing measured", "last stretch", "lost and back", "lost"],
)
def test_crossing(points, expected):
    assert crossing(points) == (None if expected is None else pytest.approx(expected))


def test_break_even_ratio_lies_between_those_measured():
    # 0.8x at k = 0 and 1.6x at k = 0.5: 1.0x a quarter of the way.
    assert break_even_ratio(pruned_twice()) == pytest.approx(0.125)


def test_break_even_frames():
    def of(frames, seconds):
        return cell([variant(None, {"total": ([1.0], 1)}), variant(0.5, {"total": ([seconds], 1)})], frames=frames)

    assert break_even_frames([of(16, 1 / 1.5), of(8, 2.0)], "0.5") == pytest.approx(12)
    assert break_even_frames([of(16, 2.0), of(8, 3.0)], "0.5") is None


def test_what_comes_before_the_model_dilutes_the_gain():
    assert end_to_end(0.0, 8.0, 4.0) == 2.0
    assert end_to_end(4.0, 8.0, 4.0) == pytest.approx(1.5)
