"""The vision tower in training: where gradients go, checkpointing, half precision, and what is random."""

import pytest
import torch

from stts_hf.modeling.modeling_stts import STTSForConditionalGeneration
from stts_hf.modeling.plan_stts import VideoFeatures
from tests.modeling.towers import (
    assert_gradients_close,
    encode,
    encode_naively,
    gradients,
    video_inputs,
    vision_parameters,
    weighted,
)
from tests.tiny import tiny_config, tiny_model


@pytest.mark.parametrize("selector", ["cosine", "random"])
def test_an_untrained_selector_asks_nothing_of_the_scorer(selector):
    model = tiny_model(tiny_config(selector=selector))
    inputs = video_inputs(model.config, [3])
    output = encode(model, inputs, 0.5)
    assert output.temporal_loss is None
    found = gradients(weighted(output.pooler_output[0]), model)
    assert not any(gradient.any() for name, gradient in found.items() if ".scorer." in name)


def temporal_loss_of(output: VideoFeatures) -> torch.Tensor:
    assert output.temporal_loss is not None
    return output.temporal_loss


def training_gradients(model: STTSForConditionalGeneration, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients of features and temporal loss, through `backward` as a trainer does it."""
    model.zero_grad()
    output = encode(model, inputs, 0.5)
    (weighted(torch.cat(output.pooler_output)) + temporal_loss_of(output)).backward()
    return {name: p.grad.clone() for name, p in vision_parameters(model).items() if p.grad is not None}


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # the layers below a trained scorer
@pytest.mark.parametrize("frozen", [False, True], ids=["all-trained", "scorer-alone"])
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not-reentrant"])
def test_gradient_checkpointing_changes_no_gradient(use_reentrant, frozen):
    model = tiny_model().train()
    if frozen:
        model.requires_grad_(False)
        model.model.vision_tower.scorer.requires_grad_(True)
    inputs = video_inputs(model.config, [4, 2])
    expected = training_gradients(model, inputs)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    calls = []
    model.model.vision_tower.layers[3].layer_norm1.register_forward_hook(lambda *_: calls.append(1))
    actual = training_gradients(model, inputs)
    assert len(calls) == 2  # computed again in the backward pass
    assert actual.keys() == expected.keys()
    assert any(".scorer." in name for name in actual)
    assert_gradients_close(actual, expected)


def test_bfloat16_autocast_keeps_scores_in_float32():
    model = tiny_model().train()
    inputs = video_inputs(model.config, [4, 2])
    exact = encode(model, inputs, 0.5)
    with torch.autocast("cpu", torch.bfloat16):
        output = encode(model, inputs, 0.5)
        loss = weighted(torch.cat(output.pooler_output).float()) + temporal_loss_of(output)
    loss.backward()
    scores = torch.cat(output.token_scores)
    assert scores.dtype == temporal_loss_of(output).dtype == torch.float32
    torch.testing.assert_close(scores, torch.cat(exact.token_scores), rtol=0, atol=0.1)  # 8 bits, four layers deep
    assert [mask.sum() for mask in output.keep_mask] == [mask.sum() for mask in exact.keep_mask]
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())
    assert model.model.vision_tower.scorer.input_layer.weight.grad.any()


def test_random_selection_differs_between_calls_in_training_alone():
    model = tiny_model(tiny_config(selector="random"))
    inputs = video_inputs(model.config, [4])
    masks = [encode(model, inputs, 0.5).keep_mask[0] for _ in range(2)]
    assert torch.equal(*masks)
    model.train()
    masks = [encode(model, inputs, 0.5).keep_mask[0] for _ in range(2)]
    assert not torch.equal(*masks)


def test_the_seed_decides_the_random_selection():
    inputs = video_inputs(tiny_config(), [4])
    masks = []
    for seed in (0, 1, 0):
        model = tiny_model(tiny_config(selector="random", selector_seed=seed))
        masks.append(encode(model, inputs, 0.5).keep_mask[0])
    assert torch.equal(masks[0], masks[2])
    assert not torch.equal(masks[0], masks[1])


def test_temporal_loss_is_left_out_unless_asked_for():
    model = tiny_model()
    output = model.model.get_video_features(**video_inputs(model.config, [3]), pruning_ratio=0.5)
    assert output.temporal_loss is None


@pytest.mark.parametrize("detach", [True, False], ids=["detached", "attached"])
def test_targets_of_the_temporal_loss_pass_gradients_as_configured(detach):
    model = tiny_model(tiny_config(model_overrides={"detach_temporal_target": detach}))
    inputs = video_inputs(model.config, [3])
    actual, expected = encode(model, inputs, 0.5), encode_naively(model, inputs, 0.5, [3])
    assert actual.temporal_loss is not None
    assert expected.temporal_loss is not None
    assert_gradients_close(gradients(actual.temporal_loss, model), gradients(expected.temporal_loss, model))
