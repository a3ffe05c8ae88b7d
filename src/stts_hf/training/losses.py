"""How the two losses are normalised: by what one optimiser step holds, over micro-batches and processes.

A mean of micro-batches' means would weigh a label more the fewer labels share its micro-batch. So both losses are sums
over the step divided by its counts: of label tokens for the task loss, of blocks in frames `t >= 1` for the temporal
loss. The counts stay on the batch's device, and nothing here forces a host-device sync.
"""

from collections.abc import Mapping
from typing import Any

import torch

from stts_hf.modeling.sequence_stts import find_samples


def count_labels(batch: Mapping[str, Any]) -> torch.Tensor:
    """
    Label tokens of a batch that something predicts: not a row's first, nor the first of a packed sample. Raises
    `ValueError` where there are no labels.
    """
    labels = batch.get("labels")
    if labels is None:
        raise ValueError("A batch has no `labels`: the collator must add them, -100 where no loss is wanted.")
    counted = labels != -100
    position_ids = batch.get("position_ids")
    if position_ids is not None:
        attention_mask = batch.get("attention_mask")
        padding_mask = attention_mask if attention_mask is not None and attention_mask.dim() == 2 else None
        samples = find_samples(position_ids.expand(labels.shape), padding_mask)
        counted = counted & (samples.diff(dim=-1, prepend=samples[:, :1]) == 0)
    return counted[:, 1:].sum().float()


def count_blocks(batch: Mapping[str, Any]) -> torch.Tensor:
    """Blocks in frames `t >= 1` of a batch's videos, over which its temporal loss is a mean."""
    grids = batch.get("video_grids")
    if grids is None:
        return torch.zeros((), device=batch["labels"].device)
    return ((grids[:, 0] - 1) * grids[:, 1] * grids[:, 2]).sum().float()


def count(batch: Mapping[str, Any]) -> torch.Tensor:
    """What the losses of a batch are divided by: its label tokens and its blocks, (2,) float32."""
    labels = count_labels(batch)
    return torch.stack([labels, count_blocks(batch).to(labels.device)])


def normalised_losses(outputs: Any, counts: torch.Tensor, step: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    A batch's share of the task loss and of the temporal loss of the whole step, float32 scalars.

    outputs: of a call with `num_items_in_batch=step[0]`, so that its task loss is a sum already divided. counts: of the
    batch, (2,). step: of the step, (2,), at least 1 each: a loss over none of them is 0.
    """
    task = outputs.task_loss.float()
    if outputs.temporal_loss is None:
        return task, torch.zeros_like(task)
    share = counts[1] / step[1]
    return task, (outputs.temporal_loss * share.to(outputs.temporal_loss.device)).to(task.device)
