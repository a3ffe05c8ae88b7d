"""Bins of the survivors' frames: the plan, what they hold, and the way back."""

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import pytest
import torch

from stts_hf.modeling.layout_stts import bin_frames, first_fit_descending
from tests.naive import naive_first_fit_descending

WIDTH = 4
SEEDS = [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 60))]
TraceFunction = Callable[[FrameType, str, object], Any]


def bins_of(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """`first_fit_descending` in the naive form: non-empty frames of each bin, by offset."""
    bins, offsets, num_bins = first_fit_descending(list(lengths), capacity)
    members: list[list[int]] = [[] for _ in range(num_bins)]
    for frame in sorted(range(len(lengths)), key=lambda frame: offsets[frame]):
        if lengths[frame]:
            members[bins[frame]].append(frame)
    return members


def random_lengths(seed: int) -> tuple[list[int], int]:
    generator = random.Random(seed)
    capacity = generator.choice([9, 81, 729])
    count = generator.choice([1, 2, 3, 8, 64, 200])
    step = generator.choice([1, 9])
    return [min(capacity, step * generator.randint(0, capacity // step)) for _ in range(count)], capacity


@pytest.mark.parametrize("seed", SEEDS)
def test_bins_are_the_textbook_algorithms(seed):
    lengths, capacity = random_lengths(seed)
    assert bins_of(lengths, capacity) == naive_first_fit_descending(lengths, capacity)


@pytest.mark.parametrize("seed", SEEDS)
def test_frames_of_a_bin_neither_overlap_nor_leave_it(seed):
    lengths, capacity = random_lengths(seed)
    bins, offsets, num_bins = first_fit_descending(lengths, capacity)
    taken = torch.zeros(max(num_bins, 1), capacity, dtype=torch.int64)
    for frame, length in enumerate(lengths):
        if length:
            assert offsets[frame] + length <= capacity
            taken[bins[frame], offsets[frame] : offsets[frame] + length] += 1
    assert taken.max() <= 1
    assert taken.sum() == sum(lengths)


def test_ties_go_in_frame_order():
    # The released code's order: only this one gives its refilled features.
    assert bins_of([9, 3, 3, 4], capacity=9) == [[0], [3, 1], [2]]


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
    assert bins_of(lengths, capacity=9) == expected


def test_a_frame_that_is_too_long_is_refused():
    with pytest.raises(ValueError, match="10 patches, more than the `capacity` 9"):
        first_fit_descending([3, 10], 9)


def lines_run(lengths: list[int]) -> int:
    """Lines of Python that planning takes."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> TraceFunction:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        first_fit_descending(lengths, 729)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("spread", ["alike", "varied", "worst"])
def test_planning_twice_the_frames_takes_little_more_than_twice_the_work(spread):
    """A search bin by bin would take four times the work where every frame needs a bin of its own."""
    generator = random.Random(0)
    draw = {"alike": lambda: 360, "varied": lambda: 9 * generator.randint(0, 81), "worst": lambda: 9 * 41}[spread]
    lengths = [draw() for _ in range(1024)]
    assert lines_run(lengths) < 2.3 * lines_run(lengths[:512])


# Patches of each frame; no frame has more than `CAPACITY`.
LENGTHS = {"full-and-empty": [9, 0, 9], "shared": [9, 4, 0, 3, 5], "one-patch-each": [1, 1, 1]}
CAPACITY = 9


@dataclass
class Binned:
    """A sequence of frames of so many patches, the patches themselves, and their bins."""

    lengths: list[int]

    def __post_init__(self) -> None:
        patches = [CAPACITY * frame + place for frame, length in enumerate(self.lengths) for place in range(length)]
        self.patch_index = torch.tensor(patches)
        self.bins = bin_frames(self.lengths, CAPACITY, torch.device("cpu"))
        self.packed = torch.randn(len(patches), WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=LENGTHS)
def binned(request) -> Binned:
    return Binned(LENGTHS[request.param])


def test_packing_and_unpacking_gives_the_sequence_back(binned):
    bins = binned.bins
    assert torch.equal(bins.unpack(bins.pack(binned.packed)), binned.packed)


def test_free_places_do_not_come_back():
    binned = Binned(LENGTHS["shared"])
    bins = binned.bins
    packed = bins.pack(binned.packed)
    packed[bins.frame < 0] = torch.nan
    assert torch.equal(bins.unpack(packed), binned.packed)
    assert bins.frame.numel() > len(binned.packed)  # else there was no free place to poison


def test_free_places_are_zero(binned):
    packed = binned.bins.pack(torch.ones(len(binned.packed), WIDTH))
    assert torch.equal(packed[..., 0] != 0, binned.bins.frame >= 0)


def test_gradients_pass_through_bins_unchanged(binned):
    packed = binned.packed.requires_grad_()
    weights = torch.randn(packed.shape, generator=torch.Generator().manual_seed(1))
    (binned.bins.unpack(binned.bins.pack(packed)) * weights).sum().backward()
    assert torch.equal(packed.grad, weights)


def test_bins_are_as_many_as_planned(binned):
    assert len(binned.bins.frame) == len(naive_first_fit_descending(binned.lengths, CAPACITY))


def test_the_mask_lets_frames_see_themselves_alone(binned):
    bins = binned.bins
    mask = bins.attention_mask[:, 0]
    for seen, frame in zip(mask.flatten(0, 1), bins.frame.flatten().tolist(), strict=True):
        # Free places see themselves, so that no row of the softmax is empty.
        assert seen.sum() == (binned.lengths[frame] if frame >= 0 else 1)
    assert torch.equal(bins.frame.flatten()[bins.slot], binned.patch_index // CAPACITY)
