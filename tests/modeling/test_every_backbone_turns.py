"""Turns over a cache, for every backbone: whatever was called in between, the answer is that to the whole prompt."""

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache

from stts_hf.modeling.cache_stts import CacheRecord
from tests.backbones import Clip, Inputs, Picture, Rows, prompt
from tests.modeling.reference import CLOSE
from tests.version_marks import since_transformers_5_23

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 4, "eos_token_id": None, "pad_token_id": 0}
MIXED: Rows = [[2, Picture(), 2, Clip(3), 4], [2, Clip(2), 3]]
TEXT: Rows = [[9], [5]]
PER_TOKEN = ("input_ids", "attention_mask", "mm_token_type_ids")


def tokens_of(inputs: Inputs, columns: slice) -> Inputs:
    names = ("input_ids", "attention_mask")
    return {name: inputs[name][:, columns] for name in names}


@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_steps_over_a_cache_are_one_call(backbone, any_model, ratio):
    inputs = prompt(backbone.batch([[*row, 4] for row in MIXED], "left"))
    first = {name: value[:, :-4] if name in PER_TOKEN else value for name, value in inputs.items()}
    with torch.no_grad():
        whole = any_model(**inputs, pruning_ratio=ratio).logits[:, -4:]
        cache = any_model(**first, pruning_ratio=ratio).past_key_values
        more = {"input_ids": inputs["input_ids"][:, -4:], "attention_mask": inputs["attention_mask"]}
        steps = any_model(**more, past_key_values=cache).logits
    torch.testing.assert_close(steps, whole, **CLOSE)


def test_steps_at_positions_off_by_one_are_not_one_call(backbone, any_model):
    """The comparison above could fail."""
    inputs = prompt(backbone.batch([[2, Clip(2), 7]], "left"))
    first = {name: value[:, :-4] if name in PER_TOKEN else value for name, value in inputs.items()}
    logits = []
    with torch.no_grad():
        for shift in (0, 1):
            cache = any_model(**first, pruning_ratio=0.5).past_key_values
            record: Any = CacheRecord.of(cache)
            record.values = record.values + shift
            logits.append(any_model(input_ids=inputs["input_ids"][:, -4:], past_key_values=cache).logits)
    assert (logits[1] - logits[0]).abs().max() > 1e-3


@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.5, 1.0])
def test_text_right_behind_a_cached_video(backbone, any_model, ratio):
    """Whose last blocks may be gone, and whose time may be ahead of the text."""
    for inputs in backbone.alone([[3, Clip(4), 5], [2, Clip(2), 5]]):
        end, text = int(inputs["mm_token_type_ids"][0].nonzero()[-1]) + 1, inputs["input_ids"][:, -5:]
        head = {n: value[:, :end] if n in PER_TOKEN else value for n, value in prompt(inputs).items()}
        whole = head | {"input_ids": torch.cat([head["input_ids"], text], dim=-1)}
        for name, value in (("attention_mask", 1), ("mm_token_type_ids", 0)):
            whole[name] = torch.nn.functional.pad(head[name], (0, 5), value=value)
        with torch.no_grad():
            expected = any_model(**whole, pruning_ratio=ratio).logits[:, -5:]
            cache = any_model(**head, pruning_ratio=ratio, use_cache=True).past_key_values
            rest = any_model(input_ids=text, past_key_values=cache).logits
        torch.testing.assert_close(rest, expected, **CLOSE)


@pytest.mark.parametrize("reuse", [True, False], ids=["over-the-cache", "anew"])
def test_a_second_turn_is_an_ordinary_prompt(backbone, any_model, reuse):
    inputs = prompt(backbone.batch(MIXED, "left"))
    said = any_model.generate(**inputs, **GREEDY, return_dict_in_generate=True)
    at_once = any_model.generate(**inputs, **(GREEDY | {"max_new_tokens": 8}))
    turn = inputs | {"input_ids": said.sequences}
    for name, value in (("attention_mask", 1), ("mm_token_type_ids", 0)):
        turn[name] = torch.nn.functional.pad(inputs[name], (0, 4), value=value)
    if reuse:
        turn = {name: turn[name] for name in ("input_ids", "attention_mask", "mm_token_type_ids")}
        turn["past_key_values"] = said.past_key_values
    assert torch.equal(any_model.generate(**turn, **GREEDY), at_once)


