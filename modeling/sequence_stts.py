"""The LLM's shortened sequence: which of the caller's tokens are left, and where they lie.

Tensors and plain numbers. A sequence of the caller has `L` tokens, what is left of it `L'`. `B` rows may lose different
numbers of tokens: shorter rows then get filler columns, which are masked.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

IGNORED_LABEL = -100
IMAGE, VIDEO = 1, 2  # in `mm_token_type_ids`, where they tell them apart


@dataclass
class Tokens:
    """
    A call's arguments per token. input_ids, position_ids, mm_token_type_ids, sample_ids: (B, L). inputs_embeds:
    (B, L, hidden size). attention_mask: (B, L), also (B, columns + L) with a cache; other forms are for native code.
    position_ids: also (axes, B, L), where a token has several. sample_ids: which of several samples in a row a token
    belongs to, or None for one sample a row.
    """

    input_ids: torch.Tensor | None = None
    inputs_embeds: torch.Tensor | None = None
    attention_mask: torch.Tensor | dict[str, torch.Tensor] | None = None
    position_ids: torch.Tensor | None = None
    mm_token_type_ids: torch.Tensor | None = None
    sample_ids: torch.Tensor | None = None

    def __post_init__(self) -> None:
        """Raises `ValueError` or `TypeError` where neither ids nor embeddings are there, both are, or not tensors."""
        if (self.input_ids is None) == (self.inputs_embeds is None):
            both = "None" if self.input_ids is None else "given"
            raise ValueError(f"Pass exactly one of `input_ids` and `inputs_embeds`; both are {both}.")
        for name, value in self.arguments.items():
            if not (name == "attention_mask" and isinstance(value, dict)):
                check_tensor(name, value)
        name, dims = ("input_ids", 2) if self.input_ids is not None else ("inputs_embeds", 3)
        tokens = getattr(self, name)
        if tokens.dim() != dims or tokens.shape[1] == 0:
            raise ValueError(
                f"`{name}` has shape {tuple(tokens.shape)}, but must have {dims} dimensions, (batch, length"
                f"{', hidden size' if dims == 3 else ''}), and at least one token."
            )

    @property
    def given(self) -> torch.Tensor:
        """The ids or the embeddings."""
        tokens = self.input_ids if self.input_ids is not None else self.inputs_embeds
        assert tokens is not None  # one of them is there
        return tokens

    @property
    def ids(self) -> torch.Tensor:
        """(B, L); raises `ValueError` where only embeddings are there."""
        if self.input_ids is None:
            raise ValueError(
                "`inputs_embeds` came with videos, packed rows, `pruned_length` or a cache of such a call, where ids "
                "say what each token is. Pass `input_ids` instead."
            )
        return self.input_ids

    @property
    def shape(self) -> tuple[int, int]:
        """`(B, L)`."""
        return self.given.shape[0], self.given.shape[1]

    @property
    def device(self) -> torch.device:
        return self.given.device

    @property
    def arguments(self) -> dict[str, Any]:
        """As arguments of a native forward."""
        names = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "mm_token_type_ids")
        return {name: getattr(self, name) for name in names}

    @property
    def padding_mask(self) -> torch.Tensor | None:
        """The mask where it is one of padding, (B, L)."""
        mask = self.attention_mask
        return mask if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None

    @property
    def new_padding_mask(self) -> torch.Tensor | None:
        """The same without cached columns."""
        return None if self.padding_mask is None else self.padding_mask[:, -self.shape[1] :]

    def compact(self, dropped: torch.Tensor) -> torch.Tensor | None:
        """Positions by `close_gaps`, where there are any."""
        return None if self.position_ids is None else close_gaps(self.position_ids, dropped, self.sample_ids)


def check_tensor(name: str, value: Any) -> None:
    """Raises `TypeError` for what is neither a tensor nor None."""
    if value is not None and not isinstance(value, torch.Tensor):
        raise TypeError(
            f"`{name}` is a {type(value).__name__}, but must be a torch.Tensor; call the processor with "
            "return_tensors='pt'."
        )


def check_shape(name: str, value: torch.Tensor, batch_size: int, length: int, num_axes: int = 0) -> torch.Tensor:
    """Expands (B, L) or (1, L), or with `num_axes` in front, to B rows; raises `ValueError` for other shapes."""
    axes = (num_axes,) if num_axes and value.dim() == 3 else ()
    if tuple(value.shape) not in ((*axes, batch_size, length), (*axes, 1, length)):
        raise ValueError(
            f"`{name}` has shape {tuple(value.shape)}, but must be {(*axes, batch_size, length)}: one entry for every "
            "token of the sequence, also for those that will be dropped."
        )
    return value.expand(*axes, batch_size, length)


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
        return (~self.is_filler).long() if attention_mask is None else self.take(attention_mask.long(), 0)

    def take_position_ids(self, position_ids: torch.Tensor) -> torch.Tensor:
        """Positions (B, L), or of several axes (axes, B, L), of what is left. Filler gets 0."""
        if position_ids.dim() == 3:
            return torch.stack([self.take(axis, 0) for axis in position_ids])
        return self.take(position_ids, 0)


def close_gaps(position_ids: torch.Tensor, dropped: torch.Tensor, sample_ids: torch.Tensor | None) -> torch.Tensor:
    """
    Positions (B, L) less the number of dropped tokens (B, L) up to each in its sample (`sample_ids` (B, L), or one
    sample a row).
    """
    gone = dropped.long().cumsum(-1)
    if sample_ids is not None:
        starts = sample_ids.diff(dim=-1, prepend=sample_ids[:, :1] - 1) != 0
        gone = gone - torch.where(starts, gone - dropped.long(), 0).cummax(-1).values
    return position_ids - gone


def find_samples(position_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
    """
    Samples that share a row: a new one begins wherever (B, L) positions do not grow. Tokens that a (B, L) mask hides
    begin none, whatever their positions. Returns (B, L) numbers.
    """
    shown = (torch.ones_like(position_ids) if attention_mask is None else attention_mask).bool()
    place = torch.arange(shown.shape[-1], device=shown.device).expand_as(shown)
    last_shown = nn.functional.pad(torch.where(shown, place, -1).cummax(-1).values[:, :-1], (1, 0), value=-1)
    grows = position_ids > position_ids.gather(-1, last_shown.clamp_min(0))
    restarts = shown & (~grows | (last_shown < 0))
    return restarts.long().cumsum(-1)


def token_order(position_ids: torch.Tensor | None, num_axes: int) -> torch.Tensor | None:
    """What counts the tokens of a sample: positions (B, L), or the first of (1 + axes, B, L); None for axes alone."""
    if not num_axes or position_ids is None or position_ids.dim() != 3:
        return position_ids
    return position_ids[0] if len(position_ids) == 1 + num_axes else None


def holds_packed_rows(tokens: Tokens, cache: Cache | None, num_axes: int) -> bool:
    """
    Whether rows hold several samples, which a native model may let see each other's images. It looks only where
    `position_ids` are given, since that forces a host-device sync.
    """
    batch_size, length = tokens.shape
    positions, mask = token_order(tokens.position_ids, num_axes), tokens.padding_mask
    if positions is None or positions.dim() != 2 or positions.shape[1] != length or length == 1:
        return False  # a step of decoding too; a static cache's length lies on the device
    if tokens.attention_mask is not None and (mask is None or mask.shape[1] != length):
        return False
    if cache is not None and cache.get_seq_length() > 0:
        return False
    return bool((find_samples(positions.expand(batch_size, length), mask).amax(-1) > 1).any())


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
    start = order.shape[-1] - new_length
    order = order[:, torch.arange(new_length, device=order.device) + start - start * fill_right]
    return KeptSequence(order.masked_fill(~kept_tokens.gather(-1, order), -1), length)


def align_labels(kept_indices: torch.Tensor, labels: torch.Tensor, ignore_index: int = IGNORED_LABEL) -> torch.Tensor:
    """
    Labels (B, L') aligned with a model's logits (B, L', vocabulary), without those of pruned tokens.

    kept_indices: (B, L') of the outputs. labels: (B, L) as given to the model. Filler gets `ignore_index`.
    """
    return labels.gather(-1, kept_indices.clamp_min(0)).masked_fill(kept_indices < 0, ignore_index)


def shorten_targets(
    targets: dict[str, torch.Tensor], kept_indices: torch.Tensor | None, sample_ids: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """
    `labels` and `shift_labels` (B, L) for the columns that are left (B, L'). Of `labels`, what no token predicts is
    ignored: that of a later sample's first token (`sample_ids` (B, L)), and of a row's first token behind filler.
    """
    shortened = {}
    for name, target in targets.items():
        if name == "labels" and sample_ids is not None:
            target = target.masked_fill(sample_ids.diff(dim=-1, prepend=sample_ids[:, :1]) != 0, IGNORED_LABEL)
        if kept_indices is not None:
            target = align_labels(kept_indices, target)
            if name == "labels":
                after_filler = nn.functional.pad(kept_indices[:, :-1] < 0, (1, 0))
                target = target.masked_fill(after_filler, IGNORED_LABEL)
        shortened[name] = target
    return shortened
