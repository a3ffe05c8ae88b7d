"""Turns over a cache, for every backbone: whatever was called in between, the answer is that to the whole prompt."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache

from stts_hf.modeling.cache_stts import CacheRecord
from tests.backbones import Backbone, Clip, Inputs, Picture, Rows, longer, prompt, with_compact, without_vision
from tests.modeling.reference import CLOSE, logits_of_row
from tests.version_marks import since_transformers_5_23

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 4, "eos_token_id": None, "pad_token_id": 0}
ONE: Rows = [[3, Clip(4), 5]]
PADDED: Rows = [[3, Clip(4), 5], [2, Clip(2), 9], [6]]
MIXED: Rows = [[2, Picture(), 2, Clip(3), 4], [2, Clip(2), 3]]
TEXT: Rows = [[9], [5]]
PER_TOKEN = ("input_ids", "attention_mask", "mm_token_type_ids")


def tokens_of(inputs: Inputs, columns: slice) -> Inputs:
    names = ("input_ids", "attention_mask")
    return {name: inputs[name][:, columns] for name in names}


def static_cache(model: Any) -> StaticCache:
    return StaticCache(config=model.config.get_text_config(), max_cache_len=200)


# By `forward`.


@with_compact
@pytest.mark.parametrize("rows", [PADDED, MIXED, ONE], ids=["padded", "mixed", "one"])
@torch.no_grad()
def test_steps_over_a_cache_equal_recomputing(backbone, any_model, rows):
    inputs = prompt(backbone.batch(rows, "left"))
    text = torch.randint(1, 500, (len(rows), 4), generator=torch.Generator().manual_seed(1))
    for ratio, steps in ((0.0, [2, 1, 1]), (0.5, [1, 1, 2]), (0.5, [4])):
        whole = longer(inputs, inputs["input_ids"], 4) | {"input_ids": torch.cat([inputs["input_ids"], text], dim=-1)}
        expected = any_model(**whole, pruning_ratio=ratio, use_cache=False).logits[:, -4:]
        cache, done = any_model(**inputs, pruning_ratio=ratio, use_cache=True).past_key_values, 0
        for count in steps:
            length = inputs["input_ids"].shape[1] + done + count
            mask = None if rows is ONE else whole["attention_mask"][:, :length]
            ids = text[:, done : done + count]
            found = any_model(input_ids=ids, attention_mask=mask, past_key_values=cache)
            torch.testing.assert_close(found.logits, expected[:, done : done + count], **CLOSE)
            if ratio:
                assert torch.equal(found.kept_indices, torch.arange(count).expand(len(rows), -1))
            done += count


@with_compact
@pytest.mark.parametrize("positions", ["given", "left_out"])
@torch.no_grad()
def test_a_static_cache_is_filled_by_forward(backbone, any_model, positions):
    inputs = prompt(backbone.batch(PADDED, "left"))
    if positions == "given":
        inputs["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    expected, cache = any_model(**inputs, use_cache=True), static_cache(any_model)
    outputs = any_model(**inputs, past_key_values=cache)
    for row in range(len(PADDED)):
        torch.testing.assert_close(logits_of_row(outputs, inputs, row), logits_of_row(expected, inputs, row), **CLOSE)
    assert CacheRecord.of(cache) is not None
    assert cache.is_compileable  # which transformers reads of all layers
    text = {"input_ids": torch.full((3, 2), 7)}
    text["attention_mask"] = torch.nn.functional.pad(inputs["attention_mask"], (0, 2), value=1)
    again, further = (any_model(**text, past_key_values=some) for some in (cache, expected.past_key_values))
    torch.testing.assert_close(again.logits, further.logits, **CLOSE)


@with_compact
@torch.no_grad()
def test_forward_goes_on_after_generate(backbone, any_model):
    inputs = prompt(backbone.batch(ONE, "left"))
    first = any_model.generate(**inputs, **GREEDY, return_dict_in_generate=True)
    whole = longer(inputs, first.sequences, 2)
    outputs = any_model(input_ids=whole["input_ids"][:, -3:], past_key_values=first.past_key_values)
    torch.testing.assert_close(outputs.logits, any_model(**whole).logits[:, -3:], **CLOSE)


@with_compact
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


@with_compact
@pytest.mark.parametrize(
    "form",
    [
        "whole-prompt",
        "prompt-alone",
        "new-tokens",
        pytest.param("static", marks=since_transformers_5_23),
        pytest.param("in-chunks", marks=since_transformers_5_23),
    ],
)
@pytest.mark.parametrize("rows", [PADDED, MIXED], ids=["padded", "mixed"])
def test_second_and_third_turns_over_the_cache_equal_recomputing(backbone, any_model, rows, form):
    if form == "prompt-alone" and backbone.name == "qwen3_vl_moe":
        pytest.skip("two experts of a token tie there, and rounding takes the other")
    inputs = prompt(backbone.batch([*ONE, *ONE] if form == "prompt-alone" else rows, "left"))
    for ratio in (0.0, 0.5):
        cache, options = (
            (static_cache(any_model), {"disable_compile": True}) if form == "static" else (DynamicCache(), {})
        )
        said = any_model.generate(**inputs, **GREEDY, past_key_values=cache, pruning_ratio=ratio, **options)
        for turn_number in range(2):
            turn = longer(inputs, said, seed=turn_number)
            any_model.generate(**prompt(backbone.batch([[2, Clip(1), 3]], "left")), **GREEDY)  # leaves nothing stale
            expected = any_model.generate(**turn, **GREEDY, pruning_ratio=ratio)
            seen = said.shape[1] - 1 if form == "new-tokens" else 0  # the last was never an input
            again = {"input_ids": turn["input_ids"][:, seen:]}
            if form != "prompt-alone":
                again = without_vision(turn) | again
            chunks = {"prefill_chunk_size": 2} if form == "in-chunks" else {}
            found = any_model.generate(**again, **GREEDY, past_key_values=cache, **options, **chunks)
            assert torch.equal(found, expected[:, seen:])
            said = expected


@with_compact
def test_sampled_copies_go_on_as_rows_of_their_own(backbone, any_model):
    inputs, cache = prompt(backbone.batch(ONE, "left")), DynamicCache()
    torch.manual_seed(0)
    settings = GREEDY | {"do_sample": True, "num_return_sequences": 3}
    sequences = any_model.generate(**inputs, **settings, past_key_values=cache)
    assert len({tuple(row) for row in sequences.tolist()}) == 3
    again = {"input_ids": torch.cat([sequences, torch.tensor([[5, 6, 7]] * 3)], dim=-1)}
    for found, row in zip(
        any_model.generate(**again, **GREEDY, past_key_values=cache), again["input_ids"], strict=True
    ):
        turn = longer(inputs, sequences[:1], 3) | {"input_ids": row[None]}
        assert torch.equal(found, any_model.generate(**turn, **GREEDY)[0])


@with_compact
@pytest.mark.parametrize("filled_by", ["forward", "generate"])
def test_a_copied_cache_serves_two_continuations(backbone, any_model, filled_by):
    inputs, cache = second_turn(backbone, any_model, filled_by)
    copied = copy.deepcopy(cache)
    cache.crop(-2)
    for some, seed in ((cache, 1), (copied, 2)):
        turn = longer(inputs, inputs["input_ids"], seed=seed)
        found = any_model.generate(**without_vision(turn), **GREEDY, past_key_values=some)
        assert torch.equal(found, any_model.generate(**turn, **GREEDY))


def second_turn(backbone: Backbone, model: Any, filled_by: str = "generate", **settings: Any) -> tuple[Inputs, Cache]:
    """The whole conversation of a second turn, and the cache of the first."""
    inputs = prompt(backbone.batch(ONE, "left"))
    if filled_by == "generate":
        first = model.generate(**inputs, **GREEDY, **settings, return_dict_in_generate=True)
        return longer(inputs, first.sequences), first.past_key_values
    with torch.no_grad():
        first = model(**longer(inputs, inputs["input_ids"], 4), use_cache=True)
    return longer(inputs, longer(inputs, inputs["input_ids"], 4)["input_ids"]), first.past_key_values


Turn = dict[str, Any]
WRONG: dict[str, tuple[Callable[[Turn, Any], Turn], str]] = {
    "another-beginning": (lambda turn, _: {"input_ids": turn["input_ids"] + 1}, "does not begin .* `past_key_values`"),
    "more-rows": (lambda turn, _: {n: turn[n].repeat(2, 1) for n in PER_TOKEN}, "does not begin .* `past_key_values`"),
    "nothing-new": (lambda turn, _: {n: turn[n][:, :-8] for n in PER_TOKEN}, r"`past_key_values` has already seen \d+"),
    "no-cache": (lambda *_: {"use_cache": False}, "`use_cache=False` and `past_key_values`"),
    "copies": (lambda *_: {"num_beams": 1, "num_return_sequences": 2}, "num_return_sequences"),
    "assistant": (lambda _, model: {"assistant_model": model}, "`assistant_model` came with `past_key_values`"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG.keys())
@pytest.mark.parametrize("filled_by", ["forward", "generate"])
def test_a_turn_that_does_not_fit_its_cache_is_refused_and_leaves_it_usable(
    backbone, any_model, filled_by, change, message
):
    inputs, cache = second_turn(backbone, any_model, filled_by)
    turn = without_vision(inputs)
    with pytest.raises(ValueError, match=message):
        any_model.generate(**(turn | GREEDY | change(turn, any_model)), past_key_values=cache)
    found = any_model.generate(**turn, **GREEDY, past_key_values=cache)
    assert torch.equal(found, any_model.generate(**inputs, **GREEDY))


@pytest.mark.parametrize("way", ["cropped-into-a-video", "beams"])
def test_a_cache_whose_columns_are_no_longer_the_callers_is_refused(backbone, any_model, way):
    inputs, cache = second_turn(backbone, any_model, num_beams=3 if way == "beams" else 1)
    if way != "beams":
        cache.crop(-20)
    with pytest.raises(ValueError, match="`past_key_values` cannot be used again"):
        any_model.generate(**without_vision(inputs), **GREEDY, past_key_values=cache)


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
    names = (*any_model.model.video_inputs, *any_model.model.image_inputs)
    assert torch.stack(any_model.model.find_placeholders(record.token_ids, names)).any()


def padded(inputs: Inputs) -> Inputs:
    """With three columns of padding on the left."""
    return inputs | {name: torch.nn.functional.pad(inputs[name], (3, 0)) for name in PER_TOKEN}


@pytest.mark.parametrize("settings", [{"repetition_penalty": 2.0}, {"no_repeat_ngram_size": 1}], ids=str)
def test_a_second_turn_sees_the_whole_conversation(backbone, any_model, settings):
    """Processors of logits read the ids of what is cached, too."""
    for inputs in (padded(prompt(backbone.batch(ONE, "left"))), prompt(backbone.batch(PADDED, "left"))):
        first = any_model.generate(**inputs, **GREEDY, return_dict_in_generate=True)
        turn = longer(inputs, first.sequences)
        expected = any_model.generate(**turn, **GREEDY, **settings)
        found = any_model.generate(**without_vision(turn), **GREEDY, **settings, past_key_values=first.past_key_values)
        assert torch.equal(found, expected)


def test_a_crop_of_hidden_columns_keeps_the_positions(backbone, any_model):
    inputs = prompt(backbone.batch(PADDED[:2], "left"))
    cache = any_model(**inputs).past_key_values
    text = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8]])
    hidden = torch.nn.functional.pad(inputs["attention_mask"], (0, 4), value=1)
    hidden[0, -2:] = 0
    any_model(input_ids=text, attention_mask=hidden, past_key_values=cache)
    cache.crop(-2)
    rest = {"input_ids": text[:, 2:], "attention_mask": torch.ones_like(hidden) * (hidden.cumsum(-1) > 0)}
    whole = inputs | {
        "input_ids": torch.cat([inputs["input_ids"], text], dim=-1),
        "attention_mask": rest["attention_mask"],
        "mm_token_type_ids": torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, 4)),
    }
    found = any_model(**rest, past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(found, any_model(**whole).logits[:, -1], atol=1e-5, rtol=0)


class Interrupted(Exception):
    pass


class FailingStreamer:
    def __init__(self):
        self.puts = 0

    def put(self, value: torch.Tensor) -> None:
        self.puts += 1
        if self.puts == 3:
            raise Interrupted

    def end(self) -> None:
        pass


def test_a_cache_that_an_error_left_half_filled_is_refused(backbone, any_model):
    cache = DynamicCache()
    with pytest.raises(Interrupted):
        any_model.generate(
            **prompt(backbone.batch(ONE, "left")), **GREEDY, past_key_values=cache, streamer=FailingStreamer()
        )
    with pytest.raises(ValueError, match="cannot be used again: an error ended the call that filled it"):
        any_model.generate(input_ids=torch.arange(1, 60)[None], **GREEDY, past_key_values=cache)


@pytest.mark.parametrize("through", ["forward", "generate"])
def test_grids_without_pixels_say_nothing(backbone, any_model, through):
    inputs, cache = second_turn(backbone, any_model)
    grids = {name: inputs[name] for name in any_model.model.video_inputs[1:]}
    if through == "generate":
        expected = any_model.generate(**inputs, **GREEDY)
        again = without_vision(inputs) | grids
        assert torch.equal(any_model.generate(**again, **GREEDY, past_key_values=cache), expected)
    else:
        note = CacheRecord.of(cache)
        assert note is not None
        text = without_vision(inputs) | {"input_ids": inputs["input_ids"][:, note.seen :]}
        assert any_model(**text, **grids, past_key_values=cache).logits.isfinite().all()


def test_labels_beside_a_cache_and_positions(backbone, any_model):
    cache = any_model(input_ids=torch.arange(1, 7)[None], use_cache=True).past_key_values
    ids = torch.tensor([[7, 8, 9]])
    outputs = any_model(
        input_ids=ids,
        labels=ids,
        position_ids=torch.arange(6, 9)[None],
        attention_mask=torch.ones(1, 9, dtype=torch.int64),
        past_key_values=cache,
    )
    logits = any_model(input_ids=torch.arange(1, 10)[None]).logits[:, 6:8]
    expected = torch.nn.functional.cross_entropy(logits[0], ids[0, 1:])
    torch.testing.assert_close(outputs.loss, expected, atol=1e-5, rtol=0)


def test_rows_that_are_said_to_hold_one_sample_do(backbone, any_model):
    if any_model.model.num_axes:
        pytest.skip("positions beside a video that do not count its tokens are refused")
    inputs = prompt(backbone.batch(ONE, "left"))
    length = inputs["input_ids"].shape[1]
    positions = torch.arange(length)[None] % (length - 3)  # they start over
    del inputs["attention_mask"]
    apart = any_model(**inputs, position_ids=positions).logits
    together = any_model(**inputs, position_ids=positions, packed_rows=False).logits
    assert not torch.allclose(apart, together, atol=1e-2)


def test_lookup_beside_a_cache_and_padding_is_refused(backbone, any_model):
    inputs = padded(prompt(backbone.batch(ONE, "left")))
    first = any_model.generate(**inputs, **GREEDY, return_dict_in_generate=True)
    inputs, cache = longer(inputs, first.sequences), first.past_key_values
    with pytest.raises(ValueError, match=r"`prompt_lookup_num_tokens` came .* hides padding"):
        any_model.generate(**without_vision(inputs), **GREEDY, past_key_values=cache, prompt_lookup_num_tokens=3)


@pytest.mark.parametrize(("rows", "ratio"), [([[6]], 0.5), (ONE, 0.0), (ONE, 0.5)], ids=["text", "whole", "pruned"])
def test_a_prompt_of_another_conversation_is_refused(backbone, any_model, rows, ratio):
    """Of a cache that lost nothing too, which native code would go on with."""
    inputs = prompt(backbone.batch(rows, "left"))
    first = any_model.generate(**inputs, **GREEDY, pruning_ratio=ratio, return_dict_in_generate=True)
    text = without_vision(longer(inputs, first.sequences))
    expected = any_model.generate(**text, past_key_values=copy.deepcopy(first.past_key_values), **GREEDY)
    assert expected.shape[1] == text["input_ids"].shape[1] + 4
    other = text | {"input_ids": text["input_ids"].clone()}
    other["input_ids"][:, -8] += 1  # of the answer
    with pytest.raises(ValueError, match="does not begin with the tokens"):
        any_model.generate(**other, past_key_values=copy.deepcopy(first.past_key_values), **GREEDY)
    short = {name: value[:, :4] for name, value in text.items()}
    with pytest.raises(ValueError, match="The prompt has 4 tokens, but"):
        any_model.generate(**short, past_key_values=first.past_key_values, **GREEDY)
