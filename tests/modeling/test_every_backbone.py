"""What holds for every backbone, whatever its parts: a new one in `tests/backbones.py` is held to it too."""

import copy
import inspect

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError

from stts_hf.selectors import SELECTORS
from tests.backbones import BACKBONES, Clip, Inputs, Picture, Rows, daily, prompt, with_compact
from tests.modeling.reference import (
    CLOSE,
    Float64,
    as_float64,
    assert_gradients_equal,
    gradients,
    kept_of_row,
    logits_of_row,
)
from tests.naive import naive_budget

ROWS: Rows = [[3, Clip(4), 5], [2, Clip(3), 3, Clip(2), 9], [6]]
MIXED: Rows = [[2, Picture(), 2, Clip(3), 4], [2, Clip(2), 3, Picture(), 3], [7]]
ADJACENT: Rows = [[2, Clip(1), Clip(3), 4], [3, Clip(1), 4]]


@pytest.mark.parametrize("rows", [ROWS, MIXED], ids=["videos", "mixed"])
def test_an_untrained_scorer_at_ratio_0_is_the_stock_model(backbone, rows):
    model = backbone.model(pruning_ratio=0.0, trained_scorer=False)
    if rows is MIXED and not backbone.stock_mixes:
        pytest.skip("stock takes no images beside videos")
    stock, inputs = backbone.stock(model), backbone.batch(rows, "right")
    ours, theirs = model(**inputs), stock(**inputs)
    real = inputs["attention_mask"].bool()
    rounding = backbone.stock_rounding
    torch.testing.assert_close(ours.logits[real], theirs.logits[real], atol=rounding, rtol=0)
    torch.testing.assert_close(ours.task_loss, theirs.loss, atol=1e-6, rtol=0)
    assert_gradients_equal(gradients(model, ours.task_loss), gradients(stock, theirs.loss), rounding)
    with torch.no_grad():  # one block less, and the comparison fails
        less = model(**backbone.alone([rows[0]])[0], pruning_ratio=0.1)
    assert (less.logits[0, -1] - theirs.logits[0, int(real[0].sum()) - 1]).abs().max() > 1e-2


def test_what_differs_at_ratio_0_is_rounding(backbone):
    """In float64 nothing is left of it, whatever order a tower has its patches in."""
    with Float64():
        model = backbone.model(pruning_ratio=0.0, trained_scorer=False).double()
        stock, inputs = backbone.stock(model).double(), as_float64(backbone.batch(ROWS, "right"))
        ours, theirs = model(**inputs), stock(**inputs)
        found, expected = gradients(model, ours.task_loss), gradients(stock, theirs.loss)
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(ours.logits[real], theirs.logits[real], atol=1e-12, rtol=0)
    assert_gradients_equal(found, expected, 1e-12)


@pytest.mark.parametrize("rows", [[[9], [14]], [[2, Picture(), 4], [6]]], ids=["text", "images"])
def test_text_and_images_alone_are_stocks_to_the_bit_whatever_the_ratio(backbone, any_model, rows):
    stock, inputs = backbone.stock(any_model), backbone.batch(rows, "right")
    ours, theirs = any_model(**inputs), stock(**inputs)
    real = inputs["attention_mask"].bool()
    assert torch.equal(ours.logits[real], theirs.logits[real])
    assert torch.equal(ours.loss, theirs.loss)
    assert ours.temporal_loss is None
    expected, found = gradients(stock, theirs.loss), gradients(any_model, ours.loss)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


@pytest.mark.parametrize("backbone", BACKBONES[:2], ids=lambda backbone: backbone.name, indirect=True)
@torch.no_grad()
def test_packed_text_is_stocks_to_the_bit(backbone, any_model):
    inputs = {name: value for name, value in backbone.pack([[6], [9]]).items() if name in ("input_ids", "position_ids")}
    # Stock Qwen2.5-VL does not tell samples of text apart.
    ours, theirs = (some(**inputs, use_cache=False).logits for some in (any_model, backbone.stock(any_model)))
    assert torch.equal(ours, theirs)


@daily
def test_a_stock_checkpoint_lacks_exactly_the_scorer(backbone, any_model, tmp_path):
    stock = backbone.stock(any_model)
    stock.save_pretrained(tmp_path)
    settings = {"pruning_ratio": 0.25, "pruning_layer": 2, "output_loading_info": True}
    loaded, info = type(any_model).from_pretrained(tmp_path, **settings)
    assert all(name.startswith(f"model.{backbone.tower}.scorer.") for name in info["missing_keys"])
    assert len(info["missing_keys"]) == 14
    assert not info["unexpected_keys"]
    scorer = loaded.get_submodule(f"model.{backbone.tower}.scorer")
    assert not scorer.score_layer.weight.any()
    assert scorer.input_layer.weight.any()
    assert loaded.config.vision_config.pruning_ratio == 0.25
    found = loaded.state_dict()
    assert all(torch.equal(found[name], value) for name, value in stock.state_dict().items())
    _, info = type(any_model).from_pretrained(tmp_path, selector="cosine", **settings)
    assert not info["missing_keys"]


