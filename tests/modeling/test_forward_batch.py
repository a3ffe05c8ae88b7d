"""A batch gives every row what it would get alone, however rows are padded and whatever they hold."""

import pytest
import torch

from tests.modeling.reference import (
    CLOSE,
    assert_gradients_equal,
    gradients,
    kept_of_row,
    logits_of_row,
    naive_forward,
    one_by_one,
)
from tests.tiny import (
    FRAME_END,
    FRAME_START,
    IMAGE_END,
    IMAGE_START,
    Image,
    Part,
    Video,
    build_inputs,
    tiny_model,
)

BATCHES: dict[str, list[list[Part]]] = {
    "one_video": [[3, Video(3), 4]],
    "different_lengths": [[3, Video(4), 5], [2, Video(2), 9]],
    "equal_lengths": [[3, Video(3), 5], [1, Video(3), 7]],
    "row_without_video": [[12], [3, Video(3), 4]],
    "single_frame": [[3, Video(1), 4], [3, Video(3), 4]],
    "several_videos_in_a_row": [[2, Video(3), 3, Video(2), 4], [2, Video(2), 4]],
    "adjacent_videos": [[2, Video(2), Video(3), 4]],
    "image_and_video_in_rows": [[2, Image(), 4], [3, Video(3), 4]],
    "image_and_video_in_one_row": [[2, Image(), 2, Video(3), 4], [2, Video(2), 3, Image((1, 1)), 3], [7]],
}


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES.keys())
def test_rows_of_a_batch_equal_the_naive_construction(model, rows, padding_side):
    inputs = build_inputs(rows, padding_side=padding_side)
    with torch.no_grad():
        outputs = model(**inputs)
        for index, row in enumerate(one_by_one(inputs, rows)):
            expected = naive_forward(model, row)
            assert kept_of_row(outputs, inputs, index) == expected.kept
            torch.testing.assert_close(logits_of_row(outputs, inputs, index), expected.logits, **CLOSE)


@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_losses_and_gradients_equal_those_of_separate_rows(model, padding_side):
    rows: list[list[Part]] = [[3, Video(4), 5], [2, Video(2), 9], [6]]
    inputs = build_inputs(rows, padding_side=padding_side, labels=True)
    outputs = model(**inputs)
    check_losses(model, outputs, one_by_one(inputs, rows))


def test_losses_and_gradients_equal_those_of_separate_rows_without_a_mask(model):
    rows: list[list[Part]] = [[3, Video(4), 5], [2, Video(3), 18]]
    inputs = build_inputs(rows, labels=True)
    separate = one_by_one(inputs, rows)
    assert inputs.pop("attention_mask").all()
    outputs = model(**inputs)
    assert (outputs.kept_indices < 0).any()  # rows lose different numbers of tokens, so one of them has filler
    check_losses(model, outputs, separate)


def check_losses(model, outputs, separate):
    """A batch's task loss is the mean over its predicted tokens, its temporal loss that over blocks of later frames."""
    task_loss = torch.cat([naive_forward(model, row).task_losses for row in separate]).mean()
    alone = [model(**row) for row in separate if "video_grids" in row]
    blocks = [out.token_scores[0][1:].numel() for out in alone]
    temporal_loss = sum(out.temporal_loss * count for out, count in zip(alone, blocks, strict=True)) / sum(blocks)
    torch.testing.assert_close(outputs.task_loss, task_loss, atol=1e-5, rtol=0)
    torch.testing.assert_close(outputs.temporal_loss, temporal_loss, atol=1e-6, rtol=0)
    torch.testing.assert_close(outputs.loss, task_loss + temporal_loss, atol=1e-5, rtol=0)
    assert_gradients_equal(gradients(model, outputs.loss), gradients(model, task_loss + temporal_loss))


@pytest.mark.parametrize("rows", [BATCHES["different_lengths"], BATCHES["image_and_video_in_one_row"]])
def test_no_row_depends_on_another(model, rows):
    inputs = build_inputs(rows)
    with torch.no_grad():
        before = model(**inputs)
        changed = {name: value.clone() for name, value in inputs.items()}
        changed["input_ids"][0, -1] = 7
        changed["pixel_values_videos"][: int(inputs["video_grids"][0, 0])] += 1.0
        after = model(**changed)
    assert not torch.equal(logits_of_row(after, inputs, 0), logits_of_row(before, inputs, 0))
    for index in range(1, len(rows)):
        torch.testing.assert_close(logits_of_row(after, inputs, index), logits_of_row(before, inputs, index), **CLOSE)


def test_videos_in_the_wrong_order_are_noticed_by_the_comparison(model):
    rows: list[list[Part]] = [[3, Video(3), 4], [3, Video(3), 4]]
    inputs = build_inputs(rows)
    swapped = inputs | {"pixel_values_videos": inputs["pixel_values_videos"].roll(3, 0)}
    with torch.no_grad():
        right, wrong = model(**inputs), model(**swapped)
    assert (right.logits[:, -1] - wrong.logits[:, -1]).abs().max() > 0.1


@pytest.mark.parametrize("rows", [BATCHES["image_and_video_in_rows"], BATCHES["image_and_video_in_one_row"]])
def test_images_and_videos_are_told_apart_without_frame_tokens(model, rows):
    """The released Molmo2 processors wrap frames in `<im_start>`, `<im_end>` (`use_frame_special_tokens=False`)."""
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
