"""A plain training loop, and the start of a scorer."""

import sys
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import torch
from tqdm import tqdm
from transformers import PrinterCallback

from stts_hf.parts import PARTS, SCORER
from stts_hf.training.arguments import STTSTrainingArguments
from stts_hf.training.trainer import STTSTrainer

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


def start_scorer(
    model: Any, rows: Any, collator: Any, steps: int, batch_size: int, seed: int, workers: int = 0
) -> None:
    """
    Trains the scorer alone by the temporal loss, as `temporal_loss_only` of `STTSTrainer` does for everybody; nothing
    but the scorer changes. rows, collator: of the trainer. workers: processes that make batches.
    """
    learnt = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with tempfile.TemporaryDirectory() as output:
        arguments = STTSTrainingArguments(
            output_dir=output,
            max_steps=steps,
            per_device_train_batch_size=batch_size,
            temporal_loss_only=True,
            freeze=[part for part in PARTS if part != SCORER],
            learning_rates={SCORER: RATE},
            lr_scheduler_type="cosine",
            warmup_steps=0.1,
            adam_beta2=0.98,
            weight_decay=0.01,
            seed=seed,
            dataloader_num_workers=workers,
            dataloader_pin_memory=False,
            logging_steps=max(1, steps // 10),
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = STTSTrainer(model, arguments, train_dataset=rows, data_collator=collator)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    model.config.__dict__.pop("use_cache", None)  # which `Trainer` puts there
    for parameter in learnt:
        parameter.requires_grad_(True)
