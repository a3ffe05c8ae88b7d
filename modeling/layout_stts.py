"""Where patches lie: spans of one flat sequence that attend to each other.

Tensors and plain numbers. A sequence holds the patches of all frames of a call, block by block. A span of it is a frame
or a window in one.
"""

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass
class AttentionSpans:
    """
    What attends to what in a layer: each query to all keys of its span.

    cu_seqlens_q, cu_seqlens_k: (spans + 1,) int32, where spans start and end among queries and keys; a span that lost
    everything is empty. max_seqlen: upper bound of a span's length. queries: (P,) those of the keys that are queries,
    or None for all.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen: int
    queries: torch.Tensor | None = None

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

    def refill(self, slots: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
        """
        Kept slots (P,), and all slots of each span that is alone in its bin, as in the released code. valid: (G, S)
        bool or None, False for padding, which takes no room in a bin. Forces a host-device sync.
        """
        bounds = self.cu_seqlens_k.long()
        kept = torch.zeros(int(bounds[-1]), dtype=torch.bool, device=slots.device).index_fill(0, slots, True)
        usable = torch.ones_like(kept) if valid is None else valid.flatten()
        whole, left = F.pad(torch.stack([usable, usable & kept]).cumsum(1), (1, 0))[:, bounds].diff().tolist()
        alone = torch.zeros(len(left), dtype=torch.bool)
        alone[[span for span, *others in first_fit_descending(left, max(whole)) if not others]] = True
        return (kept | alone.to(slots.device).repeat_interleave(bounds.diff())).nonzero().squeeze(-1)


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


def first_fit_descending(lengths: list[int], capacity: int) -> list[list[int]]:
    """
    Paper Algorithm 1: frames, longest first, each into the first bin with room for it. Returns the frames of each bin;
    those without patches are in none. No frame may be longer than the `capacity`.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for frame in sorted(range(len(lengths)), key=lambda frame: -lengths[frame]):
        if lengths[frame] == 0:
            break
        fitting = next((number for number, free in enumerate(room) if free >= lengths[frame]), len(bins))
        if fitting == len(bins):
            bins.append([])
            room.append(capacity)
        bins[fitting].append(frame)
        room[fitting] -= lengths[frame]
    return bins
