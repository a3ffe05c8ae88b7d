"""A plain training loop, a run of `STTSTrainer` that saves nothing, and the start of a scorer."""

import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from tqdm import tqdm
from transformers import PrinterCallback, TrainerCallback

from stts_hf.model_parts import PARTS, SCORER
from stts_hf.training.arguments import STTSTrainingArguments
from stts_hf.training.trainer import STTSTrainer

RATE = 2e-3
CHOICES = 6  # weights that a scorer's start chooses from


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
    bar = tqdm(batches, desc=name, total=steps, unit="step", disable=None)
    for batch in bar:
        loss = loss_of(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        bar.set_postfix(loss=losses[-1], refresh=False)
    return losses


def train(
    model: Any,
    rows: Dataset,
    collator: Any,
    callbacks: Sequence[TrainerCallback] = (),
    folder: Path | None = None,
    choose_on: Dataset | None = None,
    **arguments: Any,
) -> STTSTrainer:
    """
    Trains with `STTSTrainer`; returns it. folder: of measured masks, a temporary one by default. choose_on: rows on
    which the loss is measured `CHOICES` times: the weights with the least one are taken. arguments: of
    `STTSTrainingArguments`.
    """
    if choose_on is not None:
        arguments |= {"eval_strategy": "steps", "eval_steps": max(1, arguments["max_steps"] // CHOICES)}
        arguments |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": False}
        arguments |= {"save_total_limit": 1, "save_only_model": True}
    arguments["logging_steps"] = max(1, arguments["max_steps"] // 10)
    with tempfile.TemporaryDirectory() as output:
        settings = STTSTrainingArguments(
            output_dir=str(folder or output),
            lr_scheduler_type="cosine",
            save_strategy="no" if choose_on is None else "best",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **arguments,
        )
        data = {"train_dataset": rows, "eval_dataset": choose_on}
        trainer = STTSTrainer(model, settings, data_collator=collator, callbacks=list(callbacks), **data)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        for checkpoint in Path(str(settings.output_dir)).glob("checkpoint-*"):
            shutil.rmtree(checkpoint)
    return trainer


def start_scorer(
    model: Any,
    rows: Dataset,
    collator: Any,
    steps: int,
    batch_size: int,
    seed: int,
    rate: float = RATE,
    folder: Path | None = None,
    **arguments: Any,
) -> None:
    """
    Trains the scorer alone, by the temporal loss or by answers, as the model's `scorer_target` says; nothing but the
    scorer and `worth_unit` changes. rows, collator: of the trainer. rate: its peak. folder, arguments: of `train`.
    """
    learnt = [parameter for parameter in model.parameters() if parameter.requires_grad]
    train(
        model,
        rows,
        collator,
        folder=folder,
        max_steps=steps,
        per_device_train_batch_size=batch_size,
        scorer_only=True,
        freeze=[part for part in PARTS if part != SCORER],
        learning_rates={SCORER: rate},
        warmup_steps=0.1,
        adam_beta2=0.98,
        weight_decay=0.01,
        seed=seed,
        **arguments,
    )
    model.config.__dict__.pop("use_cache", None)  # which `Trainer` puts there
    for parameter in learnt:
        parameter.requires_grad_(True)
