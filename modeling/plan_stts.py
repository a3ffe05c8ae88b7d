"""What a call will drop, on the host before the tower runs, and what the tower gives back."""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutputWithPooling

from .budget_stts import KeepRule
from .scoring_stts import split_videos
from .sequence_stts import KeptSequence, check_tensor, gather_columns


@dataclass
class VideoFeatures(BaseModelOutputWithPooling):
    """
    pooler_output: per video (K, text hidden size), features of the kept blocks. token_scores: per video (T, n) float32.
    keep_mask: per video (T, n) bool. temporal_loss: scalar or None, the mean of temporal_errors, per video ((T - 1) *
    n,). last_hidden_state: (P, D), the survivors after the last layer that ran. hidden_states: if asked for, the
    embeddings and each layer's output, (F, N, D) up to the pruning layer, then (P, D). deepstack_features: per tap of
    the tower, per video (K, text hidden size), for text models that take them.
    """

    # `ModelOutput` wants a default; these three are always there.
    pooler_output: tuple[torch.Tensor, ...] = None  # type: ignore[assignment]
    token_scores: tuple[torch.Tensor, ...] = None  # type: ignore[assignment]
    keep_mask: tuple[torch.Tensor, ...] = None  # type: ignore[assignment]
    temporal_loss: torch.Tensor | None = None
    temporal_errors: list[torch.Tensor] | None = None
    deepstack_features: list[tuple[torch.Tensor, ...]] | None = None


class TowerCache:
    """
    What layers `0..l` made of a call's videos: the first call that gets this object fills it, later ones with the same
    videos go on from there. It serves calls that differ in what they drop alone, without gradients.

    states: outputs (G * S, D) of the layers that are read later, by their index. blocks: (G, S, D) what blocks are
    scored by, in the caller's order.
    """

    def __init__(self) -> None:  # no dataclass: FSDP would copy it
        self.states: dict[int, torch.Tensor] = {}
        self.blocks: torch.Tensor | None = None


