"""The LLM's shortened sequence: which of the caller's tokens are left, where they lie, and what a cache holds of them.

Tensors and plain numbers. A sequence of the caller has `L` tokens, what is left of it `L'`. `B` rows may lose different
numbers of tokens: shorter rows then get filler columns, which are masked.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

IGNORED_LABEL = -100


@dataclass
class Tokens:
    """
    A call's arguments per token. input_ids, position_ids, mm_token_type_ids, sample_ids: (B, L). inputs_embeds:
    (B, L, hidden size), in place of ids or beside them. attention_mask: (B, L), also (B, columns + L) with a cache, or
    (B, heads, L, L). position_ids: also (axes, B, L), where a token has several. sample_ids: which of several samples
    in a row a token belongs to, or None for one sample a row.
    """

    input_ids: torch.Tensor | None = None
    inputs_embeds: torch.Tensor | None = None
    attention_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    mm_token_type_ids: torch.Tensor | None = None
    sample_ids: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """`(B, L)`; raises `ValueError` where neither ids nor embeddings say it."""
        tokens = self.input_ids if self.input_ids is not None else self.inputs_embeds
        if tokens is None:
            raise ValueError("Pass exactly one of `input_ids` and `inputs_embeds`; both are None.")
        name, dims = ("input_ids", 2) if self.input_ids is not None else ("inputs_embeds", 3)
        for given in (name, "attention_mask", "position_ids", "mm_token_type_ids"):
            value = getattr(self, given)
            if value is not None and not isinstance(value, torch.Tensor):
                raise TypeError(
                    f"`{given}` is a {type(value).__name__}, but must be a torch.Tensor; call the processor with "
                    "return_tensors='pt'."
                )
        if tokens.dim() != dims or tokens.shape[1] == 0:
            raise ValueError(
                f"`{name}` has shape {tuple(tokens.shape)}, but must have {dims} dimensions, (batch, length"
                f"{', hidden size' if dims == 3 else ''}), and at least one token."
            )
        return tokens.shape[0], tokens.shape[1]

    def check_one_source(self) -> None:
        """Raises `ValueError` for ids beside embeddings."""
        if self.input_ids is not None and self.inputs_embeds is not None:
            raise ValueError("Pass exactly one of `input_ids` and `inputs_embeds`; both are given.")

    @property
    def device(self) -> torch.device:
        tokens = self.input_ids if self.input_ids is not None else self.inputs_embeds
        assert tokens is not None  # `shape` comes first
        return tokens.device

    @property
    def padding_mask(self) -> torch.Tensor | None:
        """The mask where it is one of padding, (B, L)."""
        return self.attention_mask if self.attention_mask is not None and self.attention_mask.dim() == 2 else None


def check_shape(name: str, value: torch.Tensor, batch_size: int, length: int, axes: int = 0) -> torch.Tensor:
    """
    Returns a value per token as (B, L), behind `axes` more dimensions, given like that or as (1, L); raises
    `ValueError` for other shapes.
    """
    if tuple(value.shape[axes:]) not in ((batch_size, length), (1, length)):
        raise ValueError(
            f"`{name}` has shape {tuple(value.shape)}, but must be ({batch_size}, {length}): one entry for every token "
            "of the sequence, also for those that will be dropped."
        )
    return value.expand(*value.shape[:axes], batch_size, length)


@dataclass
class KeptSequence:
    """
    What is left of a batch of sequences.

    kept_indices: (B, L') place of every column in the caller's sequence, -1 for filler.
    length: `L`, the length of the caller's sequence.
    """

    kept_indices: torch.Tensor
    length: int

    @classmethod
    def whole(cls, batch_size: int, length: int, device: torch.device) -> "KeptSequence":
        """Nothing is dropped."""
        return cls(torch.arange(length, device=device).expand(batch_size, -1), length)

    @property
    def is_filler(self) -> torch.Tensor:
        return self.kept_indices < 0

    def take(self, tensor: torch.Tensor, filler: float) -> torch.Tensor:
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
        Those of several axes, (axes, B, L), stay as they were.
        """
        if position_ids.dim() == 3:
            return torch.stack([self.take(axis, 0) for axis in position_ids])
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


def token_order(position_ids: Any, num_axes: int) -> Any:
    """
    Of positions, what counts the tokens of a sample: (B, L) as they are, or the first of (1 + axes, B, L); None where
    they have axes alone.
    """
    if not isinstance(position_ids, torch.Tensor) or position_ids.dim() != 3 or not num_axes:
        return position_ids
    return position_ids[0] if len(position_ids) == 1 + num_axes else None


def ordered_positions(tokens: Tokens, num_axes: int) -> torch.Tensor:
    """
    (1 + axes, B, L): how many tokens of its sample are before each, and its positions, (B, L) or (axes, B, L), where
    samples lie one after another; 0 where the padding mask hides one.
    """
    assert tokens.sample_ids is not None  # rows are packed
    assert tokens.padding_mask is not None
    assert tokens.position_ids is not None
    numbers = torch.where(tokens.padding_mask.bool(), tokens.sample_ids, -1)
    place = torch.arange(numbers.shape[1], device=numbers.device).expand_as(numbers)
    starts = (numbers.diff(dim=-1, prepend=numbers[:, :1] - 1) != 0) | (numbers < 0)
    place = place - torch.where(starts, place, 0).cummax(-1).values
    return torch.cat([place[None], tokens.position_ids.expand(num_axes, -1, -1)])


def samples_as_rows(
    like: torch.Tensor, sample_ids: torch.Tensor | None, attention_mask: torch.Tensor | None
) -> tuple[list[int], torch.Tensor]:
    """
    Samples of rows (B, L) apart: the row of each, and where its tokens are, (samples, L) int64; without `sample_ids`
    each row is one sample. Tokens that a mask hides are of none. Forces a host-device sync.
    """
    shown = torch.ones_like(like, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    rows, masks = [], []
    for row, seen in enumerate(shown):
        numbers = torch.zeros_like(like[row]) if sample_ids is None else sample_ids[row]
        of_samples = [seen & (numbers == number) for number in numbers[seen].unique()]
        rows += [row] * len(of_samples)
        masks += of_samples
    return rows, torch.stack(masks).long()


def any_row_is_packed(position_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> bool:
    """Whether a row of (B, L) positions holds more than one sample, by `find_samples`; forces a host-device sync."""
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


def keep_tokens(video_placeholders: torch.Tensor, keep_mask: torch.Tensor) -> torch.Tensor:
    """
    All tokens (B, L) but the placeholders of dropped blocks.

    video_placeholders: (B, L) bool, in row-major order those of blocks `keep_mask` (G,).
    """
    return torch.ones_like(video_placeholders).masked_scatter(video_placeholders, keep_mask)


def gather_columns(kept_tokens: torch.Tensor, new_length: int, fill_right: bool | torch.Tensor = False) -> KeptSequence:
    """
    The kept tokens (B, L) of each row moved together to `new_length` columns, in order.

    Rows with fewer tokens get filler on the left, so that the last column stays the last token, or on the right;
    `fill_right` may be a bool on the device. No row may have more.
    """
    length = kept_tokens.shape[-1]
    kept_tokens = nn.functional.pad(kept_tokens, (0, max(new_length - length, 0)))
    # A stable sort of the flags moves the kept tokens to one end and forces no host-device sync.
    order = torch.sort((kept_tokens ^ fill_right).to(torch.int8), dim=-1, stable=True).indices
    places = torch.arange(new_length, device=order.device)
    if fill_right is not True:
        start = order.shape[-1] - new_length
        places = places + (start if fill_right is False else torch.where(fill_right, 0, start))
    order = order[:, places]
    return KeptSequence(order.masked_fill(~kept_tokens.gather(-1, order), -1), length)


def align_labels(kept_indices: torch.Tensor, labels: torch.Tensor, ignore_index: int = IGNORED_LABEL) -> torch.Tensor:
    """
    Labels (B, L') beside the columns of a model's logits (B, L', vocabulary), from which pruned tokens are gone.

    kept_indices: (B, L') the outputs' field of this name. labels: (B, L) as they were given to the model. Filler gets
    `ignore_index`.
    """
    return labels.gather(-1, kept_indices.clamp_min(0)).masked_fill(kept_indices < 0, ignore_index)


def take_labels(labels: torch.Tensor, kept_indices: torch.Tensor) -> torch.Tensor:
    """
    Labels (B, L) of the caller's sequence for the columns that are left, (B, L'). Filler is ignored (-100), and so is
    a row's first token where filler precedes it, since nothing predicts it.
    """
    after_filler = nn.functional.pad(kept_indices[:, :-1] < 0, (1, 0))
    return align_labels(kept_indices, labels).masked_fill(after_filler, IGNORED_LABEL)


def shorten_targets(
    targets: dict[str, torch.Tensor], kept_indices: torch.Tensor | None, sample_ids: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """
    `labels` and `shift_labels` (B, L) for the columns that are left (B, L'), where some were dropped. A label of a
    later sample's first token (`sample_ids` (B, L)) is ignored, since it is not the next of the sample before it.
    """
    shortened = {}
    for name, target in targets.items():
        if name == "labels" and sample_ids is not None:
            target = target.masked_fill(sample_ids.diff(dim=-1, prepend=sample_ids[:, :1]) != 0, IGNORED_LABEL)
        if kept_indices is not None and name == "labels":
            target = take_labels(target, kept_indices)
        elif kept_indices is not None:  # they lie with the token before, which keeps what it had to predict
            target = align_labels(kept_indices, target)
        shortened[name] = target
    return shortened


@dataclass
class CachedPrompt:
    """
    What a cache holds of a caller's sequence after tokens were dropped. It is an attribute of the cache, whatever its
    class, so that copies of the cache carry it; only `of`, `attach` and `set_aside` touch that attribute.

    kept_indices: (B, columns) place of every column of the cache in the caller's sequence, -1 for filler.
    seen: how many of the caller's tokens the cache stands for, dropped ones included.
    positions: (B, columns) RoPE position of every column, -1 for those that a mask hides.
    token_ids: (B, seen) those tokens, where known.
    answered: how many of them, at the end, are an answer; each took a position, also those after a row's end.
    unusable: why no prompt fits the cache, or "".
    """

    kept_indices: torch.Tensor
    seen: int
    positions: torch.Tensor
    token_ids: torch.Tensor | None = None
    answered: int = 0
    unusable: str = ""

    @property
    def next_position(self) -> torch.Tensor:
        """(B, 1) RoPE position of the next token."""
        if self.positions.shape[1] == 0:
            return self.positions.new_zeros(self.positions.shape[0], 1)
        return self.positions.amax(-1, keepdim=True) + 1

    @staticmethod
    def of(cache: Cache | None) -> "CachedPrompt | None":
        """The note on a cache, cropped as the cache was since; None where no token was dropped."""
        note: CachedPrompt | None = getattr(cache, "pruned_prompt", None)
        if note is None or cache is None:
            return None
        columns = int(cache.get_seq_length())
        if columns == 0:  # it was reset
            return None
        return note if note.unusable else note.crop(min(columns, note.kept_indices.shape[1]))

    @classmethod
    def untouched(cls, columns: int, batch_size: int, device: torch.device) -> "CachedPrompt":
        """Of a cache that lost nothing: its columns are the caller's tokens."""
        sequence = KeptSequence.whole(batch_size, columns, device)
        return cls(sequence.kept_indices, columns, sequence.kept_indices)

    def attach(self, cache: Cache) -> None:
        cache.pruned_prompt = self  # type: ignore[attr-defined]  # a place of our own on transformers' object

    @staticmethod
    @contextlib.contextmanager
    def set_aside(cache: Cache | None, after: "CachedPrompt | None") -> Iterator[None]:
        """
        Takes the note off a cache while native code counts in the cache's own columns. After an error the old one is
        back, or, where there was none, the note of what is held since, `after`, as one that no prompt fits. Otherwise
        the caller attaches what the cache holds now.
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
        no position, neither of the answer nor of the new ones. With nothing seen yet they do, as in transformers.
        """
        if attention_mask is None or not self.seen:
            return self.next_position + torch.arange(num_tokens, device=self.next_position.device)
        shown = attention_mask[:, self.seen - self.answered :].bool().cumsum(-1)  # (B, answered + L)
        return self.next_position - self.answered + shown[:, self.answered :] - 1

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
            f"{self.kept_indices.shape[1]} for {self.kept_indices.shape[0]} when video tokens were dropped, so "
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
            answered=max(self.answered - gone, 0),
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
            answered=self.answered + num_tokens,
        )