@with_compact
@pytest.mark.parametrize("rows", [ROWS, MIXED, ADJACENT], ids=["videos", "mixed", "adjacent"])
@torch.no_grad()
def test_rows_of_a_batch_equal_the_naive_construction(backbone, any_model, rows):
    batches = [backbone.batch(rows, padding_side) for padding_side in ("left", "right")]
    for ratio in (0.0, 0.3, 0.7, 1.0):
        found = []
        for inputs in batches:
            counted = inputs | {"position_ids": (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0)}
            found += [(any_model(**given, pruning_ratio=ratio), inputs) for given in (inputs, counted)]
        for index, row in enumerate(backbone.alone(rows)):
            expected = backbone.naive(any_model, row, ratio)
            for outputs, inputs in found:
                assert kept_of_row(outputs, inputs, index) == expected.kept
                torch.testing.assert_close(logits_of_row(outputs, inputs, index), expected.logits, **CLOSE)


@with_compact
@torch.no_grad()
def test_the_comparison_notices_positions_off_by_one_and_padding_that_is_seen(backbone, any_model):
    inputs, alone = backbone.batch(ROWS, "left"), backbone.alone(ROWS)
    outputs = any_model(**inputs, pruning_ratio=0.3)
    wrong = backbone.naive(any_model, alone[0], 0.3, shift=1)
    assert (logits_of_row(outputs, inputs, 0) - wrong.logits).abs().max() > 1e-2
    seen = any_model(**(inputs | {"attention_mask": torch.ones_like(inputs["attention_mask"])}), pruning_ratio=0.3)
    assert (seen.logits[2, -6:] - backbone.naive(any_model, alone[2], 0.3).logits).abs().max() > 1e-2


@with_compact
@pytest.mark.parametrize("form", ["left", "right", "without_mask", "packed"])
def test_losses_and_gradients_equal_those_of_separate_rows(backbone, any_model, form):
    """
    The mean over all labels, none of which is predicted from another sample, and over all blocks of later frames. No
    label is left out, not even one beside a dropped block.
    """
    rows: Rows = [*ROWS, [2, Picture(), 3]]
    if form == "without_mask":  # of equal lengths, but not of equal numbers of kept tokens
        short, long = (row["input_ids"].shape[1] for row in backbone.alone([[3, Clip(2), 5], [3, Clip(4), 5]]))
        rows = [[3, Clip(4), 5], [3, Clip(2), 5 + long - short]]
    inputs = backbone.pack(rows) if form == "packed" else backbone.batch(rows, form if form == "right" else "left")
    if form == "packed":
        assert (inputs["labels"] >= 0)[inputs["position_ids"] == 0].all()
    elif form == "without_mask":
        assert inputs.pop("attention_mask").all()
    outputs = any_model(**inputs, pruning_ratio=0.5)
    assert (outputs.kept_indices < 0).any() == (form != "packed")
    separate = backbone.alone(rows)
    task_loss = torch.cat([backbone.naive(any_model, row, 0.5).task_losses for row in separate]).mean()
    alone = [any_model(**row, pruning_ratio=0.5) for row in separate if "pixel_values_videos" in row]
    blocks = [sum(scores[1:].numel() for scores in out.token_scores) for out in alone]
    temporal_loss = sum(out.temporal_loss * count for out, count in zip(alone, blocks, strict=True)) / sum(blocks)
    torch.testing.assert_close(outputs.loss, outputs.task_loss + outputs.temporal_loss)
    torch.testing.assert_close(outputs.task_loss, task_loss, atol=1e-5, rtol=0)
    torch.testing.assert_close(outputs.temporal_loss, temporal_loss, atol=1e-6, rtol=0)
    assert_gradients_equal(gradients(any_model, outputs.temporal_loss), gradients(any_model, temporal_loss))
    expected = gradients(any_model, task_loss)
    assert_gradients_equal(gradients(any_model, any_model(**inputs, pruning_ratio=0.5).task_loss), expected)
    scorer = [name for name in expected if ".scorer." in name and not name.endswith("k_proj.bias")]
    assert len(scorer) == 13
    assert all(expected[name].abs().max() > 0 for name in scorer)


