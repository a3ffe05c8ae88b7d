"""Where nothing is pruned the model is stock Molmo2: same weights, same logits, same gradients, same tokens."""

from typing import Any

import pytest
import torch

from stts_hf.modeling.modeling_stts import STTSForConditionalGeneration
from stts_hf.modeling.scoring_stts import FIRST_LOGIT
from tests.modeling.reference import assert_gradients_equal, gradients
from tests.tiny import Image, Part, Video, build_inputs, image_inputs, stock_twin, tiny_config, tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model(tiny_config(pruning_ratio=0.0))


@pytest.fixture(scope="module")
def stock(model):
    return stock_twin(model)


def test_weights_are_stock_names_and_the_scorer(model, stock):
    names = set(model.state_dict())
    assert {name for name in names if ".scorer." not in name} == set(stock.state_dict())
    scorer = {name.split(".scorer.")[1] for name in names if ".scorer." in name}
    layers = [f"token_pooler.{projection}_proj" for projection in "qkvo"]
    layers += ["input_layer", "hidden_layer", "score_layer"]
    assert scorer == {f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")}


def test_the_scorer_starts_with_last_weights_of_zero():
    scorer = STTSForConditionalGeneration(tiny_config()).model.vision_tower.scorer
    assert not scorer.score_layer.weight.any()
    assert scorer.score_layer.bias.tolist() == [FIRST_LOGIT]
    assert scorer.input_layer.weight.any()


@pytest.mark.parametrize("trained_scorer", [False, True], ids=["untrained_scorer", "trained_scorer"])
@pytest.mark.parametrize("packing", ["varlen", "first_fit_descending"])
def test_without_pruning_videos_equal_stock_forward_and_backward(packing, trained_scorer):
    model = tiny_model(tiny_config(pruning_ratio=0.0, packing=packing), trained_scorer=trained_scorer)
    stock = stock_twin(model)
    inputs = build_inputs([[3, Video(4), 5], [2, Video(2), 9]], labels=True, padding_side="right")
    ours, theirs = model(**inputs), stock(**inputs)
    real = inputs["attention_mask"].bool()
    # Our layers l + 1.. attend frame by frame, so rounding differs; logits are about 5.
    torch.testing.assert_close(ours.logits[real], theirs.logits[real], atol=1e-5, rtol=0)
    torch.testing.assert_close(ours.task_loss, theirs.loss, atol=1e-5, rtol=0)
    assert_gradients_equal(gradients(model, ours.task_loss), gradients(stock, theirs.loss))


@pytest.mark.parametrize("mask", ["with_mask", "without_mask"])
@pytest.mark.parametrize("types", ["with_types", "without_types"])
def test_without_pruning_optional_inputs_mean_what_they_mean_in_stock(model, stock, mask, types):
    inputs = build_inputs([[3, Video(3), 5]])
    if mask == "without_mask":
        del inputs["attention_mask"]
    if types == "without_types":
        del inputs["mm_token_type_ids"]
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).logits, stock(**inputs).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_images_alone_are_bit_identical_to_stock(padding_side):
    model = tiny_model()  # prunes half of every video
    stock = stock_twin(model)
    inputs = image_inputs([(1, 2), None, (2, 1)], labels=True, padding_side=padding_side)
    ours, theirs = model(**inputs), stock(**inputs)
    assert torch.equal(ours.logits, theirs.logits)
    assert torch.equal(ours.loss, theirs.loss)
    expected = gradients(stock, theirs.loss)
    found = gradients(model, ours.loss)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_text_alone_is_bit_identical_to_stock(stock):
    model = tiny_model()
    inputs = build_inputs([[9], [14]], labels=True)
    ours, theirs = model(**inputs), stock(**inputs)
    assert torch.equal(ours.logits, theirs.logits)
    assert torch.equal(ours.loss, theirs.loss)
    assert ours.temporal_loss is None


def test_packed_text_is_bit_identical_to_stock(stock):
    model = tiny_model()
    input_ids = torch.arange(1, 11)[None]
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
    with torch.no_grad():
        ours = model(input_ids=input_ids, position_ids=positions, use_cache=False)
        theirs = stock(input_ids=input_ids, position_ids=positions, use_cache=False)
    assert torch.equal(ours.logits, theirs.logits)


GENERATE: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    "without_cache": {"do_sample": False, "use_cache": False},
}


@pytest.mark.parametrize("arguments", GENERATE.values(), ids=GENERATE.keys())
@pytest.mark.parametrize("kind", ["text", "images", "videos"])
def test_generate_without_pruning_equals_stock(model, stock, kind, arguments):
    rows: dict[str, list[list[Part]]] = {
        "text": [[9], [5]],
        "images": [[2, Image(), 4], [6]],
        "videos": [[2, Video(3), 4], [2, Video(2), 4]],
    }
    inputs = build_inputs(rows[kind])
    settings = {"max_new_tokens": 6, "pad_token_id": 0, **arguments}
    assert torch.equal(model.generate(**inputs, **settings), stock.generate(**inputs, **settings))


def test_generate_infers_the_mask_of_padding_as_stock_does(model, stock):
    inputs = build_inputs([[2, Video(3), 4], [2, Video(2), 4]])
    assert not inputs.pop("attention_mask").all()
    settings: dict[str, Any] = {"max_new_tokens": 6, "pad_token_id": 0, "do_sample": False}
    for end in (None, 1, [1, 2], 0):
        ours = model.generate(**inputs, **settings, eos_token_id=end)
        assert torch.equal(ours, stock.generate(**inputs, **settings, eos_token_id=end))
