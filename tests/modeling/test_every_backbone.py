"""What holds for every backbone, whatever its parts: a new one in `tests/backbones.py` is held to it too."""

import copy

import pytest
import torch

from tests.backbones import Clip, Picture, Rows, prompt
from tests.modeling.reference import CLOSE, assert_gradients_equal, gradients, logits_of_row
from tests.naive import naive_budget

ROWS: Rows = [[3, Clip(4), 5], [2, Clip(3), 3, Clip(2), 9], [6]]
MIXED: Rows = [[2, Picture(), 2, Clip(3), 4], [2, Clip(2), 3]]


@pytest.mark.parametrize("rows", [ROWS, MIXED], ids=["videos", "mixed"])
def test_an_untrained_scorer_at_ratio_0_is_the_stock_model(backbone, rows):
    model = backbone.model(pruning_ratio=0.0, trained_scorer=False)
    if rows is MIXED and not backbone.stock_mixes:
        pytest.skip("stock takes no images beside videos")
    stock, inputs = backbone.stock(model), backbone.batch(rows, "right")
    ours, theirs = model(**inputs), stock(**inputs)
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(ours.logits[real], theirs.logits[real], atol=backbone.stock_rounding, rtol=0)
    torch.testing.assert_close(ours.task_loss, theirs.loss, atol=1e-6, rtol=0)
    found, expected = gradients(model, ours.task_loss), gradients(stock, theirs.loss)
    assert_gradients_equal(found, expected, backbone.stock_rounding)
    with torch.no_grad():  # one block less, and the comparison fails
        less = model(**backbone.alone([rows[0]])[0], pruning_ratio=0.1)
    assert (less.logits[0, -1] - theirs.logits[0, int(real[0].sum()) - 1]).abs().max() > 1e-2


def test_weights_are_the_stock_models_and_the_scorers(backbone, any_model):
    names = set(any_model.state_dict())
    scorer = {name for name in names if f"model.{backbone.tower}.scorer." in name}
    assert names - scorer == set(backbone.stock(any_model).state_dict())
    assert len(scorer) == 14


@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("rows", [ROWS, MIXED], ids=["videos", "mixed"])
def test_a_batch_is_its_rows_one_by_one(backbone, any_model, rows, ratio, padding_side):
    inputs = backbone.batch(rows, padding_side)
    with torch.no_grad():
        together = any_model(**inputs, pruning_ratio=ratio)
        for index, row in enumerate(backbone.alone(rows)):
            alone = any_model(**row, pruning_ratio=ratio)
            torch.testing.assert_close(logits_of_row(together, inputs, index), alone.logits[0], **CLOSE)


def test_a_batch_whose_padding_is_seen_is_not_its_rows(backbone, any_model):
    """The comparison above could fail."""
    inputs = backbone.batch(ROWS, "left")
    with torch.no_grad():
        seen = any_model(**(inputs | {"attention_mask": torch.ones_like(inputs["attention_mask"])}), pruning_ratio=0.3)
        alone = any_model(**backbone.alone(ROWS)[2], pruning_ratio=0.3)
    assert (seen.logits[2, -6:] - alone.logits[0, -6:]).abs().max() > 1e-2


@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_packed_samples_are_separate_ones(backbone, any_model, ratio):
    with torch.no_grad():
        packed = any_model(**backbone.pack(ROWS), pruning_ratio=ratio)
        alone = torch.cat([any_model(**row, pruning_ratio=ratio).logits[0] for row in backbone.alone(ROWS)])
        one = {name: value for name, value in backbone.pack(ROWS).items() if name != "position_ids"}
        as_one = any_model(**one, pruning_ratio=ratio)
    torch.testing.assert_close(packed.logits[0], alone, **CLOSE)
    assert (as_one.logits[0] - alone).abs().max() > 1e-2  # the comparison could fail
    assert (packed.past_key_values is not None) == backbone.fills_cache_with_packed_rows


@pytest.mark.parametrize("selector", ["scorer", "cosine", "random"])
@pytest.mark.parametrize("packing", ["varlen", "first_fit_descending"])
def test_every_selector_keeps_the_budget_and_frame_0(backbone, selector, packing):
    model, inputs = backbone.model(selector=selector, packing=packing), backbone.batch(ROWS, "left")
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


def test_the_layouts_give_the_same(backbone):
    inputs = backbone.batch(ROWS, "left")
    with torch.no_grad():
        flat, bins = (
            backbone.model(packing=packing)(**inputs, pruning_ratio=0.5)
            for packing in ("varlen", "first_fit_descending")
        )
    real = flat.kept_indices >= 0
    torch.testing.assert_close(flat.logits[real], bins.logits[real], **CLOSE)


def test_training_moves_every_part_of_the_scorer_and_the_losses_add_up(backbone):
    model = backbone.model().train()
    outputs = model(**backbone.batch(ROWS, "right"), pruning_ratio=0.5)
    torch.testing.assert_close(outputs.loss, outputs.task_loss + outputs.temporal_loss)
    moved = gradients(model, outputs.loss)
    scorer = [name for name in moved if ".scorer." in name and not name.endswith("k_proj.bias")]
    assert len(scorer) == 13
    assert all(moved[name].abs().max() > 0 for name in scorer)


def test_labels_beside_a_dropped_block_are_not_lost(backbone, any_model):
    """The task's loss is that of the labels of the rows one by one, each counted once."""
    inputs = backbone.batch(ROWS, "left")
    with torch.no_grad():
        together = any_model(**inputs, pruning_ratio=0.5).task_loss
        alone = [any_model(**row, pruning_ratio=0.5).task_loss for row in backbone.alone(ROWS)]
        counts = [int((row["labels"][:, 1:] >= 0).sum()) for row in backbone.alone(ROWS)]
    expected = sum(loss * count for loss, count in zip(alone, counts, strict=True)) / sum(counts)
    torch.testing.assert_close(together, expected, atol=1e-5, rtol=0)


def test_a_saved_model_is_loaded_as_it_was(backbone, any_model, tmp_path):
    any_model.save_pretrained(tmp_path)
    loaded = type(any_model).from_pretrained(tmp_path)
    assert loaded.config.to_dict() | {"_name_or_path": ""} == any_model.config.to_dict()
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in any_model.state_dict().items())


@pytest.mark.parametrize("field", ["pruning_layer", "refill_single_frame_bins"])
def test_settings_set_later_are_checked_by_the_next_call(backbone, field):
    model = backbone.model()
    setattr(model.config.vision_config, field, 5 if field == "pruning_layer" else True)
    with pytest.raises(ValueError, match=f"`{field}` is"):
        model(**backbone.batch(ROWS, "left"))


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
    with pytest.raises(TypeError, match="by their place, but got 41"):
        any_model(ids, *[None] * 40)


def test_a_prompt_that_is_given_once(backbone, any_model):
    ids = prompt(backbone.batch([[3]], "left"))["input_ids"]
    settings = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = any_model.generate(ids, **settings)
    assert any_model.generate(ids, input_ids=None, **settings).equal(expected)
