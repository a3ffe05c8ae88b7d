"""
What the plain `transformers.Trainer` needs beside a model that drops tokens: its logits (B, L', vocabulary) are shorter
than the labels (B, L). `STTSTrainer` needs none of this.
"""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import EvalPrediction, PreTrainedModel

from stts_hf.data.encoding import IGNORED, align_labels
from stts_hf.modeling.settings_stts import PruningConfig

IGNORE_KEYS = [name for name in PruningConfig.keys_to_ignore_at_inference if name != "kept_indices"]


def predictions_and_labels(outputs: Any, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    `preprocess_logits_for_metrics` of a `Trainer`: the likeliest token at each place and the labels beside them, both
    (B, L'). Call the plain `Trainer` with `evaluate(ignore_keys=IGNORE_KEYS)` or
    `train(ignore_keys_for_eval=IGNORE_KEYS)`: else it hides all outputs but the logits. Raises `ValueError` where it
    was called without and tokens were dropped.

    outputs: logits (B, L', vocabulary) and `kept_indices`, or the logits alone where labels lie beside them already.
    """
    if not isinstance(outputs, torch.Tensor):
        logits, kept_indices = outputs
        return logits.argmax(-1), align_labels(kept_indices, labels)
    if outputs.shape[1] != labels.shape[1]:
        raise ValueError(
            f"There are logits for {outputs.shape[1]} tokens and labels for {labels.shape[1]}, because video tokens "
            "were dropped. Call `Trainer.evaluate(ignore_keys=IGNORE_KEYS)`, with the list of this module."
        )
    return outputs.argmax(-1), labels


def token_accuracy(evaluation: EvalPrediction) -> dict[str, float]:
    """`compute_metrics` of a `Trainer` with `predictions_and_labels`: the share of label tokens that are predicted."""
    predictions, labels = cast(tuple[np.ndarray, np.ndarray], evaluation.predictions)
    shown, wanted = predictions[:, :-1], labels[:, 1:]
    counted = wanted != IGNORED
    return {"token_accuracy": float((shown == wanted)[counted].mean()) if counted.any() else 0.0}


def smoothed_loss(model: PreTrainedModel, smoothing: float) -> Callable[..., torch.Tensor]:
    """
    `compute_loss_func` of a `Trainer`: both losses, the task's with label smoothing, over the step's label tokens.

    `label_smoothing_factor` of `TrainingArguments` must stay 0: `Trainer` smooths without shifting the labels, without
    the temporal loss, and fails where tokens were dropped. In the temporal loss a micro-batch weighs as much as its
    label tokens. Raises `ValueError` for a `smoothing` outside [0, 1).
    """
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing must be from 0 up to, not including, 1, got {smoothing!r}.")
    config: Any = model.config

    def loss_of(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None = None) -> torch.Tensor:
        targets = align_labels(outputs.kept_indices, labels)[:, 1:]
        logits = outputs.logits[:, :-1].float()
        summed = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", label_smoothing=smoothing)
        labelled = (targets != IGNORED).sum()
        items = torch.as_tensor(labelled if num_items_in_batch is None else num_items_in_batch, device=logits.device)
        items = items.clamp_min(1)
        if outputs.temporal_loss is None:
            return summed / items
        return (summed + config.temporal_loss_weight * outputs.temporal_loss * labelled) / items

    return loss_of
