"""What a run logs, what an evaluation says, and that counting forces no host-device sync."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from examples.benchmarks.moving_clips import correlate
from stts_hf.modeling.plan_stts import TowerCache
from stts_hf.modeling.scoring_stts import temporal_similarity
from stts_hf.training.losses import PruningMetrics, rank_correlation
from tests.stts_hf.training.runs import Rows, collate, logged, trainer, without_ids
from tests.tiny import Video, build_inputs, tiny_config, tiny_model

IN_ORDER: dict[str, Any] = {"train_sampling_strategy": "sequential"}


def kept_by_hand(model, rows: Rows, indices) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Scores and keep masks of the videos among `rows`, from calls of their own."""
    scores: list[torch.Tensor] = []
    masks: list[torch.Tensor] = []
    for index in indices:
        outputs = model(**{key: value for key, value in rows[index].items() if key != "id"})
        scores += outputs.token_scores or ()
        masks += outputs.keep_mask or ()
    return scores, masks


def ranked_by_hand(model, rows: Rows, indices) -> list[float]:
    """Of each video, the rank correlation of scores with the change between frames, by a reference in NumPy."""
    found = []
    for index in indices:
        cache = TowerCache()
        outputs = model(**{key: value for key, value in rows[index].items() if key != "id"}, tower_cache=cache)
        grids = [(*scores.shape, 1) for scores in outputs.token_scores or ()]
        changes = torch.zeros(0) if cache.blocks is None else 1 - temporal_similarity(cache.blocks, grids).detach()
        parts = changes.split([frames * number for frames, number, _ in grids])
        for scores, change in zip(outputs.token_scores or (), parts, strict=True):
            found.append(correlate(scores.detach(), change.view_as(scores).numpy()))
    return found


def test_logs_are_over_the_steps_since_the_last(tmp_path):
    model, rows = tiny_model(), Rows()
    scores, masks = kept_by_hand(model, rows, range(4))
    run = trainer(tmp_path, model=model, max_steps=2, logging_steps=2, gradient_accumulation_steps=2, **IN_ORDER)
    run.args.learning_rates = run.args.learning_rates | {"scorer": 0.0, "vision_tower": 0.0}
    run.train()
    (logs,) = [logs for logs in run.state.log_history if "loss" in logs]
    assert logs["mean_score"] == pytest.approx(torch.cat(scores).mean().item(), rel=1e-5)
    assert logs["kept_share"] == pytest.approx(torch.cat(masks).float().mean().item(), rel=1e-6)
    assert logs["rank_correlation"] == pytest.approx(np.mean(ranked_by_hand(model, rows, range(4))), abs=1e-5)
    assert "skipped_rows" not in logs


@pytest.mark.parametrize("levels", [1, 3, 10_000], ids=["constant", "ties", "no ties"])
def test_a_rank_correlation_is_that_of_a_plain_reference(levels):
    """Of ten thousand values, as a video of 128 frames has; float32 sums keep five digits."""
    first, second = torch.randn(2, 125, 81, generator=torch.Generator().manual_seed(0))
    second = ((second + first).sigmoid() * levels).floor()
    expected = np.nan_to_num(correlate(first, second.numpy()))
    assert rank_correlation(first[1:].flatten(), second[1:].flatten()).item() == pytest.approx(expected, abs=1e-5)


def test_tokens_are_counted_after_and_before_pruning():
    model = tiny_model(tiny_config(pruning_ratio=0.5))
    inputs = build_inputs([[3, Video(4), 5], [2, Video(2), 9]])
    statistics = PruningMetrics(torch.device("cpu"))
    outputs = model(**inputs)
    statistics.observe(outputs, inputs)
    sums, _ = statistics.read(Accelerator(cpu=True))
    assert sums["video_tokens"] == (4 + 2) * 9
    shown = outputs.kept_indices.clamp_min(0)
    is_real = inputs["attention_mask"].gather(1, shown).bool() & (outputs.kept_indices >= 0)
    assert sums["llm_tokens"] == is_real.sum()


