"""Both position rules against the naive construction, and positions that the caller gives."""

import pytest
import torch

from tests.modeling.reference import CLOSE, kept_of_row, logits_of_row, naive_forward, one_by_one
from tests.tiny import Part, Video, build_inputs, tiny_config, tiny_model

ROWS: list[list[Part]] = [[3, Video(4), 5], [2, Video(2), 3, Video(3), 9]]


@pytest.fixture(params=["original", "compact"])
def model(request):
    model = tiny_model(tiny_config())
    model.config.pruned_position_ids = request.param
    return model


@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize("pruning_ratio", [0.3, 0.7, 1.0])
def test_rule_equals_the_naive_construction(model, pruning_ratio, padding_side):
    inputs = build_inputs(ROWS, padding_side=padding_side)
    with torch.no_grad():
        outputs = model(**inputs, pruning_ratio=pruning_ratio)
        for index, row in enumerate(one_by_one(inputs, ROWS)):
            expected = naive_forward(model, row, pruning_ratio, rule=model.config.pruned_position_ids)
            assert kept_of_row(outputs, inputs, index) == expected.kept
            torch.testing.assert_close(logits_of_row(outputs, inputs, index), expected.logits, **CLOSE)


@pytest.mark.parametrize("wrong", ["other_rule", "off_by_one"])
def test_the_comparison_notices_wrong_positions(model, wrong):
    inputs = build_inputs(ROWS)
    rules = {"original": "compact", "compact": "original"}
    rule = model.config.pruned_position_ids
    with torch.no_grad():
        outputs = model(**inputs)
        for index, row in enumerate(one_by_one(inputs, ROWS)):
            expected = naive_forward(
                model,
                row,
                rule=rules[rule] if wrong == "other_rule" else rule,
                position_shift=1 if wrong == "off_by_one" else 0,
            )
            difference = (logits_of_row(outputs, inputs, index) - expected.logits).abs().amax(-1)
            assert difference[-1] > 100 * CLOSE["atol"]


@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_positions_counted_by_the_mask_give_the_same(model, padding_side):
    inputs = build_inputs(ROWS, padding_side=padding_side)
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        expected, outputs = model(**inputs), model(**inputs, position_ids=positions)
    for index in range(len(ROWS)):
        torch.testing.assert_close(
            logits_of_row(outputs, inputs, index), logits_of_row(expected, inputs, index), **CLOSE
        )


def test_one_row_of_positions_serves_the_batch(model):
    rows: list[list[Part]] = [[3, Video(4), 5], [2, Video(3), 18]]
    inputs = build_inputs(rows)
    with torch.no_grad():
        expected = model(**inputs)
        outputs = model(**inputs, position_ids=torch.arange(inputs["input_ids"].shape[1])[None])
    torch.testing.assert_close(outputs.logits, expected.logits, **CLOSE)


def test_a_jump_in_the_given_positions_is_kept(model):
    rows: list[list[Part]] = [[3, Video(2), 5]]
    inputs = build_inputs(rows)
    positions = torch.arange(inputs["input_ids"].shape[1])[None].clone()
    positions[:, -5:] += 40
    with torch.no_grad():
        outputs = model(**inputs, position_ids=positions)
        expected = naive_forward(model, inputs | {"position_ids": positions}, rule=model.config.pruned_position_ids)
        without_jump = naive_forward(model, inputs, rule=model.config.pruned_position_ids)
    torch.testing.assert_close(outputs.logits[0], expected.logits, **CLOSE)
    assert (outputs.logits[0, -1] - without_jump.logits[-1]).abs().max() > 0.05


@pytest.mark.parametrize("mask", ["with_mask", "without_mask"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_gaps_in_positions_are_not_taken_for_packed_samples(model, use_cache, mask):
    """Without token types the mask is plain causal, which transformers may leave out and guess from positions."""
    rows: list[list[Part]] = [[3, Video(4), 5]]
    inputs = build_inputs(rows)
    del inputs["mm_token_type_ids"]
    with torch.no_grad():
        expected = naive_forward(model, inputs, rule=model.config.pruned_position_ids)
        if mask == "without_mask":
            del inputs["attention_mask"]
        outputs = model(**inputs, use_cache=use_cache)
    torch.testing.assert_close(outputs.logits[0], expected.logits, **CLOSE)


@pytest.mark.parametrize("hidden_position", ["zero", "counted"])
@torch.no_grad()
def test_hidden_tokens_within_a_row_do_not_part_it(model, hidden_position):
    """Such as padding after an answer that ended early: what follows still sees what came before."""
    rows: list[list[Part]] = [[3, Video(2), 12], [2, Video(3), 7]]
    inputs = build_inputs(rows)
    inputs["attention_mask"][0, -7:-4] = 0
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    given = positions.masked_fill(inputs["attention_mask"] == 0, 0) if hidden_position == "zero" else positions
    outputs = model(**inputs, position_ids=given)
    for index, row in enumerate(one_by_one(inputs, rows)):
        expected = naive_forward(model, row, rule=model.config.pruned_position_ids)
        torch.testing.assert_close(logits_of_row(outputs, inputs, index), expected.logits, **CLOSE)
