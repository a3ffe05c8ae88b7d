"""Where nothing is pruned the model is stock Molmo2: same weights, same logits, same gradients, same tokens."""

from typing import Any

import pytest
import torch

from tests.tiny import Image, Part, Video, build_inputs, stock_twin, tiny_config, tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model(tiny_config(pruning_ratio=0.0))


@pytest.fixture(scope="module")
def stock(model):
    return stock_twin(model)


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
