"""`pruned_length`: every row gets the length asked for, and nothing else changes."""

import re

import pytest
import torch

from stts_hf.modeling import modeling_stts
from stts_hf.modeling.pruning_stts import Call
from stts_hf.modeling.sequence_stts import Tokens
from stts_hf.modeling.vision_tokens_stts import make_mask
from tests.modeling.reference import CLOSE, assert_gradients_equal, gradients, logits_of_row, returned_by
from tests.tiny import Image, Part, Video, build_inputs, image_inputs, tiny_config, tiny_model

ROWS: list[list[Part]] = [[3, Video(4), 5], [2, Video(2), 9]]


PER_ROW = ("input_ids", "attention_mask", "mm_token_type_ids", "labels")


@pytest.fixture(params=["original", "compact"])
def model(request):
    model = tiny_model(tiny_config(model_overrides={"pruned_position_ids": request.param}))
    return model.train()


def longest(model, inputs, **kwargs) -> int:
    with torch.no_grad():
        return model(**inputs, **kwargs).logits.shape[1]


def assert_only_the_length_changes(model, inputs, pruned_length: int, **kwargs) -> None:
    if "labels" in inputs:  # stock Molmo2 predicts a row's first token from padding that nothing replaced
        first = inputs["attention_mask"].cumsum(-1) == 1 if "attention_mask" in inputs else None
        if first is not None:
            inputs = inputs | {"labels": inputs["labels"].masked_fill(first, -100)}
    expected = model(**inputs, **kwargs)
    outputs = model(**inputs, pruned_length=pruned_length, **kwargs)
    assert outputs.logits.shape[1] == outputs.kept_indices.shape[1] == pruned_length
    for row in range(len(inputs["input_ids"])):
        torch.testing.assert_close(logits_of_row(outputs, inputs, row), logits_of_row(expected, inputs, row), **CLOSE)
    if "labels" in inputs:
        torch.testing.assert_close(outputs.loss, expected.loss, atol=1e-6, rtol=0)
        torch.testing.assert_close(outputs.task_loss, expected.task_loss, atol=1e-6, rtol=0)
        assert_gradients_equal(gradients(model, outputs.loss), gradients(model, expected.loss))


@pytest.mark.parametrize("extra", [0, 90], ids=["exact", "longer_than_the_text"])
@pytest.mark.parametrize("pruning_ratio", [0.0, 0.5])
@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_rows_get_the_length_and_keep_their_logits(model, padding_side, pruning_ratio, extra):
    inputs = build_inputs(ROWS, labels=True, padding_side=padding_side)
    length = longest(model, inputs, pruning_ratio=pruning_ratio) + extra
    assert_only_the_length_changes(model, inputs, length, pruning_ratio=pruning_ratio)


@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_filler_lies_where_the_batch_is_padded(model, padding_side):
    for rows in (ROWS, ROWS[:1]):
        inputs = build_inputs([*rows, [100]], labels=True, padding_side=padding_side)
        inputs = {name: value[: len(rows)] if name in PER_ROW else value for name, value in inputs.items()}
        kept = model(**inputs, pruned_length=60).kept_indices
        real = kept >= 0
        assert not real.all(-1).any()
        order = real.long().diff(dim=-1)
        assert (order >= 0).all() if padding_side == "left" else (order <= 0).all()
        counted = kept.masked_fill(~real, 10**6 if padding_side == "right" else -1)
        assert (counted.diff(dim=-1) >= 0).all()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_filler_sees_itself_and_no_row_is_empty(model, padding_side, attention, monkeypatch):
    """Some kernels make NaN of a query that sees nothing (cuDNN's backward pass on Hopper)."""
    model.set_attn_implementation({"text_config": attention})
    masks = returned_by(modeling_stts, "make_mask", monkeypatch)
    outputs = model(**build_inputs(ROWS, padding_side=padding_side), pruned_length=70)
    (mask,) = masks
    seen = (mask if mask.dtype == torch.bool else mask == 0)[:, 0]  # (B, L', L')
    filler = outputs.kept_indices < 0
    assert filler.any(-1).all()
    assert seen.any(-1).all()
    assert not (seen & filler[:, None] & ~torch.eye(70, dtype=torch.bool)).any()
    if padding_side == "left":
        assert (seen.sum(-1)[filler] == 1).all()


def test_a_padding_mask_for_flash_attention_stays_as_it_is(model):
    """Text alone may have it; the kernel takes (B, L') and needs a GPU, making the mask does not."""
    model.model.config.text_config._attn_implementation = "flash_attention_2"
    inputs = build_inputs([[9], [6]])
    tokens = Tokens(**{name: inputs.get(name) for name in PER_ROW[:3]})
    pruned = model.model.prune(Call(tokens, pruned_length=12))
    mask = make_mask(model.config.text_config, pruned, torch.zeros(2, 12, 4), None)
    assert mask.bool().tolist() == [[False] * (12 - count) + [True] * count for count in (9, 6)]


@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_padding_of_a_single_row_makes_room(model, padding_side):
    inputs = build_inputs([ROWS[0], [150]], labels=True, padding_side=padding_side)
    inputs = {name: value[:1] if name in PER_ROW else value for name, value in inputs.items()}
    assert longest(model, inputs) > 100  # without a length to come down to, a single row keeps its padding
    assert_only_the_length_changes(model, inputs, 50)


