"""What a trainer does: train mode, gradient checkpointing, mixed precision, a few steps that learn something."""

from typing import Any

import pytest
import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from tests.backbones import Clip
from tests.modeling.reference import assert_gradients_equal, gradients
from tests.tiny import Part, Video, build_inputs, tiny_model

ROWS: list[list[Part]] = [[3, Video(4), 5], [2, Video(2), 9]]


@pytest.fixture
def inputs():
    return build_inputs(ROWS, labels=True, padding_side="right")


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["", "reentrant"])
def test_gradient_checkpointing_changes_nothing(backbone, use_reentrant):
    model = backbone.model().train()
    inputs = backbone.batch([[3, Clip(4), 5], [2, Clip(2), 9]], "right")
    expected_loss = model(**inputs).loss
    expected = gradients(model, expected_loss)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    calls = []
    layers: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    hooks = [layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1)) for layer in layers]
    loss = model(**inputs).loss
    assert torch.equal(loss, expected_loss)
    assert_gradients_equal(gradients(model, loss), expected)
    assert len(calls) == 2 * len(hooks)  # once forward, once more for the gradient


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_train_and_eval_give_the_same_loss(inputs, mode):
    """Molmo2 has no dropout by default."""
    model = tiny_model()
    expected = model(**inputs).loss
    assert torch.equal(model.train(mode == "train")(**inputs).loss, expected)


def test_mixed_precision_stays_near_full_precision(inputs):
    model = tiny_model().train()
    full = model(**inputs)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model(**inputs)
    mixed.loss.backward()
    # bfloat16 has 8 bits; scores near the threshold may swap, which changes the loss a little.
    torch.testing.assert_close(mixed.loss, full.loss, atol=0, rtol=0.05)
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("pruning_ratio", [0.0, 0.5, 1.0])
def test_every_ratio_trains(inputs, pruning_ratio):
    model = tiny_model().train()
    outputs = model(**inputs, pruning_ratio=pruning_ratio)
    outputs.loss.backward()
    assert outputs.loss.isfinite()
    grads = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert "lm_head.weight" in grads
    assert ("model.multi_modal_projector.image_projector.down_proj.weight" in grads) == (pruning_ratio < 1)
    assert "model.vision_tower.scorer.score_layer.weight" in grads  # from the temporal loss, where not from the bias


def test_a_few_steps_lower_both_losses(inputs):
    torch.manual_seed(0)
    model = tiny_model().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    history = []
    for _ in range(8):
        outputs = model(**inputs)
        optimizer.zero_grad()
        outputs.loss.backward()
        optimizer.step()
        history.append((outputs.task_loss.item(), outputs.temporal_loss.item()))
    assert history[-1][0] < 0.5 * history[0][0]
    assert history[-1][1] < history[0][1]
