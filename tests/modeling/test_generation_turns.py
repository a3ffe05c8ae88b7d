"""A second chat turn: reusing the cache equals computing the whole conversation anew, or is refused."""

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

from stts_hf.modeling.cache_stts import CacheRecord
from tests.backbones import longer, without_vision
from tests.modeling.reference import Inputs
from tests.tiny import Image, Part, Video, build_inputs, tiny_config, tiny_model
from tests.version_marks import since_transformers_5_23

NEW_TOKENS = 6
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": None, "pad_token_id": 0}
PROMPTS: dict[str, list[list[Part]]] = {
    "one_video": [[3, Video(4), 5]],
    "padded_batch": [[3, Video(4), 5], [2, Video(2), 9], [6]],
    "images_and_videos": [[2, Image(), 2, Video(3), 4], [2, Video(2), 3]],
}


@pytest.fixture(scope="module", params=["original", "compact"])
def model(request):
    return tiny_model(tiny_config(model_overrides={"pruned_position_ids": request.param}))


def first_turn(model, inputs: Inputs, **settings):
    return model.generate(**inputs, **(GREEDY | settings), return_dict_in_generate=True)


@pytest.mark.parametrize(
    "form",
    [
        "whole_prompt",
        "whole_prompt_alone",
        "new_tokens_and_whole_mask",
        pytest.param("in_chunks", marks=since_transformers_5_23),
    ],
)
@pytest.mark.parametrize("pruning_ratio", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("rows", PROMPTS.values(), ids=PROMPTS.keys())
def test_reusing_the_cache_equals_recomputing(model, rows, pruning_ratio, form):
    inputs = build_inputs(rows)
    if form == "whole_prompt_alone" and not inputs["attention_mask"].all():
        inputs = build_inputs([[3, Video(4), 5], [3, Video(4), 5]])
    first = first_turn(model, inputs, pruning_ratio=pruning_ratio)
    turn = longer(inputs, first.sequences)
    expected = model.generate(**turn, **GREEDY, pruning_ratio=pruning_ratio)
    again = without_vision(turn) | {"past_key_values": first.past_key_values}
    seen = 0
    if form == "whole_prompt_alone":
        again = {name: again[name] for name in ("input_ids", "past_key_values")}
    elif form == "new_tokens_and_whole_mask":
        seen = first.sequences.shape[1] - 1  # the last token of an answer was never an input
        again["input_ids"] = turn["input_ids"][:, seen:]
    elif form == "in_chunks":
        again["prefill_chunk_size"] = 2
    assert torch.equal(model.generate(**again, **GREEDY), expected[:, seen:])


def test_three_turns_and_each_way_in_turn(model):
    inputs = build_inputs(PROMPTS["padded_batch"])
    out = first_turn(model, inputs)
    said = out.sequences
    for turn_number in range(3):
        turn = longer(inputs, said, seed=turn_number)
        expected = model.generate(**turn, **GREEDY)
        seen = said.shape[1] - 1 if turn_number == 1 else 0
        again = without_vision(turn) | {"input_ids": turn["input_ids"][:, seen:]}
        out = first_turn(model, again, past_key_values=out.past_key_values)
        assert torch.equal(out.sequences, expected[:, seen:])
        said = expected


def test_rows_that_ended_early_go_on_as_if_nothing_had_followed(model):
    inputs = build_inputs(PROMPTS["padded_batch"])
    length = inputs["input_ids"].shape[1]
    end = int(model.generate(**inputs, **GREEDY)[0, length + 1])
    first = first_turn(model, inputs, eos_token_id=end)
    assert (first.sequences[0, length + 2 :] == 0).all()
    said = first.sequences
    for turn_number in range(2):
        turn = longer(inputs, said, seed=turn_number)
        turn["attention_mask"] &= turn["input_ids"] != 0
        expected = model.generate(**turn, **(GREEDY | {"eos_token_id": end}))
        first = first_turn(model, without_vision(turn), past_key_values=first.past_key_values, eos_token_id=end)
        assert torch.equal(first.sequences, expected)
        said = expected


@pytest.mark.parametrize("way", ["handed_in", pytest.param("static", marks=since_transformers_5_23), "sampled_copies"])
def test_other_caches_can_be_reused_too(model, way):
    inputs = build_inputs(PROMPTS["one_video"])
    settings: dict[str, Any] = {"pruning_ratio": 0.5}
    if way == "handed_in":
        cache: Any = DynamicCache()
    elif way == "static":
        cache = StaticCache(model.config.get_text_config(), max_cache_len=100)
        settings["disable_compile"] = True
    else:
        cache = DynamicCache()
        settings |= {"do_sample": True, "num_return_sequences": 3}
    torch.manual_seed(0)
    sequences = model.generate(**inputs, **(GREEDY | settings), past_key_values=cache)
    if way == "sampled_copies":
        assert len({tuple(row) for row in sequences.tolist()}) == 3
        inputs = build_inputs(PROMPTS["one_video"] * 3) | {
            name: inputs[name].repeat(3, 1) for name in ("input_ids", "attention_mask", "mm_token_type_ids")
        }
        videos = build_inputs(PROMPTS["one_video"])["pixel_values_videos"]
        inputs["pixel_values_videos"] = videos.repeat(3, 1, 1)
    turn = longer(inputs, sequences)
    expected = model.generate(**turn, **GREEDY)
    extra = {"disable_compile": True} if way == "static" else {}
    found = model.generate(**without_vision(turn), **GREEDY, past_key_values=cache, **extra)
    assert torch.equal(found, expected)


def test_a_copied_cache_serves_two_continuations(model):
    inputs = build_inputs(PROMPTS["one_video"])
    first = first_turn(model, inputs)
    copied = copy.deepcopy(first.past_key_values)
    for cache, seed in ((first.past_key_values, 1), (copied, 2)):
        turn = longer(inputs, first.sequences, seed=seed)
        found = model.generate(**without_vision(turn), **GREEDY, past_key_values=cache)
        assert torch.equal(found, model.generate(**turn, **GREEDY))


@pytest.fixture
def turn(model):
    """A first turn's cache and the second turn's inputs."""
    inputs = build_inputs(PROMPTS["one_video"])
    first = first_turn(model, inputs)
    return first.past_key_values, longer(inputs, first.sequences)


@pytest.mark.parametrize("through", ["generate", "forward_then_generate", "new_tokens_then_whole_prompt"])
def test_a_changed_beginning_is_refused(model, turn, through):
    cache, inputs = turn
    if through == "forward_then_generate":
        start = build_inputs(PROMPTS["one_video"])
        with torch.no_grad():
            cache = model(**start, use_cache=True).past_key_values
        inputs = longer(start, start["input_ids"])
    elif through == "new_tokens_then_whole_prompt":
        seen = inputs["input_ids"].shape[1] - 6
        again = without_vision(inputs) | {"input_ids": inputs["input_ids"][:, seen:]}
        answer = model.generate(**again, **GREEDY, past_key_values=cache)[:, 6:]
        inputs = longer(inputs, torch.cat([inputs["input_ids"], answer], dim=-1))
    changed = without_vision(inputs)
    changed["input_ids"] = changed["input_ids"].clone()
    changed["input_ids"][0, 1] += 1
    with pytest.raises(ValueError, match=r"does not begin with the tokens that `past_key_values` has seen"):
        model.generate(**changed, **GREEDY, past_key_values=cache)


def test_a_prompt_without_new_tokens_is_refused(model, turn):
    cache, inputs = turn
    record: Any = CacheRecord.of(cache)
    seen = record.seen
    short = {name: value[:, :seen] for name, value in without_vision(inputs).items()}
    with pytest.raises(ValueError, match=rf"has {seen} tokens, but `past_key_values` has already seen {seen}"):
        model.generate(**short, **GREEDY, past_key_values=cache)


def test_a_cache_cropped_into_the_video_is_refused(model, turn):
    cache, inputs = turn
    cache.crop(-30)
    with pytest.raises(ValueError, match=r"`past_key_values` .* cropped to \d+ positions"):
        model.generate(**without_vision(inputs), **GREEDY, past_key_values=cache)


def test_a_cache_cropped_within_the_answer_is_taken_up_from_there(model, turn):
    cache, inputs = turn
    cache.crop(-3)
    found = model.generate(**without_vision(inputs), **GREEDY, past_key_values=cache)
    assert torch.equal(found, model.generate(**inputs, **GREEDY))


def test_a_cache_of_beam_search_is_refused(model):
    inputs = build_inputs(PROMPTS["one_video"])
    first = first_turn(model, inputs, num_beams=3)
    again = without_vision(longer(inputs, first.sequences))
    with pytest.raises(
        ValueError, match=r"`past_key_values` cannot be used again: after beam search .* Call again without"
    ):
        model.generate(**again, **GREEDY, past_key_values=first.past_key_values)


@pytest.mark.parametrize("through", ["generate", "forward"])
@pytest.mark.parametrize("what", ["the_same_video", "another_video", "an_image"])
def test_vision_inputs_beside_a_cache_that_holds_a_video_are_refused(model, turn, through, what):
    cache, inputs = turn
    if what != "the_same_video":
        more = build_inputs([[2, Video(2) if what == "another_video" else Image(), 3]], seed=3)
        inputs = (
            without_vision(inputs)
            | more
            | {
                name: torch.cat([inputs[name], more[name]], dim=-1)
                for name in ("input_ids", "attention_mask", "mm_token_type_ids")
            }
        )
    call = model.generate
    if through == "forward":
        record: Any = CacheRecord.of(cache)
        seen = record.seen
        inputs["input_ids"] = inputs["input_ids"][:, seen:]
        call = model
    name = "pixel_values" if what == "an_image" else "pixel_values_videos"
    with pytest.raises(ValueError, match=rf"`{name}` came with `past_key_values` that hold a video or image already"):
        call(**inputs, past_key_values=cache)


def test_a_cache_that_may_not_be_used_is_refused(model, turn):
    cache, inputs = turn
    with pytest.raises(ValueError, match="`use_cache=False` came with `past_key_values`"):
        model.generate(**without_vision(inputs), **GREEDY, past_key_values=cache, use_cache=False)


def test_a_refused_call_leaves_the_cache_usable(model, turn):
    cache, inputs = turn
    with pytest.raises(ValueError, match="`use_cache=False`"):
        model.generate(**without_vision(inputs), **GREEDY, past_key_values=cache, use_cache=False)
    with pytest.raises(ValueError, match="num_return_sequences"):
        model.generate(**without_vision(inputs), **GREEDY, past_key_values=cache, num_beams=1, num_return_sequences=2)
    found = model.generate(**without_vision(inputs), **GREEDY, past_key_values=cache)
    assert torch.equal(found, model.generate(**inputs, **GREEDY))
