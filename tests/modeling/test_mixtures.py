"""Mixtures of experts: stock's at ratio 0, the naive construction at others, and the loss of their routers."""

from typing import Any

import pytest
import torch
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import load_balancing_loss_func

from stts_hf import STTSQwen3VLConfig, STTSQwen3VLMoeConfig
from tests import tiny_qwen3_vl
from tests.backbones import BACKBONES, HYBRID_MIXTURES, MIXTURES, Clip, Picture, Rows, prompt
from tests.modeling.reference import as_float64, assert_gradients_equal, gradients, kept_of_row, logits_of_row
from tests.modeling.test_no_waiting import Recorder
from tests.version_marks import since_torch_2_14

ROWS: Rows = [[3, Clip(4), 5], [2, Picture(), 3, Clip(2), 9], [6]]
ROUTED = {"output_router_logits": True}


@pytest.fixture(scope="module", params=[*MIXTURES, *HYBRID_MIXTURES], ids=lambda backbone: backbone.name)
def backbone(request) -> Any:
    return request.param


def router_loss(model: Any, logits: Any) -> Any:
    text = model.config.text_config
    return load_balancing_loss_func(logits, text.num_experts, text.num_experts_per_tok)


def test_ratio_0_is_stock_router_loss_included(backbone):
    model = backbone.model(pruning_ratio=0.0, trained_scorer=False)
    stock, inputs = backbone.stock(model), backbone.batch(ROWS, "right")
    ours, theirs = model(**inputs, **ROUTED), stock(**inputs, **ROUTED)
    real, rounding = inputs["attention_mask"].bool(), {"atol": backbone.stock_rounding, "rtol": 0}
    assert torch.equal(ours.logits[real], theirs.logits[real])
    torch.testing.assert_close(ours.aux_loss, theirs.aux_loss, **rounding)
    weighted = model.config.text_config.router_aux_loss_coef * ours.aux_loss
    loss = ours.task_loss + weighted
    torch.testing.assert_close(loss, theirs.loss, **rounding)
    torch.testing.assert_close(ours.loss, loss + ours.temporal_loss)
    assert_gradients_equal(gradients(model, loss), gradients(stock, theirs.loss), backbone.stock_rounding)


@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.9])
def test_a_batch_equals_its_naive_rows(backbone, float64_model, ratio):
    inputs, alone = as_float64(backbone.batch(ROWS, "left")), list(map(as_float64, backbone.alone(ROWS)))
    outputs = float64_model(**inputs, **ROUTED, pruning_ratio=ratio)
    expected = [backbone.naive(float64_model, row, ratio) for row in alone]
    for index, row in enumerate(expected):
        assert kept_of_row(outputs, inputs, index) == row.kept
        torch.testing.assert_close(logits_of_row(outputs, inputs, index), row.logits, atol=1e-12, rtol=0)
    task_loss = torch.cat([row.task_losses for row in expected]).mean()
    assert_gradients_equal(gradients(float64_model, outputs.task_loss), gradients(float64_model, task_loss), 1e-12)
    # Filler reaches experts, but not the loss.
    separate = [float64_model(**row, **ROUTED, pruning_ratio=ratio).router_logits for row in alone]
    layers = tuple(torch.cat(layer) for layer in zip(*separate, strict=True))
    torch.testing.assert_close(outputs.aux_loss, router_loss(float64_model, layers), atol=1e-6, rtol=0)
    assert (outputs.kept_indices < 0).any()
    assert (router_loss(float64_model, outputs.router_logits) - outputs.aux_loss).abs() > 1e-4


@torch.no_grad()
def test_steps_over_a_cache_equal_recomputing(backbone, any_model):
    settings = {"do_sample": False, "max_new_tokens": 4, "eos_token_id": None, "pad_token_id": 0, "pruning_ratio": 0.5}
    inputs = prompt(backbone.batch(ROWS, "left"))
    found, again = (any_model.generate(**inputs, **settings, use_cache=use_cache) for use_cache in (True, False))
    assert torch.equal(found, again)
    assert any_model(**inputs).router_logits is None
    assert any_model(**inputs).aux_loss is None


def test_a_call_adds_its_share_of_a_steps_router_loss(backbone, any_model):
    inputs = backbone.batch(ROWS, "left")
    num_labels = int((inputs["labels"][:, 1:] != -100).sum())
    whole, third = (any_model(**inputs, **ROUTED, num_items_in_batch=n * num_labels) for n in (1, 3))
    torch.testing.assert_close(whole.loss, 3 * third.loss)
    torch.testing.assert_close(whole.aux_loss, third.aux_loss)


@pytest.mark.parametrize("implementation", ["eager", pytest.param("grouped_mm", marks=since_torch_2_14)])
def test_experts_run_as_the_caller_says_as_in_stock_models(backbone, tmp_path, implementation):
    model = backbone.model()
    model.save_pretrained(tmp_path)
    loaded: Any = type(model).from_pretrained(tmp_path, experts_implementation=implementation)
    with Recorder() as recorder:
        loaded(**backbone.batch(ROWS, "left"))
    assert ("aten._grouped_mm" in recorder.seen) == (implementation == "grouped_mm")
    assert loaded.config.text_config._experts_implementation == implementation


def test_dense_models_and_mixtures_refuse_each_others_checkpoints(tmp_path):
    tiny_qwen3_vl.tiny_config().save_pretrained(tmp_path / "dense")
    MIXTURES[0].model().config.save_pretrained(tmp_path / "mixture")
    with pytest.raises(ValueError, match=r"is a 'stts_qwen3_vl' model, .* 'stts_qwen3_vl_moe' or 'qwen3_vl_moe'"):
        STTSQwen3VLMoeConfig.from_pretrained(tmp_path / "dense")
    with pytest.raises(ValueError, match="is a 'stts_qwen3_vl_moe' model"):
        STTSQwen3VLConfig.from_pretrained(tmp_path / "mixture")


@pytest.mark.parametrize("beside_mixture", [True, False])
def test_a_dense_model_is_the_same_beside_a_mixture(beside_mixture, monkeypatch, tmp_path):
    """Both have the tower's class, on which a mixture's module sets transformers' flag that experts can be chosen."""
    flag, qwen = "_can_set_experts_implementation_cached_value", BACKBONES[1]
    model, inputs = qwen.model(), qwen.batch(ROWS, "left")
    model.save_pretrained(tmp_path / "dense")
    assert getattr(type(model.model.visual), flag)  # set when this file imported a mixture
    if not beside_mixture:
        monkeypatch.delattr(type(model.model.visual), flag)
    loaded = type(model).from_pretrained(tmp_path / "dense")
    assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)
    for of in (type(model), type(qwen.stock(model))):
        with pytest.raises(ValueError, match="does not support setting experts implementation"):
            of.from_pretrained(tmp_path / "dense", experts_implementation="grouped_mm")
    loaded.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again/config.json").read_text() == (tmp_path / "dense/config.json").read_text()
    assert getattr(type(loaded.model.visual), flag) == beside_mixture  # so a mixture may be loaded behind a dense model