@pytest.mark.parametrize(
    "filled_by", ["forward", "generate", pytest.param("generate-static", marks=since_transformers_5_23)]
)
def test_a_video_after_a_turn_of_text_in_padded_rows(backbone, any_model, filled_by):
    """The cache holds text only, so the video's tokens find everything as it would be without a cache."""
    inputs = prompt(backbone.batch([[16, Clip(3), 4], [16, Clip(2), 14]], "left"))
    starts = inputs["attention_mask"].shape[1] - inputs["attention_mask"].sum(-1)
    assert starts.max() > 0
    head = slice(0, int(starts.max()) + 4)
    assert not inputs["mm_token_type_ids"][:, head].any()
    cache: Cache = DynamicCache()
    if filled_by == "generate-static":
        cache = StaticCache(config=any_model.config, max_cache_len=inputs["input_ids"].shape[1] + 4)
    text = tokens_of(inputs, head)
    if filled_by != "forward":
        any_model.generate(**text, **(GREEDY | {"max_new_tokens": 1}), past_key_values=cache)
    else:
        positions = (text["attention_mask"].cumsum(-1) - 1).clamp_min(0)
        with torch.no_grad():
            any_model(**text, position_ids=positions, past_key_values=cache)
    assert cache.get_seq_length() == head.stop
    settings = GREEDY | {"return_dict_in_generate": True, "output_logits": True}
    expected = any_model.generate(**inputs, **settings)
    found = any_model.generate(**inputs, **settings, past_key_values=cache)
    assert torch.equal(found.sequences, expected.sequences)
    for ours, theirs in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize("way", ["forward", "generate"])
@pytest.mark.parametrize("other", ["forward", "generate"])
@pytest.mark.parametrize("between", [MIXED, [[5], [4], [2]]], ids=["videos", "text"])
def test_text_over_a_cache_of_text_whatever_was_called_in_between(backbone, any_model, way, other, between):
    """Native models of positions in three axes keep what the last call was in the module."""
    rows = TEXT if way == "generate" else [[9]]
    inputs = prompt(backbone.batch(rows, "left"))
    cache, seen = DynamicCache(), slice(0, 6)
    options = {"past_key_values": cache} if way == "forward" else GREEDY | {"past_key_values": cache}
    call = any_model if way == "forward" else any_model.generate
    disturb = prompt(backbone.batch(between, "left"))
    with torch.no_grad():
        expected = call(**inputs, **({} if way == "forward" else GREEDY))
        call(**tokens_of(inputs, seen), **(options | ({} if way == "forward" else {"max_new_tokens": 1})))
        if other == "forward":
            any_model(**disturb)
        else:
            any_model.generate(**disturb, **GREEDY)
        if way == "generate":
            assert torch.equal(any_model.generate(**inputs, **options), expected)
        else:
            rest = any_model(input_ids=inputs["input_ids"][:, 6:], past_key_values=cache)
            torch.testing.assert_close(rest.logits, expected.logits[:, 6:], **CLOSE)


FIRST: dict[str, Rows] = {"text": [[9], [9]], "padded-text": [[9], [5]], "video": [[5, Clip(2), 3], [7]]}
NEXT: dict[str, Rows] = {"text": [[6], [6]], "video": [[3, Clip(3), 4], [3, Clip(3), 4]]}


