"""What answers lose when blocks are dropped, measured against the same frozen weights with nothing dropped.

At `k = 0` nothing is dropped and no score reaches the attention, so the model is its own reference, without a second
copy of the weights. Layers `0..l` of the ViT run once, whatever is dropped after them.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import log_softmax
from transformers import PreTrainedModel

from stts_hf.model_parts import find_backbone
from stts_hf.modeling.plan_stts import TowerCache
from stts_hf.training.losses import predicted_labels

ANSWER_LOSSES = ("divergence", "cross_entropy")


class AnswerLoss:
    """
    The answer loss of a batch (B, L) whose blocks are dropped: the mean over a row's label tokens of KL(unpruned ||
    pruned), or, with `kind="cross_entropy"`, of the rise of the labels' cross entropy, in nats.

    model: without DDP around it; it runs without dropout and gradients. whole: its outputs, without a head, when
    nothing is dropped. Finding the label tokens forces a host-device sync.
    """

    def __init__(self, model: PreTrainedModel, batch: Mapping[str, Any], kind: str = "divergence") -> None:
        self.model, self.backbone = model, find_backbone(model)[1]
        self.batch = {name: value for name, value in batch.items() if name not in ("labels", "pruned_length")}
        self.cache = TowerCache()
        self.rows, self.columns = predicted_labels(batch, self.backbone.num_axes).nonzero(as_tuple=True)
        self.targets = batch["labels"][self.rows, self.columns] if kind == "cross_entropy" else None
        self.whole = self.run(pruning_ratio=0.0)
        self.unpruned = self._predict(self.whole)  # (label tokens, vocabulary)

    @torch.no_grad()
    def run(self, **call: Any) -> Any:
        """Outputs of the model without a head. call: what `forward` takes to drop blocks."""
        training = self.model.training
        self.model.eval()
        try:
            return self.backbone(**self.batch, **call, tower_cache=self.cache, use_cache=False)
        finally:
            self.model.train(training)

    @torch.no_grad()
    def of(self, outputs: Any) -> torch.Tensor:
        """(B,) float32, of the outputs of `run`."""
        pruned = self._predict(outputs)
        if self.targets is None:
            per_token = (self.unpruned.exp() * (self.unpruned - pruned)).sum(-1)
        else:
            per_token = (self.unpruned - pruned).gather(-1, self.targets[:, None]).squeeze(-1)
        sums = per_token.new_zeros(2, len(self.batch["input_ids"]))
        sums = sums.index_add(1, self.rows, torch.stack([per_token, torch.ones_like(per_token)]))
        return sums[0] / sums[1].clamp_min(1)

    def _predict(self, outputs: Any) -> torch.Tensor:
        """Log-probabilities (label tokens, vocabulary) of what predicts the label tokens."""
        kept, length = outputs.kept_indices, self.batch["input_ids"].shape[1]
        columns = self.columns
        if kept is not None:  # the column of each token of the caller's sequence, and one more for filler
            new = torch.arange(kept.shape[1], device=kept.device).expand_as(kept)
            place = kept.new_zeros(kept.shape[0], length + 1).scatter(1, kept.where(kept >= 0, length), new)
            columns = place[self.rows, columns]
        hidden_states = outputs.last_hidden_state[self.rows, columns - 1]  # a token is predicted by the previous one
        return log_softmax(self.model.get_output_embeddings()(hidden_states).float(), dim=-1)
