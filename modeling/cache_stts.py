"""What a cache holds of the caller's sequence."""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicLayer

from .sequence_stts import KeptSequence, Tokens

UNKNOWN, UNKNOWN_VISION = -1, -2  # in place of a token id


class CacheRecord(DynamicLayer):
    """
    What a cache holds of the caller's sequence: a layer behind those of the model. Whatever crops, resets, copies or
    reorders a cache, of any class, does the same to its record. Native code runs without it, in `set_aside`.

    kept_indices: (B, columns) place of each column in the caller's sequence, -1 for filler.
    token_ids: (B, columns), negative where not known: -2 if there may be videos or images among them, else -1.
    positions: (B, columns) RoPE position that the next token continues from if the cache ends here: the column's own,
        or that of what was dropped behind it; -1 for columns that a mask hides.
    seen: how many of the caller's tokens the cache stands for, dropped ones included.
    whole: whether columns and positions are the caller's, so that native code can continue.
    skips_hidden: whether hidden columns took no positions, as in `generate`; then the mask says all positions.
    unusable: why no prompt fits the cache, or "". is_recurrent: whether layers of the cache keep a state, which holds
    what it has read even if columns are cut.
    """

    keys: torch.Tensor  # (B, 1, columns, 2) places and token ids
    values: torch.Tensor  # (B, 1, columns, 1) positions
    is_cache_record = True  # each folder of remote code has its own class of this name
    is_compileable = True  # so that a cache's own layers decide it: native code runs without the record

    def __init__(
        self,
        kept_indices: torch.Tensor,
        positions: torch.Tensor,
        seen: int,
        token_ids: torch.Tensor | None = None,
        *,
        whole: bool = False,
        skips_hidden: bool = False,
    ):
        super().__init__()
        self.lazy_initialization(kept_indices, positions)
        ids = torch.full_like(kept_indices, UNKNOWN) if token_ids is None else token_ids.to(kept_indices.device)
        self.keys, self.values = torch.stack([kept_indices, ids], dim=-1)[:, None], positions[:, None, :, None]
        self.seen, self.whole, self.skips_hidden, self.unusable = seen, whole, skips_hidden, ""
        self.is_recurrent = False

    @property
    def kept_indices(self) -> torch.Tensor:
        return self.keys[:, 0, :, 0]

    @property
    def token_ids(self) -> torch.Tensor:
        return self.keys[:, 0, :, 1]

    @property
    def positions(self) -> torch.Tensor:
        return self.values[:, 0, :, 0]

    @property
    def columns(self) -> int:
        return self.get_seq_length()

    @property
    def next_position(self) -> torch.Tensor:
        """(B, 1) RoPE position of the next token, which a video before it may be ahead of."""
        positions = self.positions
        if self.columns == 0:
            return positions.new_zeros(positions.shape[0], 1)
        places = torch.arange(self.columns, device=positions.device)
        return positions.gather(-1, torch.where(positions >= 0, places, 0).argmax(-1, keepdim=True)) + 1

    @staticmethod
    def of(cache: Any) -> "CacheRecord | None":
        """The record of a cache; None for a cache without one, or one that was reset."""
        layers: list[Any] = getattr(cache, "layers", None) or []
        return layers[-1] if layers and is_record(layers[-1]) and layers[-1].is_initialized else None

    @staticmethod
    def attach(cache: Any, record: "CacheRecord | None") -> None:
        """Makes `record` the one of a cache, or takes that off."""
        if hasattr(cache, "layers"):
            if record is not None:
                record.is_recurrent = any(getattr(cache, "is_linear", ()))
            cache.layers = [layer for layer in cache.layers if not is_record(layer)] + [record] * (record is not None)

    @staticmethod
    @contextlib.contextmanager
    def set_aside(cache: Cache | None, after: "CacheRecord | None" = None) -> Iterator[None]:
        """
        Takes the record off a cache while native code fills it; the caller attaches a new one. An error puts the old
        one back or, where there was none, the record `after` the call as unusable.
        """
        record = CacheRecord.of(cache)
        CacheRecord.attach(cache, None)
        try:
            yield
        except BaseException:
            if record is None and after is not None:
                record = copy.copy(after)
                record.unusable = "an error ended the call that filled it."
            CacheRecord.attach(cache, record)
            raise

    @classmethod
    def of_columns(cls, token_ids: torch.Tensor, skips_hidden: bool = False) -> "CacheRecord":
        """Of a cache that lost nothing: its columns are the caller's tokens (B, columns)."""
        batch_size, columns = token_ids.shape
        places = KeptSequence.whole(batch_size, columns, token_ids.device).kept_indices
        return cls(places, places, columns, token_ids, whole=True, skips_hidden=skips_hidden)

    @classmethod
    def resume(cls, cache: Cache | None, tokens: Tokens) -> "CacheRecord":
        """What a cache holds of the caller's sequence; raises `ValueError` where tokens cannot follow it."""
        record, (batch_size, _) = cls.of(cache), tokens.shape
        columns = int(cache.get_seq_length()) if cache is not None else 0
        if record is None:
            return cls.of_columns(torch.full((batch_size, columns), UNKNOWN, device=tokens.device))
        if tuple(record.positions.shape) == (batch_size, columns):
            return record
        if record.whole and len(record.positions) == batch_size:  # native code continued it
            ids = nn.functional.pad(record.token_ids, (0, columns - record.columns), value=UNKNOWN)
            return cls.of_columns(ids, record.skips_hidden)
        raise ValueError(
            f"`past_key_values` holds {columns} positions for a batch of {batch_size}, but recorded {record.columns} "
            f"for {len(record.positions)} when they were filled, so it cannot be matched to the text any more. "
            "Call again without `past_key_values`."
        )

    @classmethod
    def usable(cls, cache: Cache | None) -> "CacheRecord | None":
        """The record of a cache; raises `ValueError` for a cache that no prompt fits."""
        record = cls.of(cache)
        if record is not None and record.unusable:
            raise ValueError(f"`past_key_values` cannot be used again: {record.unusable} Call again without it.")
        return record

    def crop(self, *args: Any) -> None:
        before, ids = self.kept_indices, self.token_ids
        super().crop(*args)
        gone = before.shape[1] - self.columns
        if self.columns == 0:
            self.reset()
        elif gone and self.is_recurrent:
            self.unusable = "it was cropped, but the state of its recurrent layers holds what was cut."
        elif gone:
            places = set(before[:, self.columns].tolist())  # of the first column that is gone
            self.seen = max(places)
            # Behind the cut tokens were dropped: does what is left hold the kind of token that follows them?
            after_gaps = ids[:, self.columns :][before.diff(prepend=before[:, :1])[:, self.columns :] > 1]
            if len(places) > 1 or torch.isin(self.token_ids, after_gaps).any():
                self.unusable = f"it was cropped to {self.columns} positions, into a part where tokens were dropped."

    def hide(self, mask: torch.Tensor) -> "CacheRecord":
        """This record where a mask (B, columns) hides columns, such as those of an answer after its row's end."""
        positions = mask.cumsum(-1) - 1 if self.skips_hidden else self.positions
        hidden = copy.copy(self)
        hidden.values = positions.masked_fill(mask == 0, -1)[:, None, :, None]
        return hidden

    def positions_of_new(self, tokens: Tokens) -> torch.Tensor:
        """Positions (B, L) of the next tokens. Hidden ones take none, except at the beginning, as in transformers."""
        if tokens.padding_mask is None or not self.seen:
            return self.next_position + torch.arange(tokens.shape[1], device=self.positions.device)
        return self.next_position + tokens.padding_mask.bool().cumsum(-1) - 1

    def grown(
        self, kept_indices: torch.Tensor, positions: torch.Tensor, num_seen: int, token_ids: torch.Tensor | None = None
    ) -> "CacheRecord":
        """This record with more columns, (B, new) each, whose places count in `num_seen` new tokens of the caller."""
        places = torch.where(kept_indices < 0, kept_indices, kept_indices + self.seen)
        record = CacheRecord(places, positions, self.seen + num_seen, token_ids)
        record.keys = torch.cat([self.keys, record.keys], dim=-2)
        record.values = torch.cat([self.values, record.values], dim=-2)
        return record

    def continued(self, token_ids: torch.Tensor) -> "CacheRecord":
        """This record, which is whole, after tokens (B, new) that all stay."""
        return CacheRecord.of_columns(torch.cat([self.token_ids, token_ids], dim=-1), self.skips_hidden)

    def answered(self, num_tokens: int, token_ids: torch.Tensor | None = None) -> "CacheRecord":
        """This record after `num_tokens` of an answer, which all stay."""
        steps = torch.arange(num_tokens, device=self.positions.device).expand(len(self.positions), -1)
        record = self.grown(steps, self.next_position + steps, num_tokens, token_ids)
        record.whole = record.skips_hidden = self.whole
        return record

    def matches(self, prompt: torch.Tensor) -> bool:
        """Whether a prompt (B, L) begins with the tokens that the cache holds, as far as they are known."""
        places, ids = self.kept_indices.to(prompt.device), self.token_ids.to(prompt.device)
        unknown = (places < 0) | (ids < 0)
        return len(prompt) == len(places) and bool(((prompt.gather(-1, places.clamp_min(0)) == ids) | unknown).all())


def is_record(layer: Any) -> bool:
    return getattr(layer, "is_cache_record", False)


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
