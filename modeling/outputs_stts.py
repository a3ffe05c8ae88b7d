"""What a call returns beside what native models return: what was kept, and the losses."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import ModelOutput

from .sequence_stts import KeptSequence, Tokens, check_shape, find_samples, shorten_targets


@dataclass
class PruningOutput(ModelOutput):
    """
    Goes before a native output class.

    Attributes:
        temporal_loss: unweighted; None without videos, for untrained selectors, and outside training without labels.
        token_scores: per video (T, n), what blocks were ranked by.
        keep_mask: per video (T, n), which blocks were kept.
        kept_indices: (B, L') place of every column of `logits` in the caller's sequence, -1 for filler.
    """

    temporal_loss: torch.Tensor | None = None
    token_scores: tuple[torch.Tensor, ...] | None = None
    keep_mask: tuple[torch.Tensor, ...] | None = None
    kept_indices: torch.Tensor | None = None


@dataclass
class TaskOutput(ModelOutput):
    """
    Goes between `PruningOutput` and a native output class with a loss.

    Attributes:
        task_loss: cross entropy of the next token.
    """

    task_loss: torch.Tensor | None = None


@dataclass
class PruningModelOutputWithPast(PruningOutput, BaseModelOutputWithPast):
    """Of a model without a head, where the native one has no output class of its own."""


@dataclass
class PruningCausalLMOutputWithPast(PruningOutput, TaskOutput, CausalLMOutputWithPast):
    """
    Logits and the rest on the sequence that is left, where the native model has no output class of its own.

    Attributes:
        loss: `task_loss + temporal_loss_weight * temporal_loss`.
    """


if TYPE_CHECKING:

    class NativeHead(PreTrainedModel):
        """The native class that the mixin below precedes."""

else:
    NativeHead = object


class PruningHead(NativeHead):
    """Mixin for a model with a head: logits and losses on the sequence that is left."""

    config: Any
    lm_head: nn.Linear

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """As in transformers. Loading sets the types of sub configs; so a new model is saved like a loaded one."""
        for module in self.modules():
            if isinstance(module, PreTrainedModel):
                module.config.dtype = module.dtype
        super().save_pretrained(save_directory, *args, **kwargs)

    def read_out(
        self,
        outputs: Any,
        tokens: Tokens,
        targets: dict[str, Any],
        logits_to_keep: int | torch.Tensor,
        past_key_values: Cache | None,
        packed_rows: bool | None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """
        The fields of an output with a head. outputs: those without it. tokens: of the caller. targets: `labels` and
        `shift_labels` (B, L) as `check_targets` returns them. kwargs: of the native loss.
        """
        columns = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, columns])
        batch_size, length = tokens.shape
        kept_indices = outputs.kept_indices
        loss = task_loss = None
        if targets:
            sample_ids, positions = None, tokens.position_ids
            if positions is not None and positions.dim() == 2 and packed_rows is not False:
                mask = None if tokens.padding_mask is None else tokens.padding_mask[:, -length:]
                sample_ids = find_samples(positions.expand(batch_size, length), mask)
            options = {"labels": None} | shorten_targets(targets, kept_indices, sample_ids) | kwargs
            vocab_size = self.config.text_config.vocab_size
            loss = task_loss = self.loss_function(logits=logits, vocab_size=vocab_size, **options)
            if outputs.temporal_loss is not None:
                loss = task_loss + self.config.temporal_loss_weight * outputs.temporal_loss.to(task_loss.device)
        if kept_indices is None and past_key_values is None:
            kept_indices = KeptSequence.whole(batch_size, length, logits.device).kept_indices
        return {
            "loss": loss,
            "logits": logits,
            "past_key_values": outputs.past_key_values,
            "hidden_states": outputs.hidden_states,
            "attentions": outputs.attentions,
            "task_loss": task_loss,
            "temporal_loss": outputs.temporal_loss,
            "token_scores": outputs.token_scores,
            "keep_mask": outputs.keep_mask,
            "kept_indices": None if kept_indices is None else kept_indices[:, columns],
        }


def check_targets(tokens: Tokens, **targets: Any) -> dict[str, torch.Tensor]:
    """`labels` and `shift_labels` (B, L) that are there; raises `ValueError` for other shapes."""
    batch_size, length = tokens.shape
    return {n: check_shape(n, given, batch_size, length) for n, given in targets.items() if given is not None}
