"""The survivors of frames whose blocks are gathered by a table: their sequence, and the way back to windows."""

from itertools import pairwise

import pytest
import torch

from stts_hf.modeling.gathered_layout_stts import (
    GatheredSequence,
    cumulative_lengths,
    frame_of_blocks,
    sequence_kept_patches,
    sequence_with_refill,
)
from tests.tiny import pooling_windows, window_grid

WIDTH = 4
# Patch grid, window, frames of each video. "Borders" has windows that hang over all four sides.
LAYOUTS = {
    "divisible": ((4, 6), (2, 3), [3, 2]),
    "borders": ((4, 4), (3, 3), [2, 3]),
    "one-patch-a-block": ((3, 3), (1, 1), [4]),
}


class Survivors:
    """A layout with random blocks kept; frame 1 lost all of them."""

    def __init__(self, name: str, seed: int = 0, keep: float = 0.4):
        grid, window, videos = LAYOUTS[name]
        generator = torch.Generator().manual_seed(seed)
        self.num_frames, self.num_patches = sum(videos), grid[0] * grid[1]
        self.frame_lengths = [self.num_patches] * self.num_frames
        self.window_size = window[0] * window[1]
        self.table = pooling_windows(self.num_frames, grid, window)  # (G, S)
        rows, cols = window_grid(grid, window)
        self.block_frame = frame_of_blocks([rows * cols] * self.num_frames, torch.device("cpu"))
        keep_mask = torch.rand(len(self.table), generator=generator) < keep
        keep_mask[: rows * cols] = True
        keep_mask[rows * cols : 2 * rows * cols] = False
        self.kept_blocks = keep_mask.nonzero().squeeze(-1)
        self.hidden_states = torch.randn(self.num_frames * self.num_patches, WIDTH, generator=generator)

    def sequence(self) -> GatheredSequence:
        return sequence_kept_patches(self.kept_blocks, self.table, self.block_frame, self.frame_lengths)

    def patches_of_frames(self) -> list[list[int]]:
        """Kept patches of each frame, block by block."""
        frames: list[list[int]] = [[] for _ in range(self.num_frames)]
        for block in self.kept_blocks.tolist():
            frames[self.block_frame[block]] += [patch for patch in self.table[block].tolist() if patch >= 0]
        return frames

    def windows(self) -> torch.Tensor:
        """(K, S, D) straight from the table."""
        rows = self.table[self.kept_blocks]
        return self.hidden_states[rows.clamp_min(0)] * (rows >= 0)[..., None]


@pytest.fixture(params=LAYOUTS, ids=str)
def survivors(request) -> Survivors:
    return Survivors(request.param)


def stretches(sequence: GatheredSequence) -> list[list[int]]:
    bounds = sequence.cu_seqlens.tolist()
    return [sequence.patch_index[a:b].tolist() for a, b in pairwise(bounds)]


def test_a_sequence_holds_the_kept_patches_frame_by_frame(survivors):
    sequence = survivors.sequence()
    assert stretches(sequence)[: survivors.num_frames] == survivors.patches_of_frames()
    assert sequence.cu_seqlens.dtype == torch.int32


def test_a_frame_that_lost_everything_is_an_empty_stretch(survivors):
    bounds = survivors.sequence().cu_seqlens
    assert bounds[1] == bounds[2]


def test_no_stretch_is_longer_than_promised(survivors):
    sequence = survivors.sequence()
    assert sequence.cu_seqlens.diff().max() <= sequence.max_seqlen
    assert sequence.cu_seqlens[-1] == len(sequence.patch_index)


def test_windows_come_back(survivors):
    sequence = survivors.sequence()
    packed = survivors.hidden_states[sequence.patch_index]
    assert torch.equal(sequence.windows(packed, survivors.window_size), survivors.windows())


def test_windows_without_borders_are_a_view():
    survivors = Survivors("divisible")
    sequence = survivors.sequence()
    packed = survivors.hidden_states[sequence.patch_index]
    assert sequence.windows(packed, survivors.window_size).data_ptr() == packed.data_ptr()
    assert sequence.window_valid is None


def test_padding_slots_lie_behind_all_frames_and_are_marked():
    survivors = Survivors("borders")
    sequence = survivors.sequence()
    rows = survivors.table[survivors.kept_blocks]
    assert sequence.window_valid is not None
    assert torch.equal(sequence.window_valid, rows >= 0)
    padding = [len(stretch) for stretch in stretches(sequence)[survivors.num_frames :]]
    assert sum(padding) == (rows < 0).sum()
    assert max(padding) <= sequence.max_seqlen == survivors.num_patches  # no stretch longer than a frame


def test_what_padding_slots_hold_does_not_reach_the_windows():
    survivors = Survivors("borders")
    sequence = survivors.sequence()
    packed = survivors.hidden_states[sequence.patch_index]
    packed[sequence.cu_seqlens[survivors.num_frames] :] = 1e6
    assert torch.equal(sequence.windows(packed, survivors.window_size), survivors.windows())


