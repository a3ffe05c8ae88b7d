"""Rows to losses: packed, padded or with a black frame beside them, samples give the same losses and gradients."""

from typing import Any

import pytest
import torch

from stts_hf import PackedDataset, STTSDataCollator
from tests.checkpoints import BLOCKS, load_tiny
from tests.modeling.reference import assert_gradients_equal, gradients
from tests.stts_hf.training.samples import image_row, lengths, text_row, video_row

BUDGET = 200
CLOSE: dict[str, Any] = {"atol": 1e-5, "rtol": 0.0}


@pytest.fixture(scope="module")
def model(undecided):
    return load_tiny(undecided, scorer_target="change").train()


@pytest.fixture(scope="module")
def rows(media):
    turns = video_row("turns", media / "five.mkv")
    turns["messages"] += [
        text_row("")["messages"][0],
        video_row("", "x", answer="No, and the box stands still.")["messages"][1],
    ]
    return [
        video_row("two", media / "two.mp4", answer="A ball that moves to the left and bounces off the wall."),
        text_row("text"),
        turns,
        image_row("image", media / "turned.jpg"),
        video_row("three", (media / "three.mp4").read_bytes()),
    ]


def run(model, batch):
    """Losses, and the gradient of each parameter."""
    outputs = model(**batch)
    return outputs, gradients(model, outputs.loss)


@pytest.fixture(scope="module")
def unpacked(model, processor, rows):
    return run(model, STTSDataCollator(processor)(rows))


@pytest.mark.parametrize(("side", "pad_to"), [("left", None), ("right", BUDGET)], ids=["left", "right_pad_to"])
def test_packed_rows_give_the_losses_and_gradients_of_unpacked_ones(model, processor, rows, unpacked, side, pad_to):
    ratio = model.config.vision_config.pruning_ratio
    packed = PackedDataset(rows, lengths(rows, processor, ratio), BUDGET)
    assert 1 < len(packed) < len(rows)
    collator = STTSDataCollator(
        processor, model_config=model.config, max_length=BUDGET, pad_to=pad_to, padding_side=side
    )
    batch = collator([packed[index] for index in range(len(packed))])
    outputs, found = run(model, batch)
    for name in ("loss", "task_loss", "temporal_loss"):
        torch.testing.assert_close(getattr(outputs, name), getattr(unpacked[0], name), **CLOSE)
    assert_gradients_equal(found, unpacked[1])
    assert unpacked[1]["lm_head.weight"].abs().max() > 1e-3
    assert outputs.logits.shape[1] == (pad_to or max(packed.lengths))
    # what was planned without decoding is what the model was left with
    assert sorted((outputs.kept_indices >= 0).sum(-1).tolist()) == sorted(packed.lengths)


def test_losses_are_the_means_over_samples_of_their_own(model, processor, rows, unpacked):
    """The reference: one sample at a time, unpadded; task loss per label token, temporal loss per block."""
    collator = STTSDataCollator(processor)
    task, temporal, labels, blocks = 0.0, 0.0, 0, 0
    for row in rows:
        batch = collator([row])
        with torch.no_grad():
            outputs = model(**batch)
        count = int((batch["labels"] >= 0).sum())
        task, labels = task + count * outputs.task_loss, labels + count
        if outputs.temporal_loss is not None:
            later = (int(batch["video_grids"][0, 0]) - 1) * BLOCKS
            temporal, blocks = temporal + later * outputs.temporal_loss, blocks + later
    torch.testing.assert_close(unpacked[0].task_loss, task / labels, **CLOSE)
    torch.testing.assert_close(unpacked[0].temporal_loss, temporal / blocks, **CLOSE)


@pytest.mark.parametrize(("kind", "packed"), [("text", False), ("image", True)], ids=["text", "image_packed"])
def test_a_black_frame_changes_no_loss_and_reaches_every_parameter(model, processor, rows, kind, packed):
    chosen = [rows[1], rows[3]] if kind == "image" else [rows[1], text_row("other", "No.")]
    outputs, found = run(model, STTSDataCollator(processor)(chosen))
    batch = STTSDataCollator(processor, always_video=True)([chosen] if packed else chosen)
    with_frame = run(model, batch)
    torch.testing.assert_close(with_frame[0].loss, outputs.loss, **CLOSE)
    trained = {name for name, _ in model.named_parameters() if "vision_tower" in name or "scorer" in name}
    unreached = trained - with_frame[1].keys()
    with_video = run(model, STTSDataCollator(processor)([rows[0]]))[1]
    assert unreached <= trained - with_video.keys()
    zeros = {name: torch.zeros_like(gradient) for name, gradient in with_frame[1].items()}
    assert_gradients_equal(with_frame[1], zeros | found, tolerance=1e-4)