@pytest.mark.parametrize("ratio", [0.0, 0.5])
@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("then", NEXT)
@pytest.mark.parametrize("way", ["forward", "generate"])
def test_a_turn_behind_a_row_that_ended_early(backbone, any_model, way, then, first, ratio):
    """Tokens of an answer after its row's end take no position, whatever follows them."""
    inputs, more = prompt(backbone.batch(FIRST[first], "left")), prompt(backbone.batch(NEXT[then], "left"))
    if first == then == "video" and not any_model.model.vision_is_causal:
        pytest.skip("refused")
    settings = GREEDY | {"return_dict_in_generate": True, "output_logits": True, "pruning_ratio": ratio}
    said = any_model.generate(**inputs, **settings)
    cache = said.past_key_values
    new = said.sequences.shape[1] - inputs["input_ids"].shape[1]  # its last token is not in the cache yet
    mask, types = torch.nn.functional.pad(inputs["attention_mask"], (0, new), value=1), inputs["mm_token_type_ids"]
    mask[1, -3:] = 0
    whole = {
        "input_ids": torch.cat([said.sequences, more["input_ids"]], dim=-1),
        "attention_mask": torch.cat([mask, more["attention_mask"]], dim=-1),
        "mm_token_type_ids": torch.cat([torch.nn.functional.pad(types, (0, new)), more["mm_token_type_ids"]], dim=-1),
    }
    vision = {name: value for name, value in more.items() if name not in whole}
    everything = {
        name: torch.cat([torch.as_tensor(some[name]) for some in (inputs, more) if name in some])
        for name in {**inputs, **more}.keys() - whole.keys()
    }
    settings["max_new_tokens"] = 1
    expected = any_model.generate(**whole, **everything, **settings).logits[0]
    if way == "generate":
        found = any_model.generate(**whole, **vision, **settings, past_key_values=cache).logits[0]
    else:
        rest = {n: value[:, inputs["input_ids"].shape[1] + new - 1 :] for n, value in whole.items()}
        rest["attention_mask"] = whole["attention_mask"]
        with torch.no_grad():
            found = any_model(**rest, **vision, past_key_values=cache, pruning_ratio=ratio).logits[:, -1]
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("ratio", [0.0, 0.5])
@pytest.mark.parametrize("first", [[[5, Picture(), 3]], [[5, Clip(2), 3]]], ids=["image", "video"])
@pytest.mark.parametrize("filled_by", ["forward", "generate"])
@pytest.mark.parametrize("new", [Picture(), Clip(3)], ids=["new-image", "new-video"])
def test_new_vision_tokens_behind_cached_ones(backbone, any_model, filled_by, first, ratio, new):
    """Right where vision tokens are causal, else refused: the cached ones would have to see the new ones."""
    inputs, more = prompt(backbone.batch(first, "left")), prompt(backbone.batch([[3, new, 4]], "left"))
    cache = DynamicCache()
    if filled_by == "generate":
        any_model.generate(**inputs, **(GREEDY | {"max_new_tokens": 1}), past_key_values=cache, pruning_ratio=ratio)
    else:
        any_model(**inputs, past_key_values=cache, pruning_ratio=ratio)
    more["attention_mask"] = torch.ones(1, inputs["input_ids"].shape[1] + more["input_ids"].shape[1]).long()
    if not any_model.model.vision_is_causal:
        with pytest.raises(ValueError, match=r"`pixel_values\w*` came with `past_key_values` .* video or image"):
            any_model(**more, past_key_values=cache, pruning_ratio=ratio)
        ids = torch.cat([inputs["input_ids"], more["input_ids"]], dim=-1)
        with pytest.raises(ValueError, match=r"`pixel_values\w*` came with `past_key_values`"):
            any_model.generate(**(more | {"input_ids": ids}), **GREEDY, past_key_values=cache, pruning_ratio=ratio)
        cache.reset()  # then it holds nothing
        more["attention_mask"] = torch.ones_like(more["input_ids"])
        if cache.get_seq_length() == 0:
            any_model(**more, past_key_values=cache, pruning_ratio=ratio)
        return
    whole = {n: torch.cat([inputs[n], more[n]], dim=-1) for n in ("input_ids", "mm_token_type_ids")}
    whole |= {name: value for name, value in more.items() if name not in whole}
    for name in inputs.keys() - ("input_ids", "mm_token_type_ids", "attention_mask"):
        whole[name] = torch.cat([torch.as_tensor(some[name]) for some in (inputs, more) if name in some])
    with torch.no_grad():
        expected = any_model(**whole, pruning_ratio=ratio).logits[:, -4:]
        found = any_model(**more, past_key_values=cache, pruning_ratio=ratio).logits[:, -4:]
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("way", ["crop", "reset"])
def test_a_new_video_behind_a_cache_that_holds_none_any_more(backbone, any_model, way):
    inputs = prompt(backbone.batch([[5, Clip(2), 3]], "left"))
    with torch.no_grad():
        expected = any_model(**inputs).logits[:, -1]
        cache = any_model(**inputs, use_cache=True).past_key_values
        if way == "crop":  # to text before the video
            cache.crop(2 - int(cache.get_seq_length()))
            rest = {n: value[:, 2:] if n in PER_TOKEN[::2] else value for n, value in inputs.items()}
        else:
            cache.reset()
            any_model(input_ids=inputs["input_ids"][:, :1], past_key_values=cache)
            rest = {n: value[:, 1:] if n in PER_TOKEN[::2] else value for n, value in inputs.items()}
        found = any_model(**rest, past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("way", ["reorder_cache", "batch_select_indices", "batch_repeat_interleave"])
def test_rows_of_a_cache_that_the_caller_moved(backbone, any_model, way):
    inputs = prompt(backbone.batch([[3, Clip(3), 4], [2, Clip(2), 3]], "left"))
    rows, given = {
        "reorder_cache": ([1, 0], torch.tensor([1, 0])),
        "batch_select_indices": ([1], torch.tensor([1])),
        "batch_repeat_interleave": ([0, 0, 1, 1], 2),
    }[way]
    with torch.no_grad():
        cache = any_model(**inputs, use_cache=True).past_key_values
        text, mask = torch.tensor([[7, 8], [7, 8]]), torch.nn.functional.pad(inputs["attention_mask"], (0, 2), value=1)
        expected = any_model(input_ids=text, attention_mask=mask, past_key_values=copy.deepcopy(cache)).logits[rows]
        getattr(cache, way)(given)
        found = any_model(input_ids=text[:1].expand(len(rows), -1), attention_mask=mask[rows], past_key_values=cache)
    torch.testing.assert_close(found.logits, expected, **CLOSE)


def test_steps_over_text_that_generate_cached_are_native(backbone, any_model, monkeypatch):
    inputs = prompt(backbone.batch([[9], [5]], "left"))
    cache = DynamicCache()
    any_model.generate(**tokens_of(inputs, slice(0, 7)), **(GREEDY | {"max_new_tokens": 1}), past_key_values=cache)
    with torch.no_grad():
        positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0)
        expected = any_model(**inputs, position_ids=positions).logits[:, -2:]
        monkeypatch.setattr(any_model.model, "prune", None)
        for end in (8, 9):
            step = tokens_of(inputs, slice(end - 1, end)) | {"attention_mask": inputs["attention_mask"][:, :end]}
            found = any_model(**step, past_key_values=cache).logits[:, 0]
            torch.testing.assert_close(found, expected[:, end - 8], **CLOSE)


