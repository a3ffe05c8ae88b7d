"""The whole model against a construction token by token: batches, packed rows, positions, caches."""

from typing import Any

import pytest
import torch

from tests.modeling.reference import CLOSE, assert_gradients_equal, gradients, kept_of_row, logits_of_row
from tests.naive_qwen3_vl import naive_forward
from tests.tiny_qwen3_vl import (
    TEXT_VOCABULARY,
    Image,
    Part,
    Video,
    batch,
    pack,
    samples,
    tiny_model,
)

BATCHES: dict[str, list[list[Part]]] = {
    "one-video": [[3, Video(4), 5]],
    "mixed-resolutions": [[3, Video(4, 2, 3), 5], [2, Video(2, 3, 3), 9], [6]],
    "several-videos-and-images": [[1, Video(2), 2, Image(1, 2), 3, Video(3, 1, 4), 4], [2, Image(), 3, Image(3, 1), 2]],
    "a-single-tubelet": [[3, Video(1), 4], [2, Video(2), Video(2, 2, 2), 3]],
}


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES.keys())
def test_rows_of_a_batch_equal_the_naive_construction(model, rows, padding_side):
    alone = samples(rows)
    inputs = batch(alone, padding_side)
    with torch.no_grad():
        for ratio in (0.0, 0.3, 0.5, 0.9, 1.0):
            outputs = model(**inputs, pruning_ratio=ratio)
            for index, row in enumerate(alone):
                naive = naive_forward(model, row, ratio)
                assert kept_of_row(outputs, inputs, index) == naive.kept
                torch.testing.assert_close(logits_of_row(outputs, inputs, index), naive.logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.9])
def test_losses_and_gradients_equal_those_of_separate_rows(model, ratio):
    alone = samples(BATCHES["several-videos-and-images"])
    outputs = model(**batch(alone), pruning_ratio=ratio)
    expected = torch.cat([naive_forward(model, row, ratio).task_losses for row in alone]).mean()
    torch.testing.assert_close(outputs.task_loss, expected, atol=1e-5, rtol=0)
    assert_gradients_equal(gradients(model, outputs.task_loss), gradients(model, expected))


def test_the_comparison_notices_positions_off_by_one(model):
    (row,) = samples(BATCHES["one-video"])
    with torch.no_grad():
        outputs = model(**row, pruning_ratio=0.5)
        wrong = naive_forward(model, row, 0.5, shift=1)
    assert (outputs.logits[0] - wrong.logits).abs().max() > 1e-2


@pytest.mark.parametrize("length", [40, 60])
def test_rows_get_the_length_that_is_asked_for(model, length):
    inputs = batch(samples(BATCHES["mixed-resolutions"]))
    with torch.no_grad():
        outputs, expected = model(**inputs, pruned_length=length), model(**inputs)
    assert outputs.logits.shape[1] == length
    for index in range(3):
        ours, theirs = logits_of_row(outputs, inputs, index), logits_of_row(expected, inputs, index)
        torch.testing.assert_close(ours, theirs, **CLOSE)


# Positions.


@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_positions_are_native_ones_of_the_whole_prompt_gathered(model, padding_side, monkeypatch):
    inputs = batch(samples(BATCHES["several-videos-and-images"]), padding_side)
    grids = (inputs["image_grid_thw"], inputs["video_grid_thw"])
    mask = inputs["attention_mask"]
    whole, _ = model.model.get_rope_index(inputs["input_ids"], inputs["mm_token_type_ids"], *grids, mask)
    given: list[torch.Tensor] = []
    real = model.model.language_model.forward

    def forward(**arguments):
        given.append(arguments["position_ids"])
        return real(**arguments)

    monkeypatch.setattr(model.model.language_model, "forward", forward)
    with torch.no_grad():
        kept = model(**inputs, pruning_ratio=0.5).kept_indices
    for row in range(2):
        shown = kept[row] >= 0
        assert torch.equal(given[0][-3:, row, shown], whole[:, row, kept[row, shown]])