@pytest.mark.parametrize("wanted", [64, 2])
def test_frame_positions_go_to_tensorboard_alone(tmp_path, capsys, wanted):
    model, rows = tiny_model(), Rows()
    _, masks = kept_by_hand(model, rows, [0, 1, 3])
    options: dict[str, Any] = {"report_to": "tensorboard", "logging_steps": 4, "log_frame_positions": wanted}
    rates = dict.fromkeys(("language_model", "vision_tower", "connector", "scorer"), 0.0)
    run = trainer(tmp_path, model=model, learning_rates=rates, max_steps=4, **options)
    run.train()
    (file,) = tmp_path.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file), size_guidance={"scalars": 0})
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if tag.startswith("kept_share/")]
    assert tags == [f"kept_share/frame_{frame:03d}" for frame in range(min(5, wanted))]
    for frame, tag in enumerate(tags):
        expected = torch.cat([mask[frame] for mask in masks if len(mask) > frame]).float().mean().item()
        (event,) = events.Scalars(tag)
        assert (event.step, event.value) == (4, pytest.approx(expected, rel=1e-6))
    assert events.Scalars("train/temporal_loss")
    assert "frame_0" not in capsys.readouterr().out
    assert not any(re.search("frame_", name) for logs in run.state.log_history for name in logs)


@pytest.mark.parametrize(("batch_size", "only_loss"), [(1, True), (2, False)], ids=["loss_only", "with_logits"])
def test_eval_loss_does_not_depend_on_the_batches(tmp_path, batch_size, only_loss):
    model, rows = tiny_model(), Rows()
    options: dict[str, Any] = {"per_device_eval_batch_size": batch_size, "prediction_loss_only": only_loss}
    run = trainer(tmp_path, model=model, eval_dataset=rows, **options)
    metrics = run.evaluate()
    expected = model(**without_ids([rows[index] for index in range(4)]))
    for name in ("loss", "task_loss", "temporal_loss"):
        assert metrics[f"eval_{name}"] == pytest.approx(expected[name].item(), rel=1e-5)
    _, masks = kept_by_hand(model, rows, range(4))
    assert metrics["eval_kept_share"] == pytest.approx(torch.cat(masks).float().mean().item(), rel=1e-6)


def test_predictions_and_labels_lie_side_by_side(tmp_path):
    """Both in the shortened sequence, so that a metric can compare them; ragged batches are filled with -100."""
    seen = []

    def accuracy(prediction):
        seen.append(prediction)
        shown = prediction.label_ids[:, 1:] != -100
        return {"accuracy": (prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:])[shown].mean()}

    run = trainer(tmp_path, eval_dataset=Rows())
    run.compute_metrics = accuracy
    metrics = run.evaluate()
    (prediction,) = seen
    assert prediction.predictions.shape[:2] == prediction.label_ids.shape
    labels = [Rows()[index]["labels"] for index in range(4)]
    assert (prediction.label_ids != -100).sum() == sum((row != -100).sum() for row in labels)
    assert 0 <= metrics["eval_accuracy"] <= 1


@pytest.mark.slow
def test_evaluation_during_training_leaves_the_logs_alone(tmp_path):
    plain = trainer(tmp_path, max_steps=4, logging_steps=2)
    plain.train()
    often: dict[str, Any] = {"eval_dataset": Rows(), "eval_strategy": "steps", "eval_steps": 1}
    evaluated = trainer(tmp_path, max_steps=4, logging_steps=2, **often)
    evaluated.train()
    for name in ("loss", "task_loss", "temporal_loss", "mean_score"):
        assert logged(evaluated, name) == logged(plain, name)
    assert len(logged(evaluated, "eval_temporal_loss")) == 4


def test_an_evaluation_has_a_collator_of_its_own_and_counts_what_it_skips(tmp_path):
    model, rows = tiny_model(), Rows()

    def first_alone(items):
        return collate(items[:1]) | {"skipped_ids": [item["id"] for item in items[1:]]}

    options: dict[str, Any] = {"per_device_eval_batch_size": 4, "max_steps": 1}
    run = trainer(tmp_path, model=model, eval_dataset=rows, eval_collator=first_alone, **options)
    expected = trainer(tmp_path, model=model, eval_dataset=Rows(length=1), **options).evaluate()["eval_task_loss"]
    metrics = run.evaluate()
    assert metrics["eval_task_loss"] == pytest.approx(expected, rel=1e-6)
    assert metrics["eval_skipped_rows"] == 3
    assert run.predict(rows).metrics["test_skipped_rows"] == 3
    run.train()
    assert not logged(run, "skipped_rows")
