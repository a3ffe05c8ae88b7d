"""Survivors of frames whose patches lie row by row, so that the patches of a block are gathered, and spread again.

Blocks and their `S` slots are those of `scoring_stts.py`: `block_patches` (G, S) holds the row of each block's patches
among those of all frames, -1 where a window hangs over the border of the grid. `frame_lengths` holds how many patches
each of the `F` frames has, on the host.
"""

import itertools
from dataclasses import dataclass

import torch

from .layout_stts import FrameSequence, frame_bounds


@dataclass
class GatheredSequence(FrameSequence):
    """
    A `FrameSequence` that knows where its patches came from. Where windows hang over the border, more stretches at its
    end hold their padding slots: they keep every size known on the host and are seen by no frame.

    whole_cu_seqlens: like `cu_seqlens` (and as long), where frames that lost nothing start and end.
    max_seqlen: upper bound of a stretch's length, in patches, and the longest whole frame's.
    window_index: (K, S) slots of each kept block, or None where they are simply consecutive.
    window_valid: (K, S) bool, False for padding, or None where there is none.
    """

    whole_cu_seqlens: torch.Tensor
    max_seqlen: int
    window_index: torch.Tensor | None = None
    window_valid: torch.Tensor | None = None

    def windows(self, hidden_states: torch.Tensor, window_size: int) -> torch.Tensor:
        """Patches (P, D) as kept blocks (K, S, D), padding slots zero; a view where windows do not hang over."""
        if self.window_index is None:
            return hidden_states.unflatten(0, (-1, window_size))
        windows = hidden_states[self.window_index]
        return windows if self.window_valid is None else windows * self.window_valid[..., None].to(windows.dtype)

    def without_padding(self, num_frames: int) -> "GatheredSequence":
        """The same without the stretches of padding slots; forces a host-device sync."""
        if self.window_valid is None or self.window_index is None:
            return self
        num_valid = int(self.cu_seqlens[num_frames])
        window_index = self.window_index.clamp_max(max(num_valid - 1, 0))
        return GatheredSequence(
            self.patch_index[:num_valid],
            self.cu_seqlens[: num_frames + 1],
            self.whole_cu_seqlens[: num_frames + 1],
            self.max_seqlen,
            window_index,
            self.window_valid,
        )


def frame_of_blocks(frame_blocks: list[int], device: torch.device) -> torch.Tensor:
    """For `F` frames of `frame_blocks[f]` blocks each: the frame of every block (G,)."""
    runs, frame = [], 0
    for blocks, frames in itertools.groupby(frame_blocks):  # one tensor per run of like frames, not per frame
        num_frames = len(list(frames))
        runs.append(torch.arange(num_frames * blocks, device=device) // blocks + frame)
        frame += num_frames
    return torch.cat(runs)


def gather_blocks(patches: torch.Tensor, block_patches: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """
    Patches (F * N, D) as blocks (G, S, D), padding slots zero, and (G, S) bool, False for padding, or None without any.
    """
    if block_patches.numel() <= patches.shape[0]:
        return patches[block_patches], None
    valid = block_patches >= 0
    return patches[block_patches.clamp_min(0)] * valid[..., None].to(patches.dtype), valid


def spread_to_patches(values: torch.Tensor, block_patches: torch.Tensor, num_patches: int) -> torch.Tensor:
    """Values (G,) of blocks as those of their patches, (num_patches,); block_patches: (G, S)."""
    # One spare place past the end takes the padding slots.
    place = torch.where(block_patches < 0, num_patches, block_patches)
    spread = values[:, None].expand(block_patches.shape).flatten()
    return values.new_zeros(num_patches + 1).scatter(0, place.flatten(), spread)[:num_patches]


def sequence_kept_patches(
    kept_blocks: torch.Tensor, block_patches: torch.Tensor, block_frame: torch.Tensor, frame_lengths: list[int]
) -> GatheredSequence:
    """
    The survivors as one flat sequence.

    kept_blocks: (K,) ascending. block_patches: (G, S). block_frame: (G,) frame of each block. Every size depends on
    these shapes and the host's numbers alone, so nothing forces a host-device sync.
    """
    windows = block_patches[kept_blocks]  # (K, S)
    frame = block_frame[kept_blocks][:, None].expand_as(windows)  # (K, S)
    window_size = windows.shape[1]
    overhang, longest = block_patches.numel() - sum(frame_lengths), max(frame_lengths)
    bounds = frame_bounds(frame_lengths, windows.device)
    lengths = torch.zeros(len(frame_lengths), dtype=torch.int64, device=windows.device)
    if overhang <= 0:
        lengths = lengths.index_add(0, frame[:, 0], torch.full_like(frame[:, 0], window_size))
        return GatheredSequence(windows.flatten(), cumulative_lengths(lengths), bounds, longest)
    valid = windows >= 0
    lengths = lengths.index_add(0, frame.flatten(), valid.flatten().long())
    # As long as a frame at most: attention within one long stretch would cost more than all frames together.
    num_stretches = -(-min(overhang, windows.numel()) // longest)
    padding = windows.numel() - lengths.sum() - longest * torch.arange(num_stretches, device=lengths.device)
    lengths = torch.cat([lengths, padding.clamp(0, longest)])
    order = torch.sort((~valid).flatten().long(), stable=True).indices  # (P,) padding slots behind everything
    window_index = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    return GatheredSequence(
        windows.flatten()[order].clamp_min(0),
        cumulative_lengths(lengths),
        torch.cat([bounds, bounds[-1:].expand(num_stretches)]),
        longest,
        window_index.view_as(windows),
        valid,
    )


def sequence_with_refill(
    sequence: GatheredSequence, frames: list[int], window_size: int, frame_lengths: list[int]
) -> GatheredSequence:
    """
    The same sequence with all patches of the given `frames` in it, as context (released code, single-frame bins).

    The sequence must be without padding. Forces a host-device sync.
    """
    device = sequence.patch_index.device
    present = torch.zeros(sum(frame_lengths), dtype=torch.bool, device=device)
    present[sequence.patch_index] = True
    starts = list(itertools.accumulate(frame_lengths, initial=0))
    for frame in frames:
        present[starts[frame] : starts[frame + 1]] = True
    patch_index = present.nonzero().squeeze(-1)
    slot_of_patch = torch.zeros(present.numel(), dtype=torch.int64, device=device)
    slot_of_patch[patch_index] = torch.arange(patch_index.numel(), device=device)
    window_patches = sequence.patch_index
    if sequence.window_index is not None:
        window_patches = window_patches[sequence.window_index]
    return GatheredSequence(
        patch_index,
        cumulative_lengths(present)[sequence.whole_cu_seqlens],
        sequence.whole_cu_seqlens,
        sequence.max_seqlen,
        slot_of_patch[window_patches].view(-1, window_size),
        sequence.window_valid,
    )


def cumulative_lengths(lengths: torch.Tensor) -> torch.Tensor:
    """(F,) lengths or flags -> (F + 1,) int32 with a leading zero."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
