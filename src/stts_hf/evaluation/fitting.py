"""
A plain training loop, and the start of a scorer: by the temporal loss alone, which needs the ViT up to layer `l` and
nothing after it.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from tqdm import tqdm

from stts_hf.parts import SCORER, module_of

RATE = 2e-3


def fit(
    groups: list[dict[str, Any]], batches: Iterable[Any], steps: int, loss_of: Callable[[Any], torch.Tensor], name: str
) -> list[float]:
    """Takes a step of AdamW on the loss of each batch, at rates that rise and fall; returns the losses."""
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01, betas=(0.9, 0.98))
    rates = [group["lr"] for group in groups]
    total, rising = max(3, steps), max(2, steps // 10)  # of fewer, the schedule divides by zero
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=total, pct_start=rising / total)
    parameters = [parameter for group in groups for parameter in group["params"]]
    losses: list[float] = []
    told = max(1, steps // 10)
    for batch in tqdm(batches, desc=name, total=steps, unit="step", disable=None):
        loss = loss_of(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if len(losses) % told == 0:
            tqdm.write(f"{name}: step {len(losses)} of {steps}, loss {sum(losses[-told:]) / told:.3f}", file=sys.stderr)
    return losses


def start_scorer(model: Any, batches: Iterable[Mapping[str, Any]], steps: int) -> list[float]:
    """
    Trains the scorer alone by the temporal loss (paper 3.4), and returns the losses. batches: one a step, of a
    collator's; those without videos teach nothing. Nothing but the scorer changes.

    What moves is a difference of two frames' features, which takes the scorer some thousand steps to tell as finely as
    the heuristic does. The paper's training has so many; a shorter one does not, but here each takes a fifth of the
    time, since there is neither a language model nor a backward pass through the ViT.
    """
    scorer = list(module_of(model, SCORER).parameters())
    of_scorer = set(map(id, scorer))
    others = [one for one in model.parameters() if one.requires_grad and id(one) not in of_scorer]

    def loss_of(batch: Mapping[str, Any]) -> torch.Tensor:
        if model.model.video_inputs[0] not in batch:
            return 0.0 * scorer[-1].sum()
        videos = {name: batch[name].to(model.device) for name in model.model.video_inputs}
        # At `k = 1` nothing is encoded past the scorer.
        found = model.model.get_video_features(**videos, pruning_ratio=1.0, with_temporal_loss=True)
        return found.temporal_loss

    for parameter in others:
        parameter.requires_grad_(False)
    try:
        return fit([{"params": scorer, "lr": RATE}], batches, steps, loss_of, "Scorer")
    finally:
        for parameter in others:
            parameter.requires_grad_(True)
