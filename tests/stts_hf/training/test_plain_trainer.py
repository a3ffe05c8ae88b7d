"""The functions for the plain `Trainer` in docs/training.md, whose labels know nothing of dropped tokens."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainingArguments

from stts_hf import align_labels
from tests.conftest import REPOSITORY
from tests.stts_hf.training.runs import KeepGradients, Rows, without_ids
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def written(model) -> dict[str, Any]:
    """What the page defines."""
    page = (REPOSITORY / "docs" / "training.md").read_text()
    [block] = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def token_accuracy" in code]
    names: dict[str, Any] = {"model": model}
    exec(block, names)
    return names


def plain(model: Any, folder: Path, **options: Any) -> Trainer:
    settings: dict[str, Any] = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    settings |= {"remove_unused_columns": False, "max_steps": 1, "max_grad_norm": 0, "learning_rate": 0.0}
    passed = {name: options.pop(name) for name in list(options) if name not in TrainingArguments.__dataclass_fields__}
    arguments = TrainingArguments(str(folder), **settings | options)
    return Trainer(model, arguments, without_ids, Rows(), eval_dataset=Rows(), **passed)


@torch.no_grad()
def accuracy_by_hand(model: Any) -> float:
    hits = []
    for index in range(4):
        batch = without_ids([Rows()[index]])
        outputs = model.eval()(**batch)
        for column, place in enumerate(outputs.kept_indices[0].tolist()[1:], 1):
            label = int(batch["labels"][0, place])
            if label >= 0:
                hits.append(int(outputs.logits[0, column - 1].argmax()) == label)
    return sum(hits) / len(hits)


def test_token_accuracy_is_that_of_the_tokens_that_are_left(model, written, tmp_path):
    metric = {
        "compute_metrics": written["token_accuracy"],
        "preprocess_logits_for_metrics": written["predictions_and_labels"],
    }
    run = plain(model, tmp_path, per_device_eval_batch_size=2, **metric)
    metrics = run.evaluate(ignore_keys=written["ignore_keys"])
    assert metrics["eval_token_accuracy"] == pytest.approx(accuracy_by_hand(model), abs=1e-9)


@pytest.mark.parametrize("steps", [1, 4], ids=["one_batch", "accumulated"])
def test_smoothed_losses_are_cross_entropy_with_smoothing_and_the_temporal_loss(model, written, tmp_path, steps):
    options: dict[str, Any] = {"per_device_train_batch_size": 4 // steps, "gradient_accumulation_steps": steps}
    run = plain(model, tmp_path, compute_loss_func=written["smoothed_loss"], **options)
    kept = KeepGradients()
    run.add_callback(kept)
    run.train()
    model.zero_grad()
    expected = torch.zeros(())
    batches = [[Rows()[index] for index in range(4)]] if steps == 1 else [[Rows()[index]] for index in range(4)]
    total = sum(int((row["labels"] != -100).sum()) for batch in batches for row in batch)
    for rows in batches:
        batch = without_ids(rows)
        outputs = model.train()(**batch)
        labels = align_labels(outputs.kept_indices, batch["labels"])[:, 1:].flatten()
        logits = outputs.logits[:, :-1].flatten(0, 1)
        task = cross_entropy(logits, labels, reduction="sum", label_smoothing=0.1)
        temporal = 0 if outputs.temporal_loss is None else outputs.temporal_loss * (labels != -100).sum()
        expected = expected + (task + model.config.temporal_loss_weight * temporal) / total
    expected.backward()
    assert model.model.vision_tower.scorer.score_layer.weight.grad.abs().max() > 0
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            # Sums of another order of rows, on gradients of order 1.
            torch.testing.assert_close(kept.gradients[name], parameter.grad, rtol=1e-4, atol=1e-5, msg=name)


def gradients_of(folder: Path, steps: int, make: Any = None) -> dict[str, torch.Tensor]:
    """Gradients of one step over the four rows, in `steps` micro-batches."""
    options: dict[str, Any] = {"per_device_train_batch_size": 4 // steps, "gradient_accumulation_steps": steps}
    run = (make or plain)(tiny_model(), folder, **options)
    kept = KeepGradients()
    run.add_callback(kept)
    run.train()
    return kept.gradients


def by_accelerate(steps: int) -> dict[str, torch.Tensor]:
    """As `gradients_of`, by a loop of one's own."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model = accelerator.prepare(tiny_model().train())
    rows = [Rows()[index] for index in range(4)]
    num_items = sum(int((row["labels"] != -100).sum()) for row in rows)
    for batch in [rows] if steps == 1 else [[row] for row in rows]:
        loss = model(**without_ids(batch), num_items_in_batch=num_items).loss
        accelerator.backward(loss * steps)  # which divides by them
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("by", ["Trainer", "accelerate"])
def test_micro_batches_train_as_one_batch(by, tmp_path):
    """Rows of ragged lengths; one has no video."""
    one, four = (by_accelerate(n) if by == "accelerate" else gradients_of(tmp_path, n) for n in (1, 4))
    assert one["model.vision_tower.scorer.score_layer.weight"].abs().max() > 0
    assert one.keys() == four.keys()
    for name in one:  # sums of another order of rows, on gradients of order 1
        torch.testing.assert_close(four[name], one[name], rtol=1e-4, atol=1e-5, msg=name)


@torch.no_grad()
def test_a_row_s_temporal_loss_counts_by_its_share_of_the_label_tokens(model):
    rows = [Rows()[index] for index in range(4)]
    labels = [int((row["labels"] != -100).sum()) for row in rows]
    alone = [model.train()(**without_ids([row])) for row in rows]
    together = model(**without_ids(rows), num_items_in_batch=sum(labels))
    temporal = [out.temporal_loss * n for out, n in zip(alone, labels, strict=True) if out.temporal_loss is not None]
    expected = together.task_loss + model.config.temporal_loss_weight * sum(temporal) / sum(labels)
    torch.testing.assert_close(together.loss, expected, rtol=1e-5, atol=0)
    assert len(temporal) == 3