@with_compact
@pytest.mark.parametrize("use_cache", [True, False])
@torch.no_grad()
def test_packed_samples_are_separate_ones(backbone, any_model, use_cache):
    for rows in (ROWS, MIXED):
        for ratio in (0.0, 0.5, 1.0):
            packed = any_model(**backbone.pack(rows), pruning_ratio=ratio, use_cache=use_cache)
            alone = torch.cat([backbone.naive(any_model, row, ratio).logits for row in backbone.alone(rows)])
            torch.testing.assert_close(packed.logits[0], alone, **CLOSE)
        one = {name: value for name, value in backbone.pack(rows).items() if name != "position_ids"}
        assert (any_model(**one, pruning_ratio=1.0).logits[0] - alone).abs().max() > 1e-2  # the comparison could fail
    assert (packed.past_key_values is not None) == (use_cache and backbone.fills_cache_with_packed_rows)


def beside_a_packed_row(backbone, rows: Rows, padding_side: str) -> Inputs:
    """The last row padded, and the others packed in a row of their own."""
    alone, per_token = backbone.alone(rows), {}
    for row in alone:
        row["position_ids"] = torch.arange(row["input_ids"].shape[1])[None]
    for name in ("input_ids", "attention_mask", "mm_token_type_ids", "position_ids"):
        packed, last = torch.cat([row[name] for row in alone[:-1]], dim=-1), alone[-1][name]
        missing = packed.shape[1] - last.shape[1]
        side = (missing, 0) if padding_side == "left" else (0, missing)
        per_token[name] = torch.cat([packed, torch.nn.functional.pad(last, side)])
    return prompt(backbone.batch(rows, "left")) | per_token


@with_compact
@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize("rows", [ROWS, [[3, Picture(), 5], [2, Picture(), 3]]], ids=["videos", "images"])
@torch.no_grad()
def test_a_row_of_samples_beside_a_padded_row(backbone, any_model, rows, padding_side):
    inputs = beside_a_packed_row(backbone, [*rows, rows[0]], padding_side)
    expected = [backbone.naive(any_model, row, 0.5).logits for row in backbone.alone([*rows, rows[0]])]
    for length in (None, inputs["input_ids"].shape[1] + 7):
        outputs = any_model(**inputs, pruning_ratio=0.5, pruned_length=length)
        torch.testing.assert_close(logits_of_row(outputs, inputs, 0), torch.cat(expected[:-1]), **CLOSE)
        torch.testing.assert_close(logits_of_row(outputs, inputs, 1), expected[-1], **CLOSE)


def test_settings_of_the_vision_config_may_be_set_on_the_models(backbone):
    model, inputs = backbone.model(pruning_ratio=0.25), backbone.batch([[3, Clip(4), 5]], "left")
    model.config.pruning_ratio = 0.75
    assert model.config.vision_config.pruning_ratio == 0.75
    assert "pruning_ratio" not in model.config.to_dict()
    keep_mask = model(**inputs).keep_mask[0]
    assert torch.equal(keep_mask, model(**inputs, pruning_ratio=0.75).keep_mask[0])
    with pytest.raises(StrictDataclassFieldValidationError, match="pruning_ratio"):
        model.config.pruning_ratio = "half"


def test_packed_rows_without_positions_are_refused(backbone, any_model):
    packed = prompt(backbone.pack([[3, Clip(2), 4], [2, Clip(3), 2]]))
    del packed["position_ids"]
    with pytest.raises(ValueError, match="need `position_ids` that start over"):
        any_model(**packed, packed_rows=True)


@with_compact
@pytest.mark.parametrize("use_cache", [True, False])
@torch.no_grad()
def test_gaps_in_positions_are_not_taken_for_packed_samples(backbone, any_model, use_cache):
    """What is left of a prompt has gaps; native code would cut the attention at each, without a mask and a cache."""
    (row,) = backbone.alone([[3, Clip(4), 25]])
    expected = backbone.naive(any_model, row, 0.5).logits
    without_mask = {name: value for name, value in row.items() if name != "attention_mask"}
    for inputs in (row, without_mask):
        outputs = any_model(**inputs, pruning_ratio=0.5, use_cache=use_cache)
        torch.testing.assert_close(outputs.logits[0], expected, **CLOSE)


@pytest.mark.parametrize("selector", SELECTORS)
def test_every_selector_keeps_the_budget_and_frame_0(backbone, selector):
    model, inputs = backbone.model(selector=selector), backbone.batch(ROWS, "left")
    with torch.no_grad():
        for ratio in (0.3, 0.5, 0.9, 1.0):
            outputs = model(**inputs, pruning_ratio=ratio)
            for mask in outputs.keep_mask:
                frames, blocks = mask.shape
                assert int(mask.sum()) == frames * blocks - naive_budget(ratio, frames, blocks)
                assert mask[0].all() or ratio == 1.0
            dropped = sum(int((~mask).sum()) for mask in outputs.keep_mask)
            length = int(inputs["attention_mask"].sum()) - dropped
            assert int((outputs.kept_indices >= 0).sum()) == length


