"""Matching the unpruned model: the same frozen weights, with nothing dropped, teach the scorer what to keep.

Where only the scorer is trained, the model at `k = 0` is its own teacher and needs no second copy: no video loses
anything there, so no score reaches the attention. The pruned model's distribution over the next token is held to the
teacher's at every label token (Hinton et al. 2015, "Distilling the Knowledge in a Neural Network", section 2, with soft
targets alone), and the gradient comes to the scorer through the bias of layer `l + 1`.
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
    What the unpruned model says about the `M` label tokens of a batch.

    rows, places: (M,) where these tokens are in the batch (B, L). logits: (M, vocabulary) that predict them. length:
    `L`.
    """

    rows: torch.Tensor
    places: torch.Tensor
    logits: torch.Tensor
    length: int

    @classmethod
    @torch.no_grad()
    def of(cls, model: PreTrainedModel, batch: Mapping[str, Any]) -> "Teaching":
        """Runs `model`, without DDP around it, at `k = 0` and without dropout. Only logits at labels are computed."""
        predicted = predicted_labels(batch, find_backbone(model)[1].num_axes)
        rows, places = predicted.nonzero(as_tuple=True)
        columns = (places - 1).unique()  # a token is predicted by the one before it
        call = {name: value for name, value in batch.items() if name not in ("labels", "pruned_length")}
        training = model.training
        model.eval()
        try:
            logits = model(**call, pruning_ratio=0.0, logits_to_keep=columns, use_cache=False).logits
        finally:
            model.train(training)
        return cls(rows, places, logits[rows, torch.searchsorted(columns, places - 1)], predicted.shape[1])

    def divergence(self, outputs: Any, temperature: float) -> torch.Tensor:
        """
        `temperature^2` times the sum over the `M` tokens of KL(unpruned || pruned), both softened by `temperature`: a
        float32 scalar. outputs: of the pruned model on the same batch, logits (B, L', vocabulary).
        """
        kept = outputs.kept_indices
        columns = torch.arange(kept.shape[1], device=kept.device).expand_as(kept)
        # Column of each token of the caller's sequence, and a spare place for filler.
        column_of = kept.new_zeros(kept.shape[0], self.length + 1)
        column_of = column_of.scatter(1, kept.where(kept >= 0, self.length), columns)
        pruned = outputs.logits[self.rows, column_of[self.rows, self.places] - 1]
        pruned, unpruned = (log_softmax(x.float() / temperature, dim=-1) for x in (pruned, self.logits))
        return temperature**2 * kl_div(pruned, unpruned, reduction="sum", log_target=True)