@pytest.mark.parametrize("name", LAYOUTS)
def test_sizes_depend_on_the_number_of_kept_blocks_alone(name):
    # What lets the sequence be laid out before the scores have left the device.
    sizes = set()
    for seed in range(5):
        survivors = Survivors(name, seed)
        survivors.kept_blocks = torch.randperm(len(survivors.table))[:4].sort().values
        sequence = survivors.sequence()
        sizes.add((sequence.patch_index.shape, sequence.cu_seqlens.shape, sequence.max_seqlen))
    assert len(sizes) == 1


def test_without_padding_drops_the_last_stretch_only(survivors):
    sequence = survivors.sequence().without_padding(survivors.num_frames)
    assert stretches(sequence) == survivors.patches_of_frames()
    packed = survivors.hidden_states[sequence.patch_index]
    assert torch.equal(sequence.windows(packed, survivors.window_size), survivors.windows())


def test_whole_frames_are_cut_where_the_sequence_is(survivors):
    sequence = survivors.sequence()
    bounds = sequence.whole_cu_seqlens
    assert bounds.shape == sequence.cu_seqlens.shape
    assert bounds.dtype == torch.int32
    frames = [patch // survivors.num_patches for patch in sequence.patch_index.tolist()]
    own = [f for f, stretch in enumerate(stretches(sequence)[: survivors.num_frames]) for _ in stretch]
    assert frames[: len(own)] == own
    expected = [frame * survivors.num_patches for frame in range(survivors.num_frames + 1)]
    assert bounds[: survivors.num_frames + 1].tolist() == expected
    assert set(bounds[survivors.num_frames :].tolist()) == {expected[-1]}  # padding slots have no keys


@pytest.mark.parametrize("frames", [[], [0], [2, 3]], ids=["none", "a-full-one", "two"])
def test_refill_adds_all_patches_of_the_given_frames(survivors, frames):
    sequence = survivors.sequence().without_padding(survivors.num_frames)
    refilled = sequence_with_refill(sequence, frames, survivors.window_size, survivors.frame_lengths)
    for frame, (stretch, kept) in enumerate(zip(stretches(refilled), survivors.patches_of_frames(), strict=True)):
        first = frame * survivors.num_patches
        expected = list(range(first, first + survivors.num_patches)) if frame in frames else sorted(kept)
        assert stretch == expected


def test_windows_of_a_refilled_sequence_are_those_of_kept_blocks(survivors):
    sequence = survivors.sequence().without_padding(survivors.num_frames)
    refilled = sequence_with_refill(sequence, [2, 3], survivors.window_size, survivors.frame_lengths)
    packed = survivors.hidden_states[refilled.patch_index]
    assert torch.equal(refilled.windows(packed, survivors.window_size), survivors.windows())


def test_frame_of_blocks_with_different_grids():
    assert frame_of_blocks([2, 2, 3], torch.device("cpu")).tolist() == [0, 0, 1, 1, 2, 2, 2]


def test_cumulative_lengths_are_what_flash_kernels_take():
    bounds = cumulative_lengths(torch.tensor([3, 0, 2]))
    assert bounds.tolist() == [0, 3, 3, 5]
    assert bounds.dtype == torch.int32


def test_frames_may_differ_in_length():
    """Frames of 4, 2 and 4 patches in blocks of 2; blocks 0, 2, 3 and 4 stay."""
    table = torch.arange(10).view(5, 2)
    frame_lengths, block_frame = [4, 2, 4], torch.tensor([0, 0, 1, 2, 2])
    sequence = sequence_kept_patches(torch.tensor([0, 2, 3, 4]), table, block_frame, frame_lengths)
    assert stretches(sequence) == [[0, 1], [4, 5], [6, 7, 8, 9]]
    assert sequence.whole_cu_seqlens.tolist() == [0, 4, 6, 10]
    assert sequence.max_seqlen == 4
    refilled = sequence_with_refill(sequence, [0], 2, frame_lengths)
    assert stretches(refilled) == [[0, 1, 2, 3], [4, 5], [6, 7, 8, 9]]
    kept = torch.arange(10.0)[refilled.patch_index][:, None]
    assert refilled.windows(kept, 2).flatten().tolist() == [0, 1, 4, 5, 6, 7, 8, 9]


def test_frames_of_different_length_may_hang_over():
    """Frames of 3 and 2 patches in blocks of 2: the last slot of block 1 is padding, and lies behind everything."""
    table = torch.tensor([[0, 1], [2, -1], [3, 4]])
    sequence = sequence_kept_patches(torch.tensor([1, 2]), table, torch.tensor([0, 0, 1]), [3, 2])
    assert stretches(sequence)[:2] == [[2], [3, 4]]
    assert sequence.cu_seqlens.tolist() == [0, 1, 3, 4]
    assert sequence.whole_cu_seqlens.tolist() == [0, 3, 5, 5]