@daily
def test_a_saved_model_is_loaded_as_it_was(backbone, any_model, tmp_path):
    any_model.save_pretrained(tmp_path)
    loaded = type(any_model).from_pretrained(tmp_path)
    assert loaded.config.to_dict() | {"_name_or_path": ""} == any_model.config.to_dict()
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in any_model.state_dict().items())


def test_video_features_take_their_arguments_in_the_native_order(backbone, any_model):
    inputs, native = backbone.batch(ROWS, "left"), getattr(any_model.model.native, "get_video_features", None)
    if native is None:
        pytest.skip("the native model takes videos as images")
    vision = {name: inputs[name] for name in any_model.model.video_inputs if name in inputs}
    first = [name for name in inspect.signature(native).parameters if name in vision]
    assert "pixel_values_videos" in first
    others = {name: value for name, value in vision.items() if name not in first}
    with torch.no_grad():
        found = any_model.model.get_video_features(*(vision[name] for name in first), **others)
        assert torch.equal(found.pooler_output[0], any_model.model.get_video_features(**vision).pooler_output[0])


def test_settings_set_later_are_checked_by_the_next_call(backbone):
    model = backbone.model()
    model.config.vision_config.pruning_layer = 5
    with pytest.raises(ValueError, match="`pruning_layer` is"):
        model(**backbone.batch(ROWS, "left"))


@pytest.mark.parametrize(("field", "value"), [("pruned_position_ids", "compact"), ("refill_single_frame_bins", True)])
def test_settings_without_a_meaning_for_positions_in_space_are_refused(backbone, field, value):
    model = backbone.model()
    if backbone.name == "molmo2" or (field == "pruned_position_ids" and not model.model.num_axes):
        pytest.skip("positions are one number, frames of one size")
    config = model.config
    with pytest.raises(StrictDataclassFieldValidationError, match=rf"'{field}' expected one of .*, got {value}"):
        type(config)(**{field: value})
    holder = config if field == "pruned_position_ids" else config.vision_config
    with pytest.raises(StrictDataclassFieldValidationError, match=f"'{field}'"):
        setattr(holder, field, value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision_loads_as_a_cast(backbone, any_model, tmp_path, dtype):
    any_model.save_pretrained(tmp_path)
    loaded, cast = type(any_model).from_pretrained(tmp_path, dtype=dtype), backbone.model()
    for parameter in cast.parameters():  # not `cast.to(dtype)`, which rounds the frequencies of RoPE too
        parameter.data = parameter.data.to(dtype)
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    half = {n: v.to(dtype) if v.is_floating_point() else v for n, v in backbone.batch(ROWS, "left").items()}
    with torch.no_grad():
        logits = loaded(**half).logits
        assert torch.equal(logits, cast(**half).logits)
    assert logits.dtype == dtype
    assert logits.isfinite().all()


@pytest.mark.parametrize("asked", [True, False], ids=["asked", "not-asked"])
def test_the_tower_returns_hidden_states_where_its_config_says_so(backbone, any_model, asked):
    inputs = backbone.batch([[3, Clip(2), 5]], "left")
    vision = {name: inputs[name] for name in any_model.model.video_inputs if name in inputs}
    expected = any_model.model.get_video_features(**vision, output_hidden_states=True).hidden_states
    model = copy.deepcopy(any_model)
    model.config.vision_config.output_hidden_states = asked
    found = model.model.get_video_features(**vision).hidden_states
    if not asked:
        assert found is None
        return
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


def test_a_loss_function_gets_what_forward_does_not_name(backbone, any_model, monkeypatch):
    def loss(logits, labels, vocab_size, num_items_in_batch=None, **others):
        assert not {name for name in others if name != "shift_labels"}
        return logits.sum() * 0 + num_items_in_batch

    monkeypatch.setattr(any_model, "loss_function", loss)
    inputs = prompt(backbone.batch([[3, Clip(2), 3, Picture(), 2]], "left"))
    output = any_model(**inputs, labels=inputs["input_ids"], num_items_in_batch=7)
    assert output.task_loss == 7


def test_more_arguments_by_their_place_than_there_are_are_refused(backbone, any_model):
    ids = prompt(backbone.batch([[3]], "left"))["input_ids"]
    with pytest.raises(TypeError, match="positional arguments, but got 41"):
        any_model(ids, *[None] * 40)


def test_a_prompt_that_is_given_once(backbone, any_model):
    ids = prompt(backbone.batch([[3]], "left"))["input_ids"]
    settings = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = any_model.generate(ids, **settings)
    assert any_model.generate(ids, input_ids=None, **settings).equal(expected)