@dataclass
class PruningPlan:
    """
    What the tower has to know of a call's videos, on the host before it runs.

    block_patches: (G, S) row of each block's patches among all frames' patches, -1 for padding. grids: `(T, rows,
    cols)` of each video. keep: how many blocks stay. block_scores: (G,) in place of the selector's, without a bias.
    tower_cache: of layers `0..l`. above: later frames' blocks that reach the threshold, of each video, once scored.
    """

    block_patches: torch.Tensor
    grids: list[tuple[int, int, int]]
    keep: KeepRule = field(default_factory=KeepRule)
    with_temporal_loss: bool = False
    detach_temporal_target: bool = True
    block_scores: torch.Tensor | None = field(default=None, kw_only=True)
    tower_cache: TowerCache | None = field(default=None, kw_only=True)
    above: list[int] | None = field(default=None, init=False)

    def check_scores(self) -> None:
        """Raises `ValueError` where the rule or given scores do not fit the videos or each other."""
        self.keep.check_videos(self.grids)
        if self.block_scores is not None and self.keep.threshold is not None:
            raise ValueError(
                "`block_scores` came with `score_threshold`, which fits the model's own: pass `pruning_ratio`."
            )
        given: Any = self.block_scores
        shape = tuple(given.shape) if isinstance(given, torch.Tensor) else type(given).__name__
        if given is not None and shape != (sum(self.num_blocks),):
            raise ValueError(
                f"`block_scores` has shape {shape}, but must be a tensor of shape ({sum(self.num_blocks)},): one score "
                "for every block of the call's videos."
            )

    @property
    def num_kept(self) -> list[int]:
        """`K` of each video, with a threshold once the tower has called `count`."""
        return self.keep.num_kept(self.grids, self.above)

    def count(self, scores: torch.Tensor, is_learned: bool) -> None:
        """
        With a threshold, counts the scores (G,) that reach it, with one host-device sync for all videos. Raises
        `ValueError` where learned scores are all equal, as before training.
        """
        if (threshold := self.keep.threshold) is None:
            return
        found = [(video[1:] >= threshold).sum() for video in self.per_video(scores)]
        *self.above, differ = torch.stack([*found, (scores != scores[:1]).sum()]).tolist()
        if is_learned and not differ and any(frames > 1 for frames, _, _ in self.grids):
            raise ValueError(
                f"`score_threshold` is {threshold}, but all scores are {float(scores.detach()[0]):.4g}: the scorer is "
                "untrained. Train it, or use `selector='cosine'` or `pruning_ratio`."
            )

    @property
    def drops(self) -> bool:
        """Whether blocks go, or may go where scores will say how many."""
        return self.keep.threshold is not None or self.num_kept != self.num_blocks

    @property
    def num_blocks(self) -> list[int]:
        """`n * T` of each video: its tokens before dropping."""
        return [frames * rows * cols for frames, rows, cols in self.grids]

    @property
    def counts(self) -> tuple[list[int], list[int], list[int]]:
        """Blocks of each video, those that stay, and those that go."""
        blocks, kept = self.num_blocks, self.num_kept
        return blocks, kept, [n - k for n, k in zip(blocks, kept, strict=True)]

    def per_video(self, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(G,) as (T, n) of each video."""
        videos = zip(split_videos(blocks, self.grids), self.grids, strict=True)
        return tuple(video.view(frames, rows * cols) for video, (frames, rows, cols) in videos)


@dataclass
class RowPlan:
    """
    Which videos lie in which row, and how many tokens a row has, on the host before the tower runs.

    rows: None where it was not read. image_tokens: of each row, likewise. num_tokens: of each row without padding.
    drops_padding: whether rows lose their padding and get new padding. padded_right: bool, or on the device.
    """

    rows: list[list[int]] | None
    image_tokens: list[int] | None = None
    num_tokens: list[int] | None = None
    drops_padding: bool = False
    padded_right: torch.Tensor | bool = False

    @classmethod
    def read(
        cls,
        found: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        expected: tuple[list[int], list[int]],
        gets_length: bool,
        pads_left: bool = False,
    ) -> "RowPlan":
        """
        found: placeholders of videos and images, (B, L) each. mask: (B, L) or None. expected: tokens of each video and
        image. gets_length: whether rows get one; then nothing forces a host-device sync, and off the CPU an error
        becomes an assertion on the device. pads_left: whether padding moves to the left; otherwise one row without a
        length keeps its padding.
        """
        batch_size, placeholders = found[0].shape[0], found[0] | found[1]
        padded_right = False if mask is None or pads_left else ~mask[:, -1].bool().all()
        drops_padding = mask is not None and (gets_length or pads_left or batch_size > 1)
        shown = torch.ones_like(placeholders) if mask is None else mask.bool()
        hidden = placeholders & ~shown
        if placeholders.device.type != "cpu" and gets_length:
            for kind, counts in zip(found, expected, strict=True):
                torch._assert_async(kind.sum() == sum(counts))
            torch._assert_async(~hidden.any())
            rows = [list(range(len(expected[0])))] if batch_size == 1 else None
            return cls(rows, drops_padding=drops_padding, padded_right=padded_right)
        videos, images, lengths, masked = torch.stack([x.sum(-1) for x in (*found, shown, hidden)]).tolist()
        rows = assign_to_rows("video", videos, expected[0])
        assign_to_rows("image", images, expected[1])
        if sum(masked):
            raise ValueError(
                f"`attention_mask` hides {sum(masked)} placeholder tokens of videos or images, but may hide only "
                "padding. Take the videos and images themselves out of the call."
            )
        return cls(rows, images, lengths if drops_padding else None, drops_padding, padded_right)

    def gather(
        self, keeps: torch.Tensor, mask: torch.Tensor | None, num_dropped: list[int], pruned_length: int | None
    ) -> KeptSequence:
        """
        What is left of rows, of the tokens that `keeps` (B, L) says: `pruned_length` columns, or those of the longest
        row. num_dropped: tokens that each video loses. Raises `ValueError` for a row that is longer.
        """
        if self.drops_padding and mask is not None:
            keeps = keeps & mask.bool()
        if self.rows is None or (self.drops_padding and self.num_tokens is None):
            assert pruned_length is not None  # otherwise `read` reads
            torch._assert_async((keeps.sum(-1) <= pruned_length).all())
            return gather_columns(keeps, pruned_length, self.padded_right)
        before = self.num_tokens or [keeps.shape[1]] * len(self.rows)
        lengths = [n - sum(num_dropped[v] for v in videos) for n, videos in zip(before, self.rows, strict=True)]
        longest = max(lengths)
        if pruned_length is not None and longest > pruned_length:
            raise ValueError(
                f"`pruned_length` is {pruned_length}, but row {lengths.index(longest)} has {longest} tokens left "
                "after dropping. Make it longer, shorten the row, or raise `pruning_ratio`."
            )
        return gather_columns(keeps, pruned_length or max(longest, 1), self.padded_right)


def assign_to_rows(kind: str, placeholders_per_row: list[int], tokens: list[int]) -> list[list[int]]:
    """
    Which videos or images belong to which row, in order, by the tokens of each. Raises `ValueError` where a row's
    placeholders are not those of whole ones, or some are left over.
    """
    name = "pixel_values_videos" if kind == "video" else "pixel_values"
    rows, index = [], 0
    for row, count in enumerate(placeholders_per_row):
        first, taken = index, 0
        while index < len(tokens) and taken < count:
            taken += tokens[index]
            index += 1
        if taken != count:
            raise ValueError(
                f"Row {row} of the batch has {count} {kind} placeholder tokens, but the next {kind}s in `{name}` have "
                f"{tokens[first : index or None]} tokens by their grids. Text and {kind}s must come from the same call "
                "of the processor, and the text must not be truncated."
            )
        rows.append(list(range(first, index)))
    if index != len(tokens):
        raise ValueError(
            f"`{name}` holds {len(tokens)} {kind}s, but the batch has {kind} placeholder tokens for "
            f"{index}. Text and {kind}s must come from the same call of the processor; leave out {kind}s that "
            "`past_key_values` has already seen."
        )
    return rows


def check_tensors(vision: dict[str, Any], *names: str) -> tuple[torch.Tensor, ...]:
    """The arguments of these names; raises `ValueError` where one is None, `TypeError` where one is no tensor."""
    for name in names:
        value = vision.get(name)
        if value is None:
            raise ValueError(f"`{names[0]}` needs `{name}`, but it is None; pass all that the processor returns.")
        check_tensor(name, value)
    return tuple(vision[name] for name in names)


def check_grids(name: str, grids: torch.Tensor) -> list[tuple[int, int, int]]:
    """Grids (V, 3) as `(T, rows, cols)` of each video or image, on the host; raises `ValueError` or `TypeError`."""
    kind = name.partition("_")[0]
    if grids.dim() != 2 or grids.shape[1] != 3:
        raise ValueError(f"`{name}` has shape {tuple(grids.shape)}, but must be ({kind}s, 3): frames, rows, columns.")
    if grids.is_floating_point():
        raise TypeError(f"`{name}` is {grids.dtype}, but must hold whole numbers; pass what the processor returns.")
    read = [(int(frames), int(rows), int(cols)) for frames, rows, cols in grids.tolist()]
    if not read or min(min(grid) for grid in read) < 1:
        raise ValueError(f"`{name}` is {read}, but every {kind} needs at least one frame, row and column.")
    return read


def check_finite(pixel_values_videos: torch.Tensor) -> None:
    """Raises `ValueError` for NaN or infinite pixels in CPU memory; elsewhere looking would force a sync."""
    if pixel_values_videos.device.type != "cpu" or pixel_values_videos.sum(dtype=torch.float32).isfinite():
        return  # one pass and nothing to store; only a sum that is not finite, or overflows, is worth a closer look
    if not pixel_values_videos.isfinite().all():
        raise ValueError("`pixel_values_videos` holds NaN or infinite values; check how the frames were decoded.")
