"""What the model returns beside Molmo2's: losses, scores, what was kept and where it lies."""

from dataclasses import dataclass

import torch
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.molmo2.modeling_molmo2 import Molmo2CausalLMOutputWithPast, Molmo2ModelOutputWithPast


@dataclass
class STTSVideoFeatures(BaseModelOutputWithPooling):
    """
    pooler_output: per video (K, text hidden size), features of the kept blocks. token_scores: per video (T, n) float32.
    keep_mask: per video (T, n) bool. temporal_loss: scalar or None.
    """

    token_scores: tuple[torch.Tensor, ...] | None = None
    keep_mask: tuple[torch.Tensor, ...] | None = None
    temporal_loss: torch.Tensor | None = None


@dataclass
class STTSModelOutputWithPast(Molmo2ModelOutputWithPast):
    """Molmo2's, and the fields of `STTSVideoFeatures`; `kept_indices` (B, L') as in `STTSCausalLMOutputWithPast`."""

    temporal_loss: torch.Tensor | None = None
    token_scores: tuple[torch.Tensor, ...] | None = None
    keep_mask: tuple[torch.Tensor, ...] | None = None
    kept_indices: torch.Tensor | None = None


@dataclass
class STTSCausalLMOutputWithPast(Molmo2CausalLMOutputWithPast):
    """
    Molmo2's output on the sequence that is left, and what was left.

    loss: `task_loss + temporal_loss_weight * temporal_loss`. task_loss: cross entropy of the next token.
    temporal_loss: unweighted; None without videos, for untrained selectors, and outside training without labels.
    image_hidden_states: features of the videos' kept blocks. token_scores, keep_mask: per video (T, n).
    kept_indices: (B, L') place of every row of `logits` in the caller's sequence, -1 for filler.
    """

    task_loss: torch.Tensor | None = None
    temporal_loss: torch.Tensor | None = None
    token_scores: tuple[torch.Tensor, ...] | None = None
    keep_mask: tuple[torch.Tensor, ...] | None = None
    kept_indices: torch.Tensor | None = None
