"""Gradient accumulation is the large batch, for both losses."""

from typing import Any

import pytest
import torch

from stts_hf.training.losses import count
from tests.backbones import BACKBONES, HYBRID_MIXTURES, MIXTURES, Clip
from tests.stts_hf.training.runs import Rows, logged, trainer, without_ids
from tests.tiny import Video, build_inputs, tiny_model

LOGGED = ("loss", "task_loss", "temporal_loss", "router_loss")
LARGE: dict[str, Any] = {"per_device_train_batch_size": 4}
ACCUMULATED: dict[str, Any] = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
IN_ORDER: dict[str, Any] = {"train_sampling_strategy": "sequential", "max_grad_norm": 0}
RATES = dict.fromkeys(("language_model", "vision_tower", "connector", "scorer"), 1e-2)  # high enough to tell


def test_both_losses_and_the_weights_stay_those_of_the_large_batch(tmp_path):
    runs = []
    for batching in (LARGE, ACCUMULATED):
        # Not Adam: the gradient of a key bias is rounding alone, and Adam would make steps of full size of it.
        options = {"optim": "sgd", "learning_rates": RATES} | IN_ORDER
        run = trainer(tmp_path, data=Rows(length=20), max_steps=5, **options, **batching)
        run.train()
        runs.append(run)
    for name in ("loss", "task_loss", "temporal_loss"):
        large, accumulated = (torch.tensor(logged(run, name)) for run in runs)
        assert len(large) == 5
        torch.testing.assert_close(accumulated, large, atol=1e-6, rtol=1e-5, msg=name)
    for (name, expected), found in zip(runs[0].model.named_parameters(), runs[1].model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5, msg=name)


def test_the_model_s_own_loss_is_a_batch_divided_by_its_own_counts(tmp_path):
    inputs = without_ids([Rows()[1]])
    run = trainer(tmp_path)
    expected = run.model(**inputs).loss
    torch.testing.assert_close(run.compute_loss(run.model, inputs), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("mixture", [*MIXTURES, *HYBRID_MIXTURES], ids=lambda backbone: backbone.name)
def test_a_mixtures_router_loss_is_trained_evaluated_and_logged(mixture, tmp_path):
    model = mixture.model()
    model.config.text_config.output_router_logits, model.config.text_config.router_aux_loss_coef = True, 0.5
    data: Any = [mixture.batch([[3, Clip(3), 5]], "left")] * 2
    run = trainer(tmp_path, model=model, data=data, data_collator=lambda rows: dict(rows[0]), eval_dataset=data)
    expected = model(**data[0])
    assert expected.aux_loss > 0
    torch.testing.assert_close(run.compute_loss(model, data[0]), expected.loss, atol=1e-6, rtol=1e-6)
    found = run.evaluate()
    assert found["eval_router_loss"] == pytest.approx(expected.aux_loss.item(), rel=1e-5)
    assert found["eval_loss"] == pytest.approx(expected.loss.item(), rel=1e-5)
    run.train()
    for total, task, temporal, router in zip(*(logged(run, name) for name in LOGGED), strict=True):
        assert total == pytest.approx(task + temporal + 0.5 * router, rel=1e-4)


def test_labels_that_nothing_predicts_are_not_counted():
    inputs = build_inputs([[4, Video(2), 3, 5]], labels=True)
    labels = inputs["labels"]
    backbone = tiny_model().model
    assert count(inputs, backbone)[0] == (labels[:, 1:] != -100).sum()
    length = labels.shape[1]
    packed = torch.cat([torch.arange(length - 5), torch.arange(5)])[None]  # a sample of 5 text tokens at the end
    assert count(inputs | {"position_ids": packed}, backbone)[0] == (labels[:, 1:] != -100).sum() - 1


@pytest.mark.parametrize("frames", [(1,), (2, 5)], ids=str)
@pytest.mark.parametrize("backbone", BACKBONES, ids=lambda backbone: backbone.name)
def test_blocks_of_first_frames_are_not_counted(backbone, frames):
    model = backbone.model()
    batch = backbone.batch([[2, Clip(number), 2] for number in frames], "right")
    outputs = model(**batch)
    blocks = sum(scores[1:].numel() for scores in outputs.token_scores)
    assert count(batch, model.model)[1] == blocks
    assert (blocks == 0) == (frames == (1,))
