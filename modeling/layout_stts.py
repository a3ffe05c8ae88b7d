"""Where patches lie: spans of one flat sequence that attend to each other, and optionally bins of whole spans.

Tensors and plain numbers. A sequence holds the patches of all frames of a call, block by block. A span of it is a frame
or a window in one.
"""

import itertools
from collections import Counter
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass
class FrameBins:
    """
    Bins of `capacity` slots that hold whole frames of a flat sequence of `P` patches (paper Algorithm 1).

    slot: (P,) place of each patch among the `num_bins * capacity` places.
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


@dataclass
class AttentionSpans:
    """
    What attends to what in a layer: each query to all keys of its span.

    cu_seqlens_q, cu_seqlens_k: (spans + 1,) int32, where spans start and end among queries and keys; a span that lost
    everything is empty. max_seqlen: upper bound of a span's length. queries: (P,) those of the keys that are queries,
    or None for all. bins: of the patches, in place of spans.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen: int
    queries: torch.Tensor | None = None
    bins: FrameBins | None = None

    @classmethod
    def of_lengths(cls, lengths: list[int], device: torch.device) -> "AttentionSpans":
        """Spans of so many patches each, which are queries and keys."""
        bounds = frame_bounds(lengths, device)
        return cls(bounds, bounds, max(lengths))

    def drop(self, slots: torch.Tensor) -> tuple["AttentionSpans", "AttentionSpans"]:
        """Spans of layer `l + 1`, where the patches at slots (P,), ascending, are queries, and spans of these alone."""
        ends = torch.searchsorted(slots, self.cu_seqlens_k.long()).to(torch.int32)
        dropping = AttentionSpans(ends, self.cu_seqlens_k, self.max_seqlen, slots)
        return dropping, AttentionSpans(ends, ends, self.max_seqlen)

    def drop_into_bins(
        self, slots: torch.Tensor, usable: torch.Tensor, refill: bool
    ) -> tuple["AttentionSpans", "AttentionSpans"]:
        """
        As `drop`, in bins as long as the longest span. usable: bool of each slot, False for padding, which bins leave
        out. refill: whether a span alone in its bin keeps all its patches (released code). Forces a host-device sync.
        """
        bounds = self.cu_seqlens_k.long()

        def lengths(mask: torch.Tensor) -> list[int]:
            return F.pad(mask.cumsum(0), (1, 0))[bounds].diff().tolist()

        capacity, present = max(lengths(usable)), torch.zeros_like(usable).index_fill(0, slots, True) & usable
        if refill:
            left = lengths(present)
            bins = first_fit_descending(left, capacity)[0]
            shared = Counter(number for number, length in zip(bins, left, strict=True) if length)
            alone = [length > 0 and shared[number] == 1 for number, length in zip(bins, left, strict=True)]
            present |= usable & torch.tensor(alone, device=slots.device).repeat_interleave(bounds.diff())
        dropping, after = self.drop(present.nonzero().squeeze(-1))
        after.bins = bin_frames(lengths(present), capacity, slots.device)
        return dropping, after


def block_slots(blocks: torch.Tensor, size: int) -> torch.Tensor:
    """The slots (K * S,) of blocks (K,) of `S = size` slots each."""
    return (size * blocks[:, None] + torch.arange(size, device=blocks.device)).flatten()


def frame_bounds(frame_lengths: list[int], device: torch.device) -> torch.Tensor:
    """(F + 1,) int32, where frames of so many patches each start and end among the patches of all frames."""
    runs, start = [torch.zeros(1, dtype=torch.int64, device=device)], 0
    for length, frames in itertools.groupby(frame_lengths):  # made on the device: a copy would force a sync
        num_frames = len(list(frames))
        runs.append(start + length * torch.arange(1, num_frames + 1, device=device))
        start += length * num_frames
    return torch.cat(runs).to(torch.int32)


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


def bin_frames(lengths: list[int], capacity: int, device: torch.device) -> FrameBins:
    """Places frames of `lengths` patches into bins of `capacity` patches."""
    bins, offsets, num_bins = first_fit_descending(lengths, capacity)
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    shift = torch.tensor([b * capacity + o - s for b, o, s in zip(bins, offsets, starts[:-1], strict=True)])
    frame_of_slot = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    slot = torch.arange(starts[-1]) + shift[frame_of_slot]
    frame = -1 - torch.arange(num_bins * capacity)
    frame[slot] = frame_of_slot
    frame = frame.view(num_bins, capacity).to(device)
    return FrameBins(slot.to(device), frame, frame[:, None, :, None] == frame[:, None, None, :])
