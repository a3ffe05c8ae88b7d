"""Decoding by hand: `forward` with the cache of an earlier `forward` equals computing everything anew."""

import copy
from typing import Any

import pytest
import torch
from transformers import StaticCache

from stts_hf.modeling.cache_stts import CacheRecord
from tests.modeling.reference import CLOSE, Inputs, logits_of_row
from tests.tiny import Image, Part, Video, build_inputs, tiny_config, tiny_model

BATCHES: dict[str, list[list[Part]]] = {
    "one_video": [[3, Video(4), 5]],
    "padded": [[3, Video(4), 5], [2, Video(2), 9], [6]],
    "images_and_videos": [[2, Image(), 2, Video(3), 4], [2, Video(2), 3]],
}


@pytest.fixture(scope="module", params=["original", "compact"])
def model(request):
    return tiny_model(tiny_config(model_overrides={"pruned_position_ids": request.param}))


def with_text(inputs: Inputs, text: torch.Tensor) -> Inputs:
    added = text.shape[1]
    return inputs | {
        "input_ids": torch.cat([inputs["input_ids"], text], dim=-1),
        "attention_mask": torch.nn.functional.pad(inputs["attention_mask"], (0, added), value=1),
        "mm_token_type_ids": torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, added)),
    }


@pytest.mark.parametrize("mask", ["whole_mask", "no_mask"])
@pytest.mark.parametrize("steps", [[1, 1, 1], [4], [2, 1, 3]], ids=str)
@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES.keys())
@torch.no_grad()
def test_steps_over_the_cache_equal_recomputing(model, rows, steps, mask):
    inputs = build_inputs(rows)
    if mask == "no_mask" and not inputs["attention_mask"].all():
        inputs = build_inputs([[3, Video(4), 5], [2, Video(3), 18]])
    text = torch.randint(1, 512, (len(inputs["input_ids"]), sum(steps)), generator=torch.Generator().manual_seed(1))
    outputs = model(**inputs, use_cache=True)
    done = 0
    for count in steps:
        so_far = with_text(inputs, text[:, : done + count])
        expected = model(**so_far, use_cache=False)
        outputs = model(
            input_ids=text[:, done : done + count],
            attention_mask=so_far["attention_mask"] if mask == "whole_mask" else None,
            past_key_values=outputs.past_key_values,
        )
        done += count
        torch.testing.assert_close(outputs.logits, expected.logits[:, -count:], **CLOSE)


@pytest.mark.parametrize("fault", ["position_off_by_one", "dropped_tokens_counted"])
@torch.no_grad()
def test_a_wrong_position_after_the_cache_would_be_seen(model, fault):
    inputs = build_inputs(BATCHES["one_video"])
    text = torch.tensor([[7, 8]])
    expected = model(**with_text(inputs, text), use_cache=False).logits[:, -2:]
    cache = model(**inputs, use_cache=True).past_key_values
    note: Any = CacheRecord.of(cache)
    if fault == "position_off_by_one":
        note.values = note.values + 1
    else:  # where the other rule would go on
        other = (
            inputs["input_ids"].shape[1]
            if model.config.pruned_position_ids == "compact"
            else note.kept_indices.shape[1]
        )
        note.values = note.values + other - note.next_position
    wrong = model(input_ids=text, past_key_values=cache).logits
    assert (wrong - expected).abs().max() > 10 * CLOSE["atol"]


@torch.no_grad()
def test_kept_indices_of_a_later_call_count_its_own_tokens(model):
    inputs = build_inputs(BATCHES["one_video"])
    cache = model(**inputs, use_cache=True).past_key_values
    outputs = model(input_ids=torch.tensor([[4, 5, 6]]), past_key_values=cache)
    assert outputs.kept_indices.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("positions", ["given", "left_out"])
@pytest.mark.parametrize("rows", [BATCHES["one_video"], BATCHES["padded"]], ids=["one", "padded"])
@torch.no_grad()
def test_a_static_cache_is_filled_by_forward(model, rows, positions):
    inputs = build_inputs(rows)
    if positions == "given":
        inputs["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    expected = model(**inputs, use_cache=True)
    cache = StaticCache(model.config.get_text_config(), max_cache_len=90)
    outputs = model(**inputs, past_key_values=cache)
    for row in range(len(rows)):
        torch.testing.assert_close(logits_of_row(outputs, inputs, row), logits_of_row(expected, inputs, row), **CLOSE)
    assert CacheRecord.of(cache) is not None
    assert cache.is_compileable  # which transformers reads of all layers
    text = torch.full((len(rows), 2), 7)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 2), value=1)
    again = model(input_ids=text, attention_mask=mask, past_key_values=cache)
    further = model(input_ids=text, attention_mask=mask, past_key_values=expected.past_key_values)
    torch.testing.assert_close(again.logits, further.logits, **CLOSE)


@torch.no_grad()
def test_a_copied_cache_goes_its_own_way(model):
    inputs = build_inputs(BATCHES["padded"])
    cache = model(**inputs, use_cache=True).past_key_values
    copied = copy.deepcopy(cache)
    text = torch.randint(1, 512, (3, 2))
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 2), value=1)
    first = model(input_ids=text, attention_mask=mask, past_key_values=cache)
    second = model(input_ids=text, attention_mask=mask, past_key_values=copied)
    assert torch.equal(first.logits, second.logits)
    records: list[Any] = [CacheRecord.of(some) for some in (cache, copied)]
    assert [record.seen for record in records] == [mask.shape[1]] * 2


@torch.no_grad()
def test_forward_goes_on_after_generate(model):
    inputs = build_inputs(BATCHES["one_video"])
    first = model.generate(
        **inputs, do_sample=False, max_new_tokens=4, eos_token_id=None, pad_token_id=0, return_dict_in_generate=True
    )
    whole = with_text(inputs, torch.cat([first.sequences[:, -4:], torch.tensor([[3, 4]])], dim=-1))
    expected = model(**whole)
    # The last token of an answer was never an input.
    outputs = model(input_ids=whole["input_ids"][:, -3:], past_key_values=first.past_key_values)
    torch.testing.assert_close(outputs.logits, expected.logits[:, -3:], **CLOSE)


@torch.no_grad()
def test_a_row_whose_step_is_hidden_goes_on_where_it_was(model):
    inputs = build_inputs(BATCHES["padded"])
    text = torch.randint(1, 512, (3, 2), generator=torch.Generator().manual_seed(2))
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 2), value=1)
    mask[0, -2] = 0
    cache = model(**inputs, use_cache=True).past_key_values
    model(input_ids=text[:, :1], attention_mask=mask[:, :-1], past_key_values=cache)
    outputs = model(input_ids=text[:, 1:], attention_mask=mask, past_key_values=cache)
    cache = model(**inputs, use_cache=True).past_key_values
    expected = model(
        input_ids=text[:, 1:], attention_mask=torch.cat([mask[:, :-2], mask[:, -1:]], dim=-1), past_key_values=cache
    )
    torch.testing.assert_close(outputs.logits[0], expected.logits[0], **CLOSE)
