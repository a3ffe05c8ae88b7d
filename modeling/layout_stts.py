"""Where the surviving patches go: one flat sequence cut at frame borders, and optionally bins of whole frames' size.

Tensors and plain numbers. Patches of all frames of a call follow each other. A "frame" is any stretch of patches that
attend to each other.
"""

import itertools
from dataclasses import dataclass

import torch


@dataclass
class FrameSequence:
    """
    Patches of all frames in one flat sequence of `P` slots, frame by frame and block by block.

    patch_index: (P,) row of each slot's patch among the patches of all frames.
    cu_seqlens: (F + 1,) int32, where each frame starts and ends; a frame that lost everything is an empty stretch.
    """

    patch_index: torch.Tensor
    cu_seqlens: torch.Tensor


@dataclass
class FrameBins:
    """
    Bins of `capacity` slots that hold whole frames of a `FrameSequence` (paper Algorithm 1).

    slot: (P,) place of each slot of the sequence among the `num_bins * capacity` places.
    frame: (num_bins, capacity) frame of the patch in each place; every free place has a negative number of its own.
    attention_mask: (num_bins, 1, capacity, capacity) bool, True where query and key are of one frame. Free places see
        themselves alone, so that no row is empty.
    """

    slot: torch.Tensor
    frame: torch.Tensor
    attention_mask: torch.Tensor

    def pack(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(P, D) -> (num_bins, capacity, D), free places zero."""
        bins = hidden_states.new_zeros(self.frame.numel(), hidden_states.shape[-1])
        return bins.index_copy(0, self.slot, hidden_states).unflatten(0, tuple(self.frame.shape))

    def unpack(self, bins: torch.Tensor) -> torch.Tensor:
        """(num_bins, capacity, D) -> (P, D)."""
        return bins.flatten(0, 1)[self.slot]


def frame_bounds(frame_lengths: list[int], device: torch.device) -> torch.Tensor:
    """(F + 1,) int32, where frames of so many patches each start and end among the patches of all frames."""
    runs, start = [torch.zeros(1, dtype=torch.int64, device=device)], 0
    for length, frames in itertools.groupby(frame_lengths):  # made on the device: a copy would force a sync
        num_frames = len(list(frames))
        runs.append(start + length * torch.arange(1, num_frames + 1, device=device))
        start += length * num_frames
    return torch.cat(runs).to(torch.int32)


def sequence_kept_blocks(kept_blocks: torch.Tensor, block_size: int, bounds: torch.Tensor) -> FrameSequence:
    """
    The survivors as one flat sequence, where the `block_size` patches of a block lie together, block by block.

    kept_blocks: (K,) ascending. bounds: (F + 1,) int32, where each frame starts and ends among the patches of all.
    Nothing forces a host-device sync.
    """
    patches = block_size * kept_blocks[:, None] + torch.arange(block_size, device=kept_blocks.device)
    ends = block_size * torch.searchsorted(kept_blocks, bounds.long() // block_size)  # kept ones before each bound
    return FrameSequence(patches.flatten(), ends.to(torch.int32))


def first_fit_descending(lengths: list[int], capacity: int) -> tuple[list[int], list[int], int]:
    """
    Paper Algorithm 1: frames, longest first, each into the first bin with room for it.

    Returns bin and offset of each frame and the number of bins; an empty frame takes no room. A tournament tree over
    the bins' free room finds the first fit in O(log F). Raises `ValueError` for a frame longer than a bin.
    """
    if lengths and max(lengths) > capacity:
        raise ValueError(f"`lengths` holds a frame of {max(lengths)} patches, more than the `capacity` {capacity}.")
    leaves = 1 << max(len(lengths) - 1, 0).bit_length()
    room = [capacity] * (2 * leaves)  # room[i] is the most room below node i; bin j is leaf `leaves + j`
    bins, offsets = [0] * len(lengths), [0] * len(lengths)
    num_bins = 0
    for frame in sorted(range(len(lengths)), key=lambda frame: -lengths[frame]):
        length = lengths[frame]
        node = 1
        while node < leaves:
            node = 2 * node if room[2 * node] >= length else 2 * node + 1
        bins[frame], offsets[frame] = node - leaves, capacity - room[node]
        if length:
            num_bins = max(num_bins, node - leaves + 1)
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return bins, offsets, num_bins


def bin_frames(sequence: FrameSequence, lengths: list[int], capacity: int) -> FrameBins:
    """Places a sequence's frames of `lengths` patches into bins of `capacity` patches."""
    device = sequence.patch_index.device
    bins, offsets, num_bins = first_fit_descending(lengths, capacity)
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    shift = torch.tensor([b * capacity + o - s for b, o, s in zip(bins, offsets, starts[:-1], strict=True)])
    frame_of_slot = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    slot = torch.arange(starts[-1]) + shift[frame_of_slot]
    frame = -1 - torch.arange(num_bins * capacity)
    frame[slot] = frame_of_slot
    frame = frame.view(num_bins, capacity).to(device)
    return FrameBins(slot.to(device), frame, frame[:, None, :, None] == frame[:, None, None, :])