def test_positions_that_count_tokens_say_nothing_new(model):
    inputs = batch(samples(BATCHES["several-videos-and-images"]))
    counts = (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        assert torch.equal(model(**inputs, position_ids=counts).logits, model(**inputs).logits)


@pytest.mark.parametrize("form", ["axes", "order-and-axes"])
def test_positions_of_the_caller_are_followed(model, form):
    (row,) = samples(BATCHES["one-video"])
    grids = {"video_grid_thw": row["video_grid_thw"]}
    axes, _ = model.model.get_rope_index(row["input_ids"], row["mm_token_type_ids"], **grids)
    jump = axes + 7 * (axes > 12)
    order = torch.arange(axes.shape[-1]).expand(1, 1, -1)

    def logits(positions):
        given = positions if form == "axes" else torch.cat([order, positions])
        return model(**row, position_ids=given, pruning_ratio=0.5).logits

    with torch.no_grad():
        expected = model(**row, pruning_ratio=0.5).logits
        torch.testing.assert_close(logits(axes), expected, **CLOSE)
        assert (logits(jump) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("mask", ["with_mask", "without_mask"])
def test_gaps_in_positions_are_not_taken_for_packed_samples(model, use_cache, mask):
    """What is left of a prompt has gaps; native code would cut the attention at each, without a mask and a cache."""
    (row,) = samples([[3, Video(4), 25]])
    naive = naive_forward(model, row, 0.5)
    if mask == "without_mask":
        del row["attention_mask"]
    with torch.no_grad():
        logits = model(**row, pruning_ratio=0.5, use_cache=use_cache).logits[0]
    torch.testing.assert_close(logits, naive.logits.detach(), **CLOSE)


# Packed rows.

SAMPLES: list[list[Part]] = [[3, Video(4), 5], [2, Image(), 3, Video(2, 3, 2), Video(1), 6], [4], [1, Video(2), 7]]


def test_loss_and_gradients_of_packed_samples_equal_separate_rows(model):
    alone = samples(SAMPLES)
    packed = pack(alone)
    assert (packed["labels"] >= 0)[packed["position_ids"] == 0].all()  # none may be predicted from the sample before
    outputs = model(**packed, pruning_ratio=0.5)
    expected = torch.cat([naive_forward(model, row, 0.5).task_losses for row in alone]).mean()
    torch.testing.assert_close(outputs.task_loss, expected, atol=1e-5, rtol=0)
    assert_gradients_equal(gradients(model, outputs.task_loss), gradients(model, expected))


@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize("length", [None, 110])
def test_a_row_of_samples_beside_a_padded_row(model, padding_side, length):
    alone = samples([*SAMPLES, [3, Video(2), 4]])
    first = pack(alone[:4]) | {"attention_mask": torch.ones(1, pack(alone[:4])["input_ids"].shape[1], dtype=torch.long)}
    second = alone[4] | {"position_ids": torch.arange(alone[4]["input_ids"].shape[1])[None]}
    inputs = batch([first, second], padding_side)
    with torch.no_grad():
        outputs = model(**inputs, pruning_ratio=0.5, pruned_length=length)
        expected = [naive_forward(model, row, 0.5).logits for row in alone]
    torch.testing.assert_close(logits_of_row(outputs, inputs, 0), torch.cat(expected[:4]), **CLOSE)
    torch.testing.assert_close(logits_of_row(outputs, inputs, 1), expected[4], **CLOSE)


def test_no_sample_sees_another(model):
    packed = pack(samples(SAMPLES))
    changed = packed | {"input_ids": packed["input_ids"].clone()}
    changed["input_ids"][0, 1] = (changed["input_ids"][0, 1] + 1) % TEXT_VOCABULARY
    with torch.no_grad():
        before, after = model(**packed, pruning_ratio=0.5), model(**changed, pruning_ratio=0.5)
        as_one = model(**{name: value for name, value in packed.items() if name != "position_ids"}, pruning_ratio=0.5)
    first = before.kept_indices[0] < samples(SAMPLES)[0]["input_ids"].shape[1]
    assert torch.equal(before.logits[0, ~first], after.logits[0, ~first])
    assert not torch.equal(before.logits[0, first], after.logits[0, first])
    assert (before.logits[0, ~first] - as_one.logits[0, ~first]).abs().max() > 1e-2  # the test could fail


# Caches.


@pytest.mark.parametrize("before", [[5], [3, Video(3), 5], [2, Image(), 3]], ids=["text", "video", "image"])
def test_a_video_after_a_cache_equals_one_call(model, before):
    alone = samples([[*before, 2, Video(2, 3, 2), 4]])[0]
    (seen,) = samples([before])
    start = seen["input_ids"].shape[1]
    assert torch.equal(alone["input_ids"][:, :start], seen["input_ids"])
    rest = {name: alone[name][:, start:] for name in ("input_ids", "mm_token_type_ids")}
    rest |= {"video_grid_thw": alone["video_grid_thw"][-1:], "pixel_values_videos": alone["pixel_values_videos"][-48:]}
    seen = {name: value for name, value in seen.items() if name != "labels"}
    if "pixel_values_videos" in seen:
        seen["pixel_values_videos"] = alone["pixel_values_videos"][:-48]
    with torch.no_grad():
        whole = model(**alone, pruning_ratio=0.5)
        cache = model(**seen, pruning_ratio=0.5).past_key_values
        outputs = model(**rest, past_key_values=cache, pruning_ratio=0.5)
    torch.testing.assert_close(outputs.logits, whole.logits[:, -outputs.logits.shape[1] :], **CLOSE)


def test_features_made_beforehand_are_gone_on_with(model):
    """`mm_encoder_outputs` and grids in place of pixels, as transformers takes them: positions go by the grids."""
    inputs = batch(samples([[3, Video(4, 3, 3), 9]]))
    grids = {"video_grid_thw": inputs["video_grid_thw"]}
    per_token = {name: inputs[name] for name in ("input_ids", "attention_mask", "mm_token_type_ids")}
    pixels = inputs["pixel_values_videos"]
    with torch.no_grad():
        encoded = model.model.get_video_features(pixels, **grids, pruning_ratio=0.0)
        whole = model(**per_token, **grids, pixel_values_videos=pixels, pruning_ratio=0.0)
        given: Any = {"mm_encoder_outputs": {"video": encoded}} | grids
        first = {name: value[:, :-6] for name, value in per_token.items()}
        cache = model(**first, **given).past_key_values
        model.model.rope_deltas = torch.full((2, 1), 40)  # as native code might leave them
        steps = model(input_ids=per_token["input_ids"][:, -6:], past_key_values=cache).logits
    torch.testing.assert_close(steps, whole.logits[:, -6:], **CLOSE)
    settings: Any = {"max_new_tokens": 4, "eos_token_id": None, "pad_token_id": 0, "do_sample": False, "num_beams": 2}
    expected = model.generate(**per_token, **grids, pixel_values_videos=pixels, pruning_ratio=0.0, **settings)
    assert torch.equal(model.generate(**per_token, **given, **settings), expected)
