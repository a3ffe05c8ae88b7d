"""What a call will drop, on the host before the tower runs, and what the tower gives back."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers.modeling_outputs import BaseModelOutputWithPooling

from .scoring_stts import num_kept_blocks, split_videos
from .sequence_stts import KeptSequence, gather_columns


@dataclass
class VideoFeatures(BaseModelOutputWithPooling):
    """
    pooler_output: per video (K, text hidden size), features of the kept blocks. token_scores: per video (T, n) float32.
    keep_mask: per video (T, n) bool. temporal_loss: scalar or None. last_hidden_state: (P, D), the survivors after
    the last layer that ran. hidden_states: if asked for, the embeddings and each layer's output, (F, N, D) up to the
    pruning layer, then (P, D). deepstack_features: per tap of the tower, per video (K, text hidden size), for text
    models that take them.
    """

    # `ModelOutput` wants a default; these three are always there.
    pooler_output: tuple[torch.Tensor, ...] = None  # type: ignore[assignment]
    token_scores: tuple[torch.Tensor, ...] = None  # type: ignore[assignment]
    keep_mask: tuple[torch.Tensor, ...] = None  # type: ignore[assignment]
    temporal_loss: torch.Tensor | None = None
    deepstack_features: list[tuple[torch.Tensor, ...]] | None = None


@dataclass
class TowerCache:
    """
    What layers `0..l` made of a call's videos: the first call that gets this object fills it, later ones with the same
    videos go on from there. It serves calls that differ in what they drop alone, without gradients.

    states: outputs (G * S, D) of the layers that are read later, by their index. blocks: (G, S, D) what blocks are
    scored by, in the caller's order.
    """

    states: dict[int, torch.Tensor] = field(default_factory=dict)
    blocks: torch.Tensor | None = None


@dataclass
class PruningPlan:
    """
    What the tower has to know of a call's videos, on the host before it runs.

    block_patches: (G, S) row of each block's patches among all frames' patches, -1 for padding. grids: `(T, rows,
        cols)` of each video. pruning_ratio: `k`, or one for each video. with_temporal_loss: whether to compute it.
        block_scores: (G,) in place of the selector's, without a bias. tower_cache: of layers `0..l`.
    """

    block_patches: torch.Tensor
    grids: list[tuple[int, int, int]]
    pruning_ratio: float | Sequence[float]
    with_temporal_loss: bool = False
    detach_temporal_target: bool = True
    block_scores: torch.Tensor | None = field(default=None, kw_only=True)
    tower_cache: TowerCache | None = field(default=None, kw_only=True)

    def check_scores(self) -> None:
        """Raises `ValueError` where ratios or scores are not as many as the videos or their blocks."""
        if isinstance(self.pruning_ratio, Sequence) and len(self.pruning_ratio) != len(self.grids):
            raise ValueError(
                f"`pruning_ratio` holds {len(self.pruning_ratio)} ratios, but the call has {len(self.grids)} videos: "
                "pass one number, or one for each video."
            )
        if self.block_scores is not None and tuple(self.block_scores.shape) != (sum(self.num_blocks),):
            raise ValueError(
                f"`block_scores` has shape {tuple(self.block_scores.shape)}, but must be ({sum(self.num_blocks)},): "
                "one score for every block of the call's videos."
            )

    @property
    def num_kept(self) -> list[int]:
        """`K` of each video."""
        ratio = self.pruning_ratio
        ratios = ratio if isinstance(ratio, Sequence) else [ratio] * len(self.grids)
        grids = zip(self.grids, ratios, strict=True)
        return [num_kept_blocks(frames, rows * cols, k) for (frames, rows, cols), k in grids]

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

    rows: None where it was not read. num_tokens: tokens of each row that are no padding, or None likewise.
    drops_padding: whether rows lose their padding and get new padding. padded_right: bool, or on the device.
    """

    rows: list[list[int]] | None
    num_tokens: list[int] | None = None
    drops_padding: bool = False
    padded_right: torch.Tensor | bool = False

    @classmethod
    def read(
        cls,
        of_videos: torch.Tensor,
        mask: torch.Tensor | None,
        num_blocks: list[int],
        gets_length: bool,
        pads_left: bool = False,
    ) -> "RowPlan":
        """
        of_videos: (B, L) placeholders. mask: (B, L) or None. num_blocks: of each video. gets_length: whether rows get
        one; then nothing forces a host-device sync, and off the CPU an error becomes an assertion on the device.
        pads_left: whether padding moves to the left; otherwise one row without a length keeps its padding.
        """
        batch_size = of_videos.shape[0]
        padded_right = False if mask is None or pads_left else ~mask[:, -1].bool().all()
        drops_padding = mask is not None and (gets_length or pads_left or batch_size > 1)
        hidden = None if mask is None else of_videos & ~mask.bool()
        if of_videos.device.type != "cpu" and gets_length:
            torch._assert_async(of_videos.sum() == sum(num_blocks))
            if hidden is not None:
                torch._assert_async(~hidden.any())
            rows = [list(range(len(num_blocks)))] if batch_size == 1 else None
            return cls(rows, None, drops_padding, padded_right)
        counts = [of_videos.sum(-1)]
        if mask is not None and hidden is not None:
            counts += [mask.bool().sum(-1), hidden.sum(-1)]
        read = torch.stack(counts).tolist()
        rows = assign_videos_to_rows(read[0], num_blocks)
        if mask is None:
            return cls(rows)
        if sum(read[2]):
            raise ValueError(
                f"`attention_mask` hides {sum(read[2])} video placeholder tokens, but may hide only padding. Take the "
                "videos themselves out of the call."
            )
        return cls(rows, read[1] if drops_padding else None, drops_padding, padded_right)

    def gather(
        self, keeps: torch.Tensor, mask: torch.Tensor | None, num_dropped: list[int], pruned_length: int | None
    ) -> KeptSequence:
        """What is left of rows, all of one length, of the tokens that `keeps` (B, L) says."""
        if self.drops_padding and mask is not None:
            keeps = keeps & mask.bool()
        return gather_columns(keeps, self.new_length(num_dropped, keeps, pruned_length), self.padded_right)

    def new_length(self, num_dropped: list[int], kept_tokens: torch.Tensor, pruned_length: int | None) -> int:
        """
        `L'`: `pruned_length`, or the longest row of kept_tokens (B, L). num_dropped: tokens that each video loses.
        Raises `ValueError` for a row that is longer than `pruned_length`.
        """
        if self.rows is None or (self.drops_padding and self.num_tokens is None):
            assert pruned_length is not None  # otherwise `read` reads
            torch._assert_async((kept_tokens.sum(-1) <= pruned_length).all())
            return pruned_length
        before = self.num_tokens or [kept_tokens.shape[1]] * len(self.rows)
        lengths = [n - sum(num_dropped[v] for v in videos) for n, videos in zip(before, self.rows, strict=True)]
        longest = max(lengths)
        if pruned_length is None:
            return max(longest, 1)
        if longest > pruned_length:
            raise ValueError(
                f"`pruned_length` is {pruned_length}, but row {lengths.index(longest)} has {longest} tokens left "
                "after dropping. Make it longer, shorten the row, or raise `pruning_ratio`."
            )
        return pruned_length


def assign_videos_to_rows(placeholders_per_row: list[int], tokens_per_video: list[int]) -> list[list[int]]:
    """
    Which videos belong to which row, in order. Raises `ValueError` where a row's placeholders are not those of whole
    videos, or some are left over.
    """
    rows, video = [], 0
    for row, count in enumerate(placeholders_per_row):
        first, taken = video, 0
        while video < len(tokens_per_video) and taken < count:
            taken += tokens_per_video[video]
            video += 1
        if taken != count:
            raise ValueError(
                f"Row {row} of the batch has {count} video placeholder tokens, but the next videos in "
                f"`pixel_values_videos` have {tokens_per_video[first : video or None]} tokens by their grids. Text "
                "and videos must come from the same call of the processor, and the text must not be truncated."
            )
        rows.append(list(range(first, video)))
    if video != len(tokens_per_video):
        raise ValueError(
            f"`pixel_values_videos` holds {len(tokens_per_video)} videos, but the video placeholder tokens of the "
            f"batch are those of {video}. Text and videos must come from the same call of the processor; leave out "
            "videos that `past_key_values` has already seen."
        )
    return rows
