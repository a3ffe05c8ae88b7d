"""Matching the unpruned model: the same frozen weights, with nothing dropped, teach the scorer what to keep.

Only the scorer is trained, so the model at `k = 0` is its own teacher, without a second copy of the weights: nothing is
dropped there, so no score reaches the attention. The loss compares the distributions over the next token at every label
token (Hinton et al. 2015, "Distilling the Knowledge in a Neural Network", section 2, with soft targets alone). Its
gradient reaches the scorer through the bias of layer `l + 1`.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import kl_div, log_softmax
from transformers import PreTrainedModel

from stts_hf.model_parts import find_backbone
from stts_hf.training.losses import predicted_labels


@torch.no_grad()
def teach(
    model: PreTrainedModel, batch: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Runs `model`, without DDP around it, at `k = 0` and without dropout, on a batch (B, L).

    Returns for the `M` tokens that may be labels: their rows and columns in the batch, (M,) each; 1 for labels and 0
    for others (M,); the logits (M, vocabulary) that predict them. Forces no host-device sync: `M` is the number of
    tokens that are no video's, which shapes tell.
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
    return rows, columns, is_label, model.get_output_embeddings()(hidden_states)


def divergence(model: PreTrainedModel, batch: Mapping[str, Any], outputs: Any, temperature: float) -> torch.Tensor:
    """
    `temperature^2` times the sum over the label tokens of KL(unpruned || pruned), both softened by `temperature`: a
    float32 scalar. outputs: of the pruned model on the same batch, logits (B, L', vocabulary).
    """
    rows, columns, is_label, unpruned = teach(model, batch)
    kept, length = outputs.kept_indices, batch["input_ids"].shape[1]
    # Column of each token of the caller's sequence, and one more for filler.
    column_of = kept.new_zeros(kept.shape[0], length + 1)
    new_columns = torch.arange(kept.shape[1], device=kept.device).expand_as(kept)
    column_of = column_of.scatter(1, kept.where(kept >= 0, length), new_columns)
    pruned = outputs.logits[rows, column_of[rows, columns] - 1]
    of_pruned, of_unpruned = (log_softmax(logits.float() / temperature, dim=-1) for logits in (pruned, unpruned))
    per_token = kl_div(of_pruned, of_unpruned, reduction="none", log_target=True).sum(dim=-1)  # (M,)
    return temperature**2 * (per_token * is_label).sum()
