"""What a cache holds of a caller's sequence, where its columns or their positions do not say it themselves."""

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from .sequence_stts import KeptSequence, Tokens


@dataclass
class CachedPrompt:
    """
    What a cache holds of a caller's sequence where tokens were dropped, or have positions that are not their places:
    an attribute of the cache, whatever its class, which copies of the cache carry.

    kept_indices: (B, columns) place of every column of the cache in the caller's sequence, -1 for filler.
    seen: how many of the caller's tokens the cache stands for, dropped ones included.
    positions: (B, columns) RoPE position after which a token behind each column counts on: its own, or that of what was
        dropped behind it. -1 for columns that a mask hides.
    token_ids: (B, seen) those tokens, where known.
    unusable: why no prompt fits the cache, or "".
    skips_hidden: whether hidden columns took no positions, as in `generate`; then the mask says all positions.
    """

    kept_indices: torch.Tensor
    seen: int
    positions: torch.Tensor
    token_ids: torch.Tensor | None = None
    unusable: str = ""
    skips_hidden: bool = False

    @property
    def next_position(self) -> torch.Tensor:
        """(B, 1) RoPE position of the next token, which a video before it may be ahead of."""
        columns = self.positions.shape[1]
        if columns == 0:
            return self.positions.new_zeros(self.positions.shape[0], 1)
        places = torch.arange(columns, device=self.positions.device)
        last = torch.where(self.positions >= 0, places, 0).argmax(-1, keepdim=True)
        return self.positions.gather(-1, last) + 1

    @staticmethod
    def of(cache: Cache | None) -> "CachedPrompt | None":
        """The note on a cache, cropped as the cache was since; None where there is none."""
        note: CachedPrompt | None = getattr(cache, "pruned_prompt", None)
        if note is None or cache is None:
            return None
        columns = int(cache.get_seq_length())
        if columns == 0:  # it was reset
            return None
        return note if note.unusable else note.crop(min(columns, note.kept_indices.shape[1]))

    @classmethod
    def untouched(cls, columns: int, batch_size: int, device: torch.device, cache: Cache | None) -> "CachedPrompt":
        """Of a cache that lost nothing: its columns are the caller's tokens."""
        sequence = KeptSequence.whole(batch_size, columns, device)
        by_mask = getattr(cache, "positions_skip_padding", False)
        return cls(sequence.kept_indices, columns, sequence.kept_indices, skips_hidden=by_mask)

    def hide(self, mask: torch.Tensor) -> "CachedPrompt":
        """This note where a mask (B, columns) hides columns, such as those of an answer after its row's end."""
        positions = mask.cumsum(-1) - 1 if self.skips_hidden else self.positions
        return replace(self, positions=positions.masked_fill(mask == 0, -1))

    def attach(self, cache: Cache) -> None:
        cache.pruned_prompt = self  # type: ignore[attr-defined]  # a place of our own on transformers' object

    @staticmethod
    @contextlib.contextmanager
    def set_aside(cache: Cache | None, after: "CachedPrompt | None") -> Iterator[None]:
        """
        Takes the note off a cache while native code counts in the cache's own columns. An error puts the old one back,
        or, where there was none, the note `after` the call as unusable; otherwise the caller attaches the new one.
        """
        note = CachedPrompt.of(cache)
        if note is not None:
            del cache.pruned_prompt  # type: ignore[union-attr]
        try:
            yield
        except BaseException:
            left = note or (after and replace(after, unusable="an error ended the call that filled it."))
            if cache is not None and left is not None:
                left.attach(cache)
            raise

    def positions_of_new(self, num_tokens: int, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """
        Positions (B, L) of the next `L = num_tokens`. attention_mask: (B, seen + L) or None; tokens that it hides take
        no position. With nothing seen yet they do, as in transformers.
        """
        if attention_mask is None or not self.seen:
            return self.next_position + torch.arange(num_tokens, device=self.next_position.device)
        return self.next_position + attention_mask[:, self.seen :].bool().cumsum(-1) - 1

    def check_usable(self) -> None:
        """Raises `ValueError` for a cache that no prompt fits."""
        if self.unusable:
            raise ValueError(f"`past_key_values` cannot be used again: {self.unusable} Call again without it.")

    def fitted(self, columns: int, batch_size: int) -> "CachedPrompt":
        """
        This note, where it is that of a cache of `columns` positions in `batch_size` rows. Raises `ValueError` if the
        cache was extended or reordered since.
        """
        self.check_usable()
        if tuple(self.kept_indices.shape) == (batch_size, columns):
            return self
        raise ValueError(
            f"`past_key_values` holds {columns} positions for a batch of {batch_size}, but recorded "
            f"{self.kept_indices.shape[1]} for {self.kept_indices.shape[0]} when they were filled, so "
            "it cannot be matched to the text any more. Call again without `past_key_values`."
        )

    def crop(self, columns: int) -> "CachedPrompt":
        """
        This note after the cache is cropped to its first `columns`. Raises `ValueError` where that cuts off more than
        text behind the last video: then nobody can say which of the caller's tokens are left.
        """
        gone = self.kept_indices.shape[1] - columns
        if gone == 0:
            return self
        if columns < 1 or not bool((self.kept_indices[:, columns] == self.seen - gone).all()):
            raise ValueError(
                f"`past_key_values` was cropped to {columns} positions, into the part where video tokens were dropped. "
                "Crop only text behind the last video, or call again without `past_key_values`."
            )
        return replace(
            self,
            kept_indices=self.kept_indices[:, :columns],
            seen=self.seen - gone,
            positions=self.positions[:, :columns],
            token_ids=None if self.token_ids is None else self.token_ids[:, :-gone],
        )

    def reorder(self, rows: torch.Tensor) -> "CachedPrompt":
        """This note after `cache.reorder_cache(rows)` or `cache.batch_select_indices(rows)`; rows: (B',) indices."""
        rows = rows.to(self.kept_indices.device)
        return replace(
            self,
            kept_indices=self.kept_indices[rows],
            positions=self.positions[rows],
            token_ids=None if self.token_ids is None else self.token_ids[rows.to(self.token_ids.device)],
        )

    def repeat(self, copies: int) -> "CachedPrompt":
        """This note after `cache.batch_repeat_interleave(copies)`."""
        batch_size = self.kept_indices.shape[0]
        return self.reorder(torch.arange(batch_size, device=self.kept_indices.device).repeat_interleave(copies))

    def extended(self, num_tokens: int, token_ids: torch.Tensor | None = None) -> "CachedPrompt":
        """This note after `num_tokens` more tokens of an answer, token_ids (B, num_tokens) where known."""
        steps = torch.arange(num_tokens, device=self.kept_indices.device)
        added = (self.seen + steps).expand(self.kept_indices.shape[0], -1)
        known = None
        if self.token_ids is not None and token_ids is not None:
            known = torch.cat([self.token_ids.to(token_ids.device), token_ids], dim=-1)
        return replace(
            self,
            kept_indices=torch.cat([self.kept_indices, added], dim=-1),
            seen=self.seen + num_tokens,
            positions=torch.cat([self.positions, self.next_position + steps], dim=-1),
            token_ids=known,
        )


def mark_cache(cache: Any, vision: bool = False, skips_padding: bool = False) -> None:
    """Marks a cache, with or without a note, as one with vision tokens, or with positions counted by the mask."""
    if isinstance(cache, Cache):
        for name, value in (("holds_vision_tokens", vision), ("positions_skip_padding", skips_padding)):
            if value:
                setattr(cache, name, True)


def needs_note(cache: Cache | None, tokens: Tokens) -> bool:
    """Whether new tokens after a cache get their positions from us: its columns do not say them."""
    by_mask = tokens.position_ids is None and tokens.padding_mask is not None and tokens.inputs_embeds is None
    return CachedPrompt.of(cache) is not None or (by_mask and getattr(cache, "positions_skip_padding", False))


def holds_vision(cache: Any) -> bool:
    """Whether a cache has columns of videos or images."""
    return getattr(cache, "holds_vision_tokens", False) and int(cache.get_seq_length()) > 0


def check_new_vision(cache: Any, pixels: Collection[str]) -> None:
    """Raises `ValueError` for `pixels`, names of arguments, behind cached vision tokens that would attend to them."""
    if pixels and holds_vision(cache):
        raise ValueError(
            f"`{next(iter(pixels))}` came with `past_key_values` that hold a video or image already. Vision tokens "
            "attend to each other in both directions, so the cached ones would not be the same. Leave out what "
            "the cache has seen; for anything new, pass the whole conversation with all its videos and images again, "
            "without `past_key_values`."
        )


def forget_marks(cache: Any, num_tokens: int) -> None:
    """Takes the marks off a cache that was reset; a step of decoding does not look, since that may force a sync."""
    names = [name for name in ("holds_vision_tokens", "positions_skip_padding") if hasattr(cache, name)]
    if names and num_tokens > 1 and int(cache.get_seq_length()) == 0:
        for name in names:
            delattr(cache, name)


def resume_cache(cache: Cache | None, tokens: Tokens, pruned_length: int | None) -> CachedPrompt:
    """What a cache holds of the caller's sequence; raises `ValueError` where tokens cannot follow it."""
    note, (batch_size, _) = CachedPrompt.of(cache), tokens.shape
    columns = int(cache.get_seq_length()) if cache is not None else 0
    if note is None:
        cached = CachedPrompt.untouched(columns, batch_size, tokens.device, cache)
    else:
        cached = note.fitted(columns, batch_size)
    if pruned_length is not None and cached.seen:
        raise ValueError(
            f"`pruned_length` is {pruned_length}, but `past_key_values` holds {cached.seen} tokens already. It is for "
            "calls without a cache, such as training; leave it out."
        )
    return cached


def last_positions(tokens: Tokens, sequence: KeptSequence) -> torch.Tensor:
    """
    For each column that is left, (B, L'), the position after which the next token counts on: that of the caller's last
    token before the next column, which may be a dropped one, by all axes but time, as native models count.
    """
    positions, mask = tokens.position_ids, tokens.padding_mask
    assert positions is not None  # set by `prune`
    places = torch.arange(sequence.length, device=positions.device).expand(len(sequence.kept_indices), -1)
    shown = places if mask is None else torch.where(mask.bool(), places, 0).cummax(-1).values
    following = nn.functional.pad(sequence.kept_indices[:, 1:], (0, 1), value=sequence.length)
    following = torch.where(following < 0, sequence.length, following)
    of_tokens = positions if positions.dim() == 2 else positions[1:].amax(0)
    return of_tokens.expand(places.shape).gather(-1, shown.gather(-1, (following - 1).clamp_min(0)))


def record_cache(
    cached: CachedPrompt, tokens: Tokens, sequence: KeptSequence, left: Tokens, closes_gaps: bool
) -> CachedPrompt:
    """The note on a cache after this call. closes_gaps: whether dropped tokens take no position."""
    assert left.position_ids is not None  # `gather_tokens` makes them
    token_ids = tokens.input_ids if cached.seen == 0 else None
    if tokens.input_ids is not None and cached.token_ids is not None:
        token_ids = torch.cat([cached.token_ids.to(tokens.device), tokens.input_ids], dim=-1)
    positions = left.position_ids if closes_gaps else last_positions(tokens, sequence)
    shown = ~sequence.is_filler
    if left.padding_mask is not None:
        shown = left.padding_mask[:, -shown.shape[1] :].bool()
    places = sequence.kept_indices.add(cached.seen).masked_fill(sequence.is_filler, -1)
    return CachedPrompt(
        torch.cat([cached.kept_indices, places], dim=-1),
        cached.seen + sequence.length,
        torch.cat([cached.positions, positions.masked_fill(~shown, -1)], dim=-1),
        token_ids,
    )
