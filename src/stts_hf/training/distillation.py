"""Matching the unpruned model: the same frozen weights, with nothing dropped, teach the scorer what to keep.

Only the scorer is trained, so the model at `k = 0` is its own teacher, without a second copy of the weights: nothing is
dropped there, so no score reaches the attention. The loss compares the distributions over the next token at every label
token (Hinton et al. 2015, "Distilling the Knowledge in a Neural Network", section 2, with soft targets alone). Its
gradient reaches the scorer through the bias of layer `l + 1`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import kl_div, log_softmax
from transformers import PreTrainedModel

from stts_hf.model_parts import find_backbone
from stts_hf.training.losses import predicted_labels


@dataclass
class Teaching:
    """
    The unpruned model's outputs at the `M` tokens of a batch that may be labels.

    rows, columns: (M,) places of these tokens in the batch (B, L). is_label: (M,), 1 for labels and 0 for others.
    logits: (M, vocabulary) that predict them. length: `L`.
    """

    rows: torch.Tensor
    columns: torch.Tensor
    is_label: torch.Tensor
    logits: torch.Tensor
    length: int

    @classmethod
    @torch.no_grad()
    def of(cls, model: PreTrainedModel, batch: Mapping[str, Any]) -> "Teaching":
        """
        Runs `model`, without DDP around it, at `k = 0` and without dropout. Forces no host-device sync: `M` is the
        number of tokens that are no video's, which shapes tell.
        """
        backbone = find_backbone(model)[1]
        call = {name: value for name, value in batch.items() if name not in ("labels", "pruned_length")}
        training = model.training
        model.eval()
        try:
            outputs = backbone(**call, pruning_ratio=0.0, use_cache=False)
        finally:
            model.train(training)
        predicted = predicted_labels(batch, backbone.num_axes)  # (B, L)
        num_tokens = predicted.numel() - sum(scores.numel() for scores in outputs.token_scores or ())
        is_label, tokens = predicted.flatten().int().topk(num_tokens)
        rows, columns = tokens // predicted.shape[1], tokens % predicted.shape[1]
        hidden_states = outputs.last_hidden_state[rows, columns - 1]  # a token is predicted by the previous one
        logits = model.get_output_embeddings()(hidden_states)
        return cls(rows, columns, is_label, logits, predicted.shape[1])

    def divergence(self, outputs: Any, temperature: float) -> torch.Tensor:
        """
        `temperature^2` times the sum over the label tokens of KL(unpruned || pruned), both softened by `temperature`: a
        float32 scalar. outputs: of the pruned model on the same batch, logits (B, L', vocabulary).
        """
        kept = outputs.kept_indices
        columns = torch.arange(kept.shape[1], device=kept.device).expand_as(kept)
        # Column of each token of the caller's sequence, and one more for filler.
        column_of = kept.new_zeros(kept.shape[0], self.length + 1)
        column_of = column_of.scatter(1, kept.where(kept >= 0, self.length), columns)
        pruned = outputs.logits[self.rows, column_of[self.rows, self.columns] - 1]
        pruned, unpruned = (log_softmax(x.float() / temperature, dim=-1) for x in (pruned, self.logits))
        per_token = kl_div(pruned, unpruned, reduction="none", log_target=True).sum(dim=-1)  # (M,)
        return temperature**2 * (per_token * self.is_label).sum()