@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_a_turn_padded_on_the_right_behind_cached_videos(backbone, any_model, ratio):
    """As if padded on the left: the answer follows each row's last token."""
    inputs = prompt(backbone.batch([[3, Clip(2), 3], [3, Clip(2), 3]], "left"))
    texts = backbone.batch([[3], [6]], "left")["input_ids"]
    columns, found = inputs["input_ids"].shape[1], []
    for side in ("left", "right"):
        more, mask = texts.clone(), torch.ones_like(texts)
        mask[0, slice(None, 3) if side == "left" else slice(3, None)] = 0
        more[0, 3:] = more[0, :3] = texts[0, -3:]
        cache = DynamicCache()
        any_model.generate(**inputs, **(GREEDY | {"max_new_tokens": 1}), past_key_values=cache, pruning_ratio=ratio)
        turn = {"input_ids": torch.cat([inputs["input_ids"], more], dim=-1)}
        turn["attention_mask"] = torch.cat([inputs["attention_mask"], mask], dim=-1)
        assert turn["input_ids"].shape[1] == columns + 6
        settings = GREEDY | {"output_logits": True, "return_dict_in_generate": True}
        found.append(any_model.generate(**turn, **settings, past_key_values=cache, pruning_ratio=ratio).logits)
    for left, right in zip(*found, strict=True):
        torch.testing.assert_close(left, right, **CLOSE)


