"""Packed rows without any video, of images or of text alone: samples are closed, and all else is stock Molmo2."""

import pytest
import torch
from transformers.models.molmo2.modeling_molmo2 import Molmo2Model

from tests.modeling.reference import pack
from tests.tiny import Image, Part, build_inputs, tiny_model

IMAGES: list[list[Part]] = [[3, Image(), 5], [2, Image((1, 1)), 3]]
TEXTS: list[list[Part]] = [[7], [5], [9]]


@pytest.fixture
def model():
    return tiny_model().train()


def first_labels_too(rows: list[list[Part]], seed: int = 0):
    """Labels on every text token, a sample's first too, which nothing may predict."""
    return build_inputs(rows, seed=seed, labels=True)


@pytest.mark.parametrize("positions", ["none", "given", "padded", "shared"])
@pytest.mark.parametrize("kind", ["images", "texts"])
@torch.no_grad()
def test_unpacked_rows_are_stock_bit_for_bit(model, kind, positions):
    rows: list[list[Part]] = [IMAGES[0], [4]] if kind == "images" else TEXTS
    inputs = build_inputs(rows)
    length = inputs["input_ids"].shape[1]
    if positions == "padded":  # as transformers' `generate` numbers them
        inputs["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).masked_fill(inputs["attention_mask"] == 0, 1)
    elif positions != "none":
        inputs["position_ids"] = torch.arange(length)[None].expand(1 if positions == "shared" else len(rows), -1)
    expected = Molmo2Model.forward(model.model, **inputs).last_hidden_state
    assert torch.equal(model.model(**inputs).last_hidden_state, expected)


def model_with_flash(monkeypatch):
    """Flash attention on the text model; a stand-in takes the kernel's place."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    calls = []

    def stand_in(module, query, key, value, attention_mask, position_ids=None, **kwargs):
        calls.append((attention_mask, position_ids))
        return torch.zeros_like(query).transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "flash_attention_2", stand_in)
    model = tiny_model().train()
    model.config.text_config._attn_implementation = "flash_attention_2"
    return model, calls


def test_flash_attention_gets_a_lone_row_of_text_by_its_positions(monkeypatch):
    model, calls = model_with_flash(monkeypatch)
    packed = pack(first_labels_too(TEXTS), TEXTS)
    outputs = model(**packed)
    for mask, positions in calls:
        assert mask is None
        assert torch.equal(positions, packed["position_ids"])
    labels = packed["labels"].masked_fill(packed["position_ids"] == 0, -100)
    expected = torch.nn.functional.cross_entropy(outputs.logits[0, :-1], labels[0, 1:])
    torch.testing.assert_close(outputs.loss, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("case", ["mask", "two_rows"])
def test_flash_attention_that_would_mix_samples_is_refused(monkeypatch, case):
    model, _ = model_with_flash(monkeypatch)
    packed = pack(first_labels_too(TEXTS), TEXTS)
    if case == "mask":
        packed["attention_mask"] = torch.ones_like(packed["input_ids"])
    else:
        packed = {name: value.repeat(2, 1) for name, value in packed.items()}
    with pytest.raises(ValueError, match=r"`position_ids` start over, .* 'flash_attention_2' supports only"):
        model(**packed)


def test_features_given_beside_packed_rows_are_refused(model):
    packed = pack(build_inputs(IMAGES), IMAGES)
    images = {name: packed.pop(name) for name in ("pixel_values", "image_token_pooling", "image_grids")}
    packed.pop("image_num_crops")
    features = model.model.get_image_features(**images)
    with pytest.raises(ValueError, match=r"`mm_encoder_outputs` came with .* packed rows.* Pass the pixels"):
        model(**packed, mm_encoder_outputs={"image": features})
