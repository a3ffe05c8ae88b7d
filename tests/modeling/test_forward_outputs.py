"""What `forward` returns beside logits: losses, scores, masks, and the way back to the caller's sequence."""

import inspect

import pytest
import torch
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs

from stts_hf import STTSForConditionalGeneration
from tests.tiny import PATCH, Part, Video, build_inputs, stock_twin, tiny_config, tiny_model

ROWS: list[list[Part]] = [[3, Video(4), 5], [2, Video(2), 3, Video(3), 9], [8]]


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def inputs():
    return build_inputs(ROWS, labels=True)


def test_loss_is_task_loss_plus_weighted_temporal_loss(inputs):
    model = tiny_model(tiny_config(model_overrides={"temporal_loss_weight": 0.25}))
    outputs = model(**inputs)
    assert outputs.task_loss > 0
    assert outputs.temporal_loss > 0
    torch.testing.assert_close(outputs.loss, outputs.task_loss + 0.25 * outputs.temporal_loss, atol=0, rtol=0)


def test_without_labels_there_is_no_loss(model, inputs):
    outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
    assert outputs.loss is None
    assert outputs.task_loss is None
    assert outputs.temporal_loss is None


@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_kept_indices_name_all_tokens_but_dropped_blocks(model, padding_side):
    inputs = build_inputs(ROWS, padding_side=padding_side)
    outputs = model(**inputs)
    assert outputs.kept_indices.shape == outputs.logits.shape[:2]
    placeholders = inputs["input_ids"] == PATCH
    kept_tokens = torch.ones_like(placeholders)
    kept_tokens[placeholders] = torch.cat([mask.flatten() for mask in outputs.keep_mask])
    kept_tokens &= inputs["attention_mask"].bool()
    for row, kept in enumerate(outputs.kept_indices):
        assert torch.equal(kept[kept >= 0], kept_tokens[row].nonzero()[:, 0])
        filler = (kept < 0).nonzero()[:, 0].tolist()
        first = 0 if padding_side == "left" else len(kept) - len(filler)
        assert filler == list(range(first, first + len(filler)))
    assert (outputs.kept_indices >= 0).all(-1).any()  # the longest row has no filler


@pytest.mark.parametrize("kind", ["text", "pruning_nothing"])
def test_kept_indices_are_all_where_nothing_was_dropped(model, kind):
    inputs = build_inputs([[5], [9]] if kind == "text" else ROWS)
    outputs = model(**inputs, pruning_ratio=0)
    assert torch.equal(outputs.kept_indices, torch.arange(outputs.logits.shape[1]).expand(len(outputs.logits), -1))


@pytest.mark.parametrize("logits_to_keep", [1, 5, torch.tensor([0, 3, -2])], ids=["last", "last_five", "chosen"])
@pytest.mark.parametrize("kind", ["video", "text"])
def test_logits_to_keep_counts_in_what_is_left(model, kind, logits_to_keep):
    inputs = build_inputs(ROWS if kind == "video" else [[5], [9]])
    everything = model(**inputs)
    some = model(**inputs, logits_to_keep=logits_to_keep)
    rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
    torch.testing.assert_close(some.logits, everything.logits[:, rows], atol=5e-6, rtol=0)
    assert torch.equal(some.kept_indices, everything.kept_indices[:, rows])


@pytest.mark.parametrize("kind", ["video", "text"])
def test_return_dict_false_gives_a_tuple(model, kind):
    inputs = build_inputs(ROWS if kind == "video" else [[5], [9]], labels=True)
    outputs = model(**inputs)
    as_tuple = model(**inputs, return_dict=False)
    assert isinstance(as_tuple, tuple)
    assert torch.equal(as_tuple[0], outputs.loss)
    assert torch.equal(as_tuple[1], outputs.logits)
    assert isinstance(model.model(**{n: v for n, v in inputs.items() if n != "labels"}, return_dict=False), tuple)


def test_hidden_states_and_attentions_are_those_of_the_shortened_sequence(inputs):
    model = tiny_model()
    model.set_attn_implementation("eager")
    outputs = model(**inputs, output_hidden_states=True, output_attentions=True)
    batch, length = outputs.kept_indices.shape
    layers = model.config.text_config.num_hidden_layers
    assert [tuple(states.shape) for states in outputs.hidden_states] == [(batch, length, 48)] * (layers + 1)
    assert [tuple(weights.shape) for weights in outputs.attentions] == [(batch, 4, length, length)] * layers


def test_image_hidden_states_are_the_kept_features(model, inputs):
    outputs = model(**inputs)
    assert tuple(outputs.image_hidden_states.shape) == (sum(int(mask.sum()) for mask in outputs.keep_mask), 48)


def test_every_weight_up_to_the_last_feature_layer_is_trained(inputs):
    model = tiny_model()
    model(**inputs).loss.backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_shifted_labels_of_the_callers_length_give_the_same_loss(model, inputs):
    labels = inputs["labels"]
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    expected = model(**inputs)
    outputs = model(**{name: value for name, value in inputs.items() if name != "labels"}, shift_labels=shifted)
    assert torch.equal(outputs.task_loss, expected.task_loss)
    assert torch.equal(outputs.loss, expected.loss)
    assert not torch.equal(model(**(inputs | {"labels": labels.roll(1)})).task_loss, expected.task_loss)


def test_forward_declares_the_arguments_it_hands_on():
    """transformers' common tests compare eager with sdpa only for models that do."""
    parameters = inspect.signature(STTSForConditionalGeneration.forward).parameters
    assert parameters["kwargs"].annotation == Unpack[TransformersKwargs]


def test_without_pruning_optional_inputs_mean_what_they_mean_in_stock(model):
    stock = stock_twin(model)
    inputs = build_inputs([[3, Video(3), 5]])
    with torch.no_grad():
        for left_out in ((), ("attention_mask",), ("mm_token_type_ids",), ("attention_mask", "mm_token_type_ids")):
            some = {name: value for name, value in inputs.items() if name not in left_out}
            torch.testing.assert_close(model(**some, pruning_ratio=0).logits, stock(**some).logits, atol=1e-5, rtol=0)
