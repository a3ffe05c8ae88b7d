"""Small training runs on synthetic rows, for the tests of the trainer. A row is a list of parts as in tests/tiny.py."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import TrainerCallback

from stts_hf.data.collator import join_vision
from stts_hf.training.arguments import STTSTrainingArguments
from stts_hf.training.trainer import STTSTrainer
from tests.tiny import PAD, Part, Video, build_inputs, tiny_model

# Label tokens and frames differ, so that a mean of means is not the mean; one row has no video.
RAGGED: list[list[Part]] = [[3, Video(2), 2], [3, Video(5), 30], [12], [2, Video(3), 7]]

BESIDE = ("pixel_values_videos", "video_token_pooling", "video_grids")


def sample(row: list[Part], seed: int) -> dict[str, Any]:
    """Inputs of a row, (1, L), and labels of its text."""
    return build_inputs([row], seed=seed, labels=True)


class Rows(Dataset):
    """Item `i` is row `i` of `rows`, over and over up to `length`, each time with other pixels and text."""

    def __init__(self, rows: Sequence[list[Part]] = RAGGED, length: int | None = None):
        self.rows, self.length = rows, len(rows) if length is None else length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= self.length:
            raise IndexError(index)
        inputs = sample(self.rows[index % len(self.rows)], seed=index)
        inputs["labels"][:, 0] = -100  # nothing predicts a sample's first token, wherever it comes to lie
        return {"id": f"row-{index}", **inputs}


def join(items: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Samples as rows of one batch, padded on the right."""
    fillers = {"input_ids": PAD, "attention_mask": 0, "mm_token_type_ids": 0, "labels": -100}
    width = max(item["input_ids"].shape[1] for item in items)
    batch = {}
    for name, filler in fillers.items():
        rows = [torch.nn.functional.pad(i[name], (0, width - i[name].shape[1]), value=filler) for i in items]
        batch[name] = torch.cat(rows)
    vision = [{name: value for name, value in item.items() if name not in (*fillers, "id")} for item in items]
    return batch | join_vision(vision)


def collate(items: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One batch of `Rows`, with `sample_ids`."""
    return join(items) | {"sample_ids": [item["id"] for item in items]}


def without_ids(items: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """As `collate`, for plain `Trainer`."""
    return {key: value for key, value in collate(items).items() if key != "sample_ids"}


def arguments(folder: Path, **options: Any) -> STTSTrainingArguments:
    """Arguments of a short, silent run on the CPU."""
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "max_steps": 3,
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "lr_scheduler_type": "constant",
    }
    return STTSTrainingArguments(**settings | options)


def trainer(
    folder: Path,
    *,
    model: Any = None,
    data: Dataset | None = None,
    data_collator: Callable = collate,
    eval_dataset: Dataset | None = None,
    eval_collator: Callable | None = None,
    processing_class: Any = None,
    **options: Any,
) -> Any:
    """An `STTSTrainer` of the tiny model on `Rows()`."""
    return STTSTrainer(
        model=tiny_model() if model is None else model,
        args=arguments(folder, **options),
        train_dataset=Rows() if data is None else data,
        eval_dataset=eval_dataset,
        data_collator=data_collator,
        eval_collator=eval_collator,
        processing_class=processing_class,
    )


def logged(run: Any, name: str) -> list[float]:
    """All values of `name` that a trainer logged, in order."""
    return [logs[name] for logs in run.state.log_history if name in logs]


class KeepGradients(TrainerCallback):
    """Keeps the gradients of the last optimizer step."""

    def __init__(self) -> None:
        self.gradients: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        named = dict(model.named_parameters()) if model is not None else {}
        self.gradients = {n: p.grad.clone() for n, p in named.items() if p.grad is not None}