def test_embeddings_over_a_cache_that_generate_filled_with_text(backbone, any_model):
    inputs = prompt(backbone.batch([[9], [9]], "left"))
    head = tokens_of(inputs, slice(0, 6))
    cache = DynamicCache()
    any_model.generate(**head, **(GREEDY | {"max_new_tokens": 1}), past_key_values=cache)
    embeds = any_model.get_input_embeddings()(inputs["input_ids"][:, 6:])
    with torch.no_grad():
        rest = any_model(inputs_embeds=embeds, attention_mask=inputs["attention_mask"], past_key_values=cache).logits
        whole = any_model(**tokens_of(inputs, slice(None))).logits[:, 6:]
    torch.testing.assert_close(rest, whole, **CLOSE)


def test_a_prompt_of_fewer_rows_than_a_cache_is_refused(backbone, any_model):
    inputs = prompt(backbone.batch([[3, Clip(2), 4], [3, Clip(2), 4]], "left"))
    said = any_model.generate(**inputs, **GREEDY, pruning_ratio=0.5, return_dict_in_generate=True)
    turn = torch.cat([said.sequences, said.sequences[:, -2:]], dim=-1)[:1]
    with pytest.raises(ValueError, match=r"does not begin .* `past_key_values`"):
        any_model.generate(turn, **GREEDY, past_key_values=said.past_key_values)


def test_an_image_after_a_turn_of_text_with_the_types_of_new_tokens(backbone, any_model):
    inputs = prompt(backbone.batch([[9, Picture(), 4]], "left"))
    first, more = (
        {n: value[:, columns] for n, value in inputs.items() if n in PER_TOKEN[::2]}
        for columns in (slice(6), slice(6, None))
    )
    vision = {name: value for name, value in inputs.items() if name not in PER_TOKEN}
    with torch.no_grad():
        expected = any_model(**inputs).logits[:, -4:]
        cache = any_model(**first, use_cache=True).past_key_values
        found = any_model(**more, **vision, past_key_values=cache).logits[:, -4:]
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("ratio", [0.0, 0.3])
def test_forward_over_rows_padded_behind_a_cache(backbone, any_model, ratio):
    turns = [
        prompt(backbone.batch(rows, "left")) for rows in ([[9], [9]], [[3, Clip(2), 5], [3, Clip(2), 2]], [[4]] * 2)
    ]
    whole = {name: torch.cat([turn[name] for turn in turns], dim=-1) for name in PER_TOKEN}
    vision, cache = {name: value for name, value in turns[1].items() if name not in PER_TOKEN}, DynamicCache()
    settings = GREEDY | {"max_new_tokens": 1, "return_dict_in_generate": True, "output_logits": True}
    expected = any_model.generate(**whole, **vision, **settings, pruning_ratio=ratio).logits[0]
    end = 0
    for turn in turns:
        end += turn["input_ids"].shape[1]
        inputs = turn | {"attention_mask": whole["attention_mask"][:, :end]}
        with torch.no_grad():
            found = any_model(**inputs, past_key_values=cache, pruning_ratio=ratio).logits[:, -1]
    torch.testing.assert_close(found, expected, **CLOSE)


def test_an_image_in_a_cropped_cache_is_known_where_it_lies(backbone, any_model):
    """The first image lay further back than the cache, with the second one, reaches."""
    late, early = (prompt(backbone.batch([[count, Picture(), 1]], "left")) for count in (200, 2))
    vision = {name: value for name, value in early.items() if name not in PER_TOKEN}
    new = {name: value[:, 1:] for name, value in early.items() if name in PER_TOKEN[::2]}
    with torch.no_grad():
        cache = any_model(**late, use_cache=True).past_key_values
        cache.crop(1 - int(cache.get_seq_length()))
        any_model(**new, **vision, past_key_values=cache)
    record = CacheRecord.of(cache)
    assert record is not None
    assert record.holds_vision