@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("extra", [0, 7])
def test_packed_rows(model, extra, with_mask):
    inputs = build_inputs([[3, Video(2), 3, Video(3), 4, 6]], labels=True)
    length, ends = inputs["input_ids"].shape[1], (3 + 24, 3 + 24 + 3 + 36 + 4)
    sizes = (ends[0], ends[1] - ends[0], length - ends[1])
    inputs["position_ids"] = torch.cat([torch.arange(size) for size in sizes])[None]
    if not with_mask:
        del inputs["attention_mask"]
    assert_only_the_length_changes(model, inputs, longest(model, inputs) + extra)


def test_images_beside_videos(model):
    inputs = build_inputs([[2, Image(), 1, Video(3), 4], [3, Video(2), 1, Image(), 2]], labels=True)
    assert_only_the_length_changes(model, inputs, longest(model, inputs) + 5)


@pytest.mark.parametrize("extra", [-1, 0, 3])
@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize("kind", ["text", "images"])
def test_batches_without_videos(model, kind, padding_side, extra):
    """As in a batch with videos: padding is dropped and made anew."""
    if kind == "text":
        inputs = build_inputs([[9], [7], [20]], labels=True, padding_side=padding_side)
    else:
        inputs = image_inputs([(1, 2), None], labels=True, padding_side=padding_side)
    if extra < 0:  # a column that is padding in every row
        inputs |= {
            name: torch.nn.functional.pad(
                inputs[name], (0, 1) if padding_side == "right" else (1, 0), value=-100 if name == "labels" else 0
            )
            for name in PER_ROW
        }
    assert_only_the_length_changes(model, inputs, inputs["input_ids"].shape[1] + extra)


def test_a_batch_without_videos_that_fits_is_stock(model):
    inputs = image_inputs(labels=True)
    expected, outputs = model(**inputs), model(**inputs, pruned_length=inputs["input_ids"].shape[1])
    assert torch.equal(outputs.logits, expected.logits)


@pytest.mark.parametrize(("rows", "row"), [(ROWS, 0), ([ROWS[1], ROWS[0]], 1), ([ROWS[0]], 0)])
def test_a_row_too_long_is_named(model, rows, row):
    inputs = build_inputs(rows, labels=True)
    length = longest(model, inputs)
    with pytest.raises(ValueError, match=rf"`pruned_length` is {length - 1}, but row {row} has {length} tokens left"):
        model(**inputs, pruned_length=length - 1)


@pytest.mark.parametrize("value", [0, -3, 2.0, True, "9"])
def test_what_is_no_length_is_refused(model, value):
    with pytest.raises(ValueError, match=rf"`pruned_length` is {re.escape(repr(value))}, but must be a positive int"):
        model(**build_inputs([[4]]), pruned_length=value)


@torch.no_grad()
def test_behind_a_cache_that_holds_tokens(model):
    inputs = build_inputs([ROWS[0]])
    step = {"input_ids": torch.tensor([[5]]), "mm_token_type_ids": torch.zeros(1, 1, dtype=torch.long)}
    logits = []
    for length in (None, 9):
        cache = model(**inputs, use_cache=True).past_key_values
        logits.append(model(**step, past_key_values=cache, pruned_length=length).logits[:, -1])
    torch.testing.assert_close(*logits, **CLOSE)


@torch.no_grad()
def test_a_cache_filled_with_filler_goes_on_in_the_callers_positions(model):
    inputs = build_inputs(ROWS)
    step = {"input_ids": torch.tensor([[5], [6]]), "mm_token_type_ids": torch.zeros(2, 1, dtype=torch.long)}
    for ratio in (0.0, 0.5):
        logits = []
        for length in (None, 70):
            first = model(**inputs, pruning_ratio=ratio, pruned_length=length, use_cache=True)
            mask = torch.cat([inputs["attention_mask"], torch.ones(2, 1, dtype=torch.long)], dim=-1)
            logits.append(model(**step, attention_mask=mask, past_key_values=first.past_key_values).logits)
        torch.testing.assert_close(*logits, **CLOSE)


def test_generate_refuses_it():
    with pytest.raises(ValueError, match="`pruned_length` is for training"):
        tiny_model().generate(**build_inputs([ROWS[0]]), pruned_length=60, max_new_tokens=1)


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS], ids=["nothing_hidden", "padded"])
def test_a_token_behind_a_cache_has_a_mask_only_where_something_is_hidden(rows, monkeypatch):
    """A mask keeps attention from its fast kernels, and a decoding step needs none otherwise."""
    model, inputs = tiny_model(), build_inputs(rows, padding_side="left")
    masks = returned_by(modeling_stts, "make_mask", monkeypatch)
    cache = model(**inputs, pruning_ratio=0.5).past_key_values
    model(input_ids=inputs["input_ids"][:, -1:], past_key_values=cache)
    before, of_step = masks
    assert before is not None
    if len(rows) == 1:
        assert of_step is None
    else:
        assert (of_step[:, 0, 0, :-1].sum(-1) == (cache.layers[-1].kept_indices[:, :-1] >= 0).sum(-1)).all()
