"""Positions that the caller gives, under both position rules, and placeholders that no frame token announces."""

import pytest
import torch

from tests.modeling.reference import CLOSE, logits_of_row, naive_forward, one_by_one
from tests.tiny import (
    FRAME_END,
    FRAME_START,
    IMAGE_END,
    IMAGE_START,
    Image,
    Part,
    Video,
    build_inputs,
    tiny_config,
    tiny_model,
)


@pytest.fixture(params=["original", "compact"])
def model(request):
    model = tiny_model(tiny_config())
    model.config.pruned_position_ids = request.param
    return model


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
        expected = naive_forward(model, inputs | {"position_ids": positions})
        without_jump = naive_forward(model, inputs)
    torch.testing.assert_close(outputs.logits[0], expected.logits, **CLOSE)
    assert (outputs.logits[0, -1] - without_jump.logits[-1]).abs().max() > 0.05


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
        expected = naive_forward(model, row)
        torch.testing.assert_close(logits_of_row(outputs, inputs, index), expected.logits, **CLOSE)


def test_images_and_videos_are_told_apart_without_frame_tokens(model):
    """The released Molmo2 processors wrap frames in `<im_start>`, `<im_end>` (`use_frame_special_tokens=False`)."""
    rows: list[list[Part]] = [[2, Image(), 2, Video(3), 4], [2, Video(2), 3, Image((1, 1)), 3], [7]]
    inputs = build_inputs(rows)
    ids = inputs["input_ids"]
    wrapped = torch.where(ids == FRAME_START, IMAGE_START, torch.where(ids == FRAME_END, IMAGE_END, ids))
    vision = (*model.model.video_inputs, *model.model.image_inputs)
    expected = model.model.find_placeholders(ids, vision)
    for ours, theirs in zip(model.model.find_placeholders(wrapped, vision), expected, strict=True):
        assert theirs.any()
        assert torch.equal(ours, theirs)
    with torch.no_grad():
        outputs = model(**inputs | {"input_ids": wrapped})
        for index, row in enumerate(one_by_one(inputs | {"input_ids": wrapped}, rows)):
            torch.testing.assert_close(logits_of_row(outputs, inputs, index), model(**row).logits[0], **CLOSE)
