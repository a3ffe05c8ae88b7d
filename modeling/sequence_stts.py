"""The LLM's shortened sequence: which of the caller's tokens are left, where they lie, and the way back.

Pure tensors and plain numbers; nothing here knows of Molmo2. A sequence of the caller has `L` tokens, what is left of
it `L'`. `B` rows may lose different numbers of tokens: shorter rows then get filler columns, which are masked.
"""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class KeptSequence:
    """
    What is left of a batch of sequences.

    kept_indices: (B, L') place of every column in the caller's sequence, -1 for filler.
    length: `L`, the length of the caller's sequence.
    """

    kept_indices: torch.Tensor
    length: int

    @property
    def is_filler(self) -> torch.Tensor:
        return self.kept_indices < 0

    def take(self, tensor: torch.Tensor, filler) -> torch.Tensor:
        """Columns of (B, L, ...) that are left: (B, L', ...), `filler` in filler columns."""
        index = self.kept_indices.clamp_min(0)
        batch = torch.arange(index.shape[0], device=index.device)[:, None]
        taken = tensor.expand(index.shape[0], *tensor.shape[1:])[batch, index]
        mask = self.is_filler.view(*index.shape, *[1] * (taken.dim() - 2))
        return taken.masked_fill(mask, filler)

    def take_mask(self, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """(B, L) padding mask, or None for all ones, as (B, L') int64."""
        if attention_mask is None:
            return (~self.is_filler).long()
        return self.take(attention_mask.long(), 0)

    def take_4d_mask(self, attention_mask: torch.Tensor) -> torch.Tensor:
        """(B, heads, L, L) mask, bool or additive, as (B, heads, L', L'). Raises `ValueError` for other shapes."""
        if attention_mask.shape[-2:] != (self.length, self.length):
            raise ValueError(
                f"`attention_mask` has shape {tuple(attention_mask.shape)}, but a 4D mask beside videos must be "
                f"(batch, heads, {self.length}, {self.length}), as long as the sequence both ways. "
                "Pass the 2D padding mask instead."
            )
        index = self.kept_indices.clamp_min(0)
        masks = attention_mask.expand(index.shape[0], -1, -1, -1)
        masks = torch.stack([mask[:, rows][:, :, rows] for mask, rows in zip(masks, index, strict=True)])
        hidden = False if masks.dtype == torch.bool else torch.finfo(masks.dtype).min
        return masks.masked_fill(self.is_filler[:, None, None, :], hidden)

    def take_position_ids(
        self, position_ids: torch.Tensor, dropped: torch.Tensor | None = None, sample_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """
        Positions (B, L) or (1, L) of what is left, (B, L'): as they were, or, with `dropped` (B, L) bool, less the
        number of dropped tokens before each in its sample (`sample_ids` (B, L), or one sample a row). Filler gets 0.
        """
        if dropped is not None:
            before = dropped.long().cumsum(-1) - dropped.long()  # dropped tokens ahead of each
            if sample_ids is not None:
                starts = sample_ids.diff(dim=-1, prepend=sample_ids[:, :1] - 1) != 0
                before = before - torch.where(starts, before, 0).cummax(-1).values
            position_ids = position_ids - before
        return self.take(position_ids, 0)


def find_samples(position_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
    """
    Samples that share a row: a new one begins wherever (B, L) positions do not grow. Tokens that a (B, L) mask hides
    begin none, whatever their positions. Returns (B, L) numbers.
    """
    if attention_mask is None:
        restarts = position_ids.diff(dim=-1, prepend=position_ids[:, :1] - 1) <= 0
        return restarts.long().cumsum(-1)
    shown = attention_mask.bool()
    place = torch.arange(shown.shape[-1], device=shown.device).expand_as(shown)
    last_shown = nn.functional.pad(torch.where(shown, place, -1).cummax(-1).values[:, :-1], (1, 0), value=-1)
    grows = position_ids > position_ids.gather(-1, last_shown.clamp_min(0))
    restarts = shown & (~grows | (last_shown < 0))
    return restarts.long().cumsum(-1)


def any_row_is_packed(position_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> bool:
    """Whether a row of (B, L) positions holds more than one sample, by `find_samples`; waits for the device."""
    shown = torch.ones_like(position_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    samples = find_samples(position_ids, shown)
    return bool((torch.where(shown, samples, 0).amax(-1) > 1).any())


def placeholders_of_videos(
    placeholders: torch.Tensor, frame_starts: torch.Tensor, image_starts: torch.Tensor
) -> torch.Tensor:
    """Placeholders (B, L) whose nearest opening token before them opens a frame and not an image."""
    place = torch.arange(placeholders.shape[-1], device=placeholders.device).expand_as(placeholders)
    last_start = torch.where(frame_starts | image_starts, place, 0).cummax(-1).values
    return placeholders & frame_starts.gather(-1, last_start)


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
                f"`pixel_values_videos` have {tokens_per_video[first : video or None]} tokens by `video_grids`. Text "
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


def keep_tokens(video_placeholders: torch.Tensor, keep_mask: torch.Tensor) -> torch.Tensor:
    """
    All tokens (B, L) but the placeholders of dropped blocks.

    video_placeholders: (B, L) bool, in row-major order those of blocks `keep_mask` (G,).
    """
    return torch.ones_like(video_placeholders).masked_scatter(video_placeholders, keep_mask)


def keep_positions(kept_tokens: torch.Tensor, new_length: int, fill_right: bool | torch.Tensor = False) -> KeptSequence:
    """
    The kept tokens (B, L) of each row moved together to `new_length` columns, in order.

    Rows with fewer tokens get filler on the left, so that the last column stays the last token, or on the right;
    `fill_right` may be a bool on the device. No row may have more.
    """
    length = kept_tokens.shape[-1]
    kept_tokens = nn.functional.pad(kept_tokens, (0, max(new_length - length, 0)))
    # A stable sort of the flags moves the kept tokens to one end without waiting for their number.
    order = torch.sort((kept_tokens ^ fill_right).to(torch.int8), dim=-1, stable=True).indices
    places = torch.arange(new_length, device=order.device)
    if fill_right is not True:
        start = order.shape[-1] - new_length
        places = places + (start if fill_right is False else torch.where(fill_right, 0, start))
    order = order[:, places]
    return KeptSequence(order.masked_fill(~kept_tokens.gather(-1, order), -1), length)


@dataclass
class CachedPrompt:
    """
    What a cache holds of a caller's sequence after tokens were dropped; rides on the cache as `pruned_prompt`.

    kept_indices: (B, columns) place of every column of the cache in the caller's sequence, -1 for filler.
    seen: how many of the caller's tokens the cache stands for, dropped ones included.
    next_position: (B, 1) RoPE position of the next token.
    token_ids: (B, seen) those tokens, where known.
    answered: how many of them, at the end, are an answer; each took a position, also those after a row's end.
    """

    kept_indices: torch.Tensor
    seen: int
    next_position: torch.Tensor
    token_ids: torch.Tensor | None = None
    answered: int = 0

    def positions_of_new(self, num_tokens: int, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """
        Positions (B, L) of the next `L = num_tokens`. attention_mask: (B, seen + L) or None; tokens that it hides take
        no position, neither of the answer nor of the new ones. With nothing seen yet they do, as in transformers.
        """
        if attention_mask is None or not self.seen:
            return self.next_position + torch.arange(num_tokens, device=self.next_position.device)
        shown = attention_mask[:, self.seen - self.answered :].bool().cumsum(-1)  # (B, answered + L)
        return self.next_position - self.answered + shown[:, self.answered :] - 1

    def check(self, cache_length: int, batch_size: int) -> None:
        """Raises `ValueError` if the cache was cropped, extended or reordered since."""
        if tuple(self.kept_indices.shape) != (batch_size, cache_length):
            raise ValueError(
                f"`past_key_values` holds {cache_length} positions for a batch of {batch_size}, but recorded "
                f"{self.kept_indices.shape[1]} for {self.kept_indices.shape[0]} when video tokens were dropped, so "
                "it cannot be matched to the text any more. Call again without `past_key_values`."
            )

    def extended(self, num_tokens: int) -> "CachedPrompt":
        """The same after `num_tokens` more tokens, none of them dropped."""
        steps = torch.arange(num_tokens, device=self.kept_indices.device)
        added = (self.seen + steps).expand(self.kept_indices.shape[0], -1)
        return CachedPrompt(
            torch.cat([self.kept_indices, added], dim=-1),
            self.seen + num_tokens,
            self.next_position + num_tokens,
            answered=self.answered + num_tokens,
        )
