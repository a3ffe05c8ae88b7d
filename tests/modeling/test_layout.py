"""Algorithm 1 of the paper: which frames share a bin."""

import random

import pytest

from stts_hf.modeling.vision_stts import first_fit_descending
from tests.naive import naive_first_fit_descending


def random_lengths(seed: int) -> tuple[list[int], int]:
    generator = random.Random(seed)
    capacity = generator.choice([9, 81, 729])
    count = generator.choice([1, 2, 3, 8, 64, 200])
    step = generator.choice([1, 9])
    return [min(capacity, step * generator.randint(0, capacity // step)) for _ in range(count)], capacity


@pytest.mark.parametrize("seed", range(12))
def test_bins_are_the_textbook_algorithms(seed):
    lengths, capacity = random_lengths(seed)
    bins = first_fit_descending(lengths, capacity)
    assert bins == naive_first_fit_descending(lengths, capacity)
    assert all(sum(lengths[frame] for frame in frames) <= capacity for frames in bins)


def test_ties_go_in_frame_order():
    # The released code's order: only this one gives its refilled features.
    assert first_fit_descending([9, 3, 3, 4], capacity=9) == [[0], [3, 1], [2]]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        pytest.param([], [], id="no-frame"),
        pytest.param([0, 0], [], id="nothing-left"),
        pytest.param([0, 9, 0], [[1]], id="empty-beside-full"),
        pytest.param([9, 9], [[0], [1]], id="all-full"),
        pytest.param([4, 5], [[1, 0]], id="exact-fit"),
    ],
)
def test_borderline_cases(lengths, expected):
    assert first_fit_descending(lengths, capacity=9) == expected
