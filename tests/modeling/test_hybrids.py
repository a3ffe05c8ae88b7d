"""
Text models most of whose layers are recurrent. Dropping changes the recurrence itself, so what is left of a row must
give what the stock model gives for the shortened sequence alone, whatever lies beside it and wherever a cache begins.
"""

import copy
import inspect
import itertools
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

from stts_hf.modeling.cache_stts import CacheRecord
from stts_hf.modeling.mrope_stts import MropeBackbone
from tests.backbones import HYBRID_MIXTURES, HYBRIDS, Clip, Inputs, Picture, Rows, longer, prompt, without_vision
from tests.modeling.reference import as_float64, assert_gradients_equal, gradients, kept_of_row, logits_of_row
from tests.modeling.test_no_waiting import WAITING, Recorder
from tests.version_marks import since_transformers_5_23

ROWS: Rows = [[3, Clip(4), 5], [2, Clip(3), 3, Clip(2), 9], [6]]
MIXED: Rows = [[2, Picture(), 2, Clip(3), 4], [2, Clip(2), 3, Picture(), 3], [7]]
ONE: Rows = [[3, Clip(4), 5]]
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 4, "eos_token_id": None, "pad_token_id": 0}
EXACT: dict[str, Any] = {"atol": 1e-12, "rtol": 0}  # in float64
KINDS: dict[str, Any] = {
    "dynamic": DynamicCache,
    "static": lambda config: StaticCache(config=config, max_cache_len=200),
}


MIXTURES = [pytest.param(backbone, marks=pytest.mark.slow) for backbone in HYBRID_MIXTURES]


@pytest.fixture(scope="module", params=[*HYBRIDS, *MIXTURES], ids=lambda backbone: backbone.name)
def backbone(request) -> Any:
    return request.param


def new_cache(model: Any, kind: str = "dynamic") -> Any:
    return KINDS[kind](config=model.config.get_text_config())


@pytest.mark.parametrize("rows", [ROWS, MIXED], ids=["videos", "mixed"])
def test_ratio_0_is_stock(backbone, rows):
    model = backbone.model(pruning_ratio=0.0, trained_scorer=False)
    stock, inputs = backbone.stock(model), backbone.batch(rows, "right")
    ours, theirs = model(**inputs), stock(**inputs)
    real = inputs["attention_mask"].bool()
    assert torch.equal(ours.logits[real], theirs.logits[real])
    torch.testing.assert_close(ours.task_loss, theirs.loss, atol=1e-6, rtol=0)
    assert_gradients_equal(gradients(model, ours.task_loss), gradients(stock, theirs.loss), backbone.stock_rounding)


@pytest.mark.slow
@pytest.mark.parametrize("way", [{}, {"num_beams": 3}, {"use_cache": False}], ids=["greedy", "beams", "without-cache"])
def test_without_pruning_all_tokens_are_stocks(backbone, way):
    model = backbone.model(pruning_ratio=0.0, trained_scorer=False)
    inputs = prompt(backbone.batch([[2, Clip(3), 4, Picture(), 3], [2, Clip(2), Clip(1), 9], [7]], "left"))
    expected = backbone.stock(model).generate(**inputs, **GREEDY, **way)
    assert torch.equal(model.generate(**inputs, **GREEDY, **way), expected)


@pytest.mark.parametrize("rows", [[[9], [14]], [[2, Picture(), 4], [6]]], ids=["text", "images"])
def test_text_and_images_alone_are_stocks_to_the_bit_whatever_the_ratio(backbone, any_model, rows):
    stock, inputs = backbone.stock(any_model), backbone.batch(rows, "left")
    ours, theirs = any_model(**inputs), stock(**inputs)
    assert torch.equal(ours.logits, theirs.logits)
    assert torch.equal(ours.loss, theirs.loss)


@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize("rows", [ROWS, MIXED], ids=["videos", "mixed"])
def test_a_batch_equals_stock_on_its_shortened_rows(backbone, float64_model, rows, padding_side):
    """
    2e-14 was measured. In float32 both are 2e-5 off (logits of size 4), stock too: recurrent layers multiply rounding.
    """
    inputs, alone = as_float64(backbone.batch(rows, padding_side)), list(map(as_float64, backbone.alone(rows)))
    for ratio in (0.3, 0.5, 0.9):
        outputs = float64_model(**inputs, pruning_ratio=ratio)
        expected = [backbone.naive(float64_model, row, ratio) for row in alone]
        with torch.no_grad():
            fixed = float64_model(**inputs, pruning_ratio=ratio, pruned_length=inputs["input_ids"].shape[1] + 3)
        for index, row in enumerate(expected):
            for found in (outputs, fixed):
                assert kept_of_row(found, inputs, index) == row.kept
                torch.testing.assert_close(logits_of_row(found, inputs, index), row.logits, **EXACT)
    task_loss = torch.cat([row.task_losses for row in expected]).mean()
    assert_gradients_equal(gradients(float64_model, outputs.task_loss), gradients(float64_model, task_loss), 1e-12)


@torch.no_grad()
def test_the_comparison_notices_one_token_of_filler_between_others(backbone, any_model):
    """Although it is masked."""
    (row,) = backbone.alone([[9]])
    gap = {"input_ids": row["input_ids"], "attention_mask": row["attention_mask"].clone()}
    gap["attention_mask"][:, 4] = 0
    without = {name: torch.cat([value[:, :4], value[:, 5:]], dim=-1) for name, value in gap.items()}
    positions = gap["attention_mask"].cumsum(-1) - 1
    found = any_model(**gap, position_ids=positions, use_cache=False, packed_rows=False).logits[:, -1]
    assert (found - any_model(**without).logits[:, -1]).abs().max() > 1e-2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padding_side", ["left", "right"])
@torch.no_grad()
def test_steps_over_a_cache_equal_recomputing(backbone, float64_model, padding_side, kind):
    inputs = as_float64(prompt(backbone.batch(ROWS, padding_side)))
    text = torch.randint(1, 500, (len(ROWS), 4), generator=torch.Generator().manual_seed(1))
    whole = longer(inputs, inputs["input_ids"], 4) | {"input_ids": torch.cat([inputs["input_ids"], text], dim=-1)}
    for ratio, steps in ((0.0, [2, 1, 1]), (0.5, [1, 1, 2]), (0.9, [4])):
        alone = [
            float64_model(
                **(
                    row | longer(row, row["input_ids"], 4) | {"input_ids": torch.cat([row["input_ids"], new[None]], -1)}
                ),
                pruning_ratio=ratio,
            ).logits[:, -4:]
            for row, new in zip(map(as_float64, map(prompt, backbone.alone(ROWS))), text, strict=True)
        ]
        cache, done = (
            float64_model(
                **inputs, pruning_ratio=ratio, past_key_values=new_cache(float64_model, kind)
            ).past_key_values,
            0,
        )
        for count in steps:
            mask = whole["attention_mask"][:, : inputs["input_ids"].shape[1] + done + count]
            found = float64_model(input_ids=text[:, done : done + count], attention_mask=mask, past_key_values=cache)
            torch.testing.assert_close(found.logits, torch.cat(alone)[:, done : done + count], **EXACT)
            done += count


@pytest.mark.parametrize("rows", [ROWS, MIXED], ids=["videos", "mixed"])
@pytest.mark.parametrize("form", ["dynamic", "static", pytest.param("in-chunks", marks=since_transformers_5_23)])
def test_turns_over_the_cache_equal_recomputing(backbone, any_model, rows, form):
    inputs = prompt(backbone.batch(rows, "left"))
    cache = new_cache(any_model, "static" if form == "static" else "dynamic")
    options = {"disable_compile": True} if form == "static" else {}
    chunks = {"prefill_chunk_size": 3} if form == "in-chunks" else {}
    said = any_model.generate(**inputs, **GREEDY, past_key_values=cache, pruning_ratio=0.5, **options)
    assert torch.equal(said, any_model.generate(**inputs, **GREEDY, pruning_ratio=0.5, use_cache=False))
    for turn_number in range(2):
        turn = longer(inputs, said, seed=turn_number)
        expected = any_model.generate(**turn, **GREEDY, pruning_ratio=0.5)
        found = any_model.generate(**without_vision(turn), **GREEDY, past_key_values=cache, **options, **chunks)
        assert torch.equal(found, expected)
        said = expected


def test_beams_and_samples_equal_those_of_recomputing(backbone, any_model):
    inputs = prompt(backbone.batch(ROWS, "left"))
    for options in ({"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}):
        found = []
        for use_cache in (True, False):
            torch.manual_seed(0)
            found.append(any_model.generate(**inputs, **(GREEDY | options), pruning_ratio=0.5, use_cache=use_cache))
        assert torch.equal(*found)


@torch.no_grad()
def test_rows_and_copies_of_a_cache(backbone, float64_model):
    inputs = as_float64(prompt(backbone.batch([[3, Clip(3), 4], [2, Clip(2), 3]], "left")))
    cache = float64_model(**inputs, pruning_ratio=0.5, use_cache=True).past_key_values
    text, mask = torch.tensor([[7, 8], [7, 8]]), torch.nn.functional.pad(inputs["attention_mask"], (0, 2), value=1)
    expected = float64_model(input_ids=text, attention_mask=mask, past_key_values=copy.deepcopy(cache)).logits
    moved = copy.deepcopy(cache)
    moved.reorder_cache(torch.tensor([1, 0]))
    found = float64_model(input_ids=text, attention_mask=mask[[1, 0]], past_key_values=moved).logits
    torch.testing.assert_close(found, expected[[1, 0]], **EXACT)
    again = float64_model(input_ids=text, attention_mask=mask, past_key_values=cache).logits
    torch.testing.assert_close(again, expected, **EXACT)


# What a state cannot do.


def test_packed_rows_are_refused(backbone, any_model):
    inputs = backbone.pack(ROWS)
    with pytest.raises(ValueError, match=r"`position_ids` start over \(`packed_rows`\)"):
        any_model(**inputs)
    with pytest.raises(ValueError, match=r"`packed_rows`"):
        any_model(**{**inputs, "packed_rows": True})
    with pytest.raises(ValueError, match="`position_ids` start over"):
        any_model.generate(**prompt(inputs), **GREEDY)


@pytest.fixture
def kernels(backbone, any_model, monkeypatch) -> None:
    """In place of those that need a GPU: the native recurrence and convolution, one sample of a row after the other."""
    native: Any = inspect.getmodule(any_model.model.text_class)
    rule, convolve = native.torch_chunk_gated_delta_rule, native.causal_conv1d_fn

    def rule_of_samples(
        *tensors: Any, g: Any, beta: Any, cu_seqlens: Any = None, seq_idx: Any = None, **options: Any
    ) -> Any:
        if cu_seqlens is None:
            return rule(*tensors, g=g, beta=beta, **options)
        parts = [
            rule(*(tensor[:, start:end] for tensor in tensors), g=g[:, start:end], beta=beta[:, start:end], **options)
            for start, end in itertools.pairwise(cu_seqlens.tolist())
        ]
        return torch.cat([output for output, _ in parts], dim=1), None

    def convolve_samples(states: Any, *weights: Any, activation: str, seq_idx: Any = None, **_: Any) -> Any:
        lengths = states.shape[-1] if seq_idx is None else seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
        parts = [convolve(part, *weights, activation=activation) for part in states.split(lengths, dim=-1)]
        return torch.cat(parts, dim=-1)

    monkeypatch.setattr(native, "torch_chunk_gated_delta_rule", rule_of_samples)
    monkeypatch.setattr(native, "causal_conv1d_fn", convolve_samples)
    monkeypatch.setattr(type(any_model.model), "refuses_packed_rows", None)


def test_with_kernels_a_call_takes_one_packed_row(backbone, any_model, kernels):
    inputs = {name: torch.cat([value, value]) for name, value in backbone.pack(ROWS).items()}
    with pytest.raises(ValueError, match="take one such row a call, not 2"):
        any_model(**inputs)


@pytest.mark.parametrize("rows", [ROWS, MIXED], ids=["videos", "mixed"])
@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_with_kernels_packed_samples_are_separate_ones(backbone, float64_model, kernels, rows, ratio):
    """The kernels themselves are tried by `make gpu`."""
    packed, alone = as_float64(backbone.pack(rows)), list(map(as_float64, backbone.alone(rows)))
    outputs = float64_model(**packed, pruning_ratio=ratio)
    expected = [backbone.naive(float64_model, row, ratio) for row in alone]
    torch.testing.assert_close(outputs.logits[0], torch.cat([row.logits for row in expected]), **EXACT)
    task_loss = torch.cat([row.task_losses for row in expected]).mean()
    assert_gradients_equal(gradients(float64_model, outputs.task_loss), gradients(float64_model, task_loss), 1e-12)


def first_turn(backbone: Any, model: Any) -> tuple[Inputs, Any]:
    """The whole second turn of two rows, and the cache of the first."""
    inputs = prompt(backbone.batch([*ONE, *ONE], "left"))
    first = model.generate(**inputs, **GREEDY, pruning_ratio=0.5, return_dict_in_generate=True)
    return longer(inputs, first.sequences), first.past_key_values


@pytest.mark.parametrize(
    "hidden", [slice(-5, -3), slice(-7, -6)], ids=["filler-before-the-turn", "an-answer-that-ended"]
)
def test_hidden_tokens_behind_others_are_refused_and_leave_the_cache_usable(backbone, any_model, hidden):
    turn, cache = first_turn(backbone, any_model)
    expected = any_model.generate(**turn, **GREEDY, pruning_ratio=0.5)
    gap = without_vision(turn) | {"attention_mask": turn["attention_mask"].clone()}
    gap["attention_mask"][1, hidden] = 0
    with pytest.raises(ValueError, match="`attention_mask` hides tokens behind others"):
        any_model.generate(**gap, **GREEDY, past_key_values=cache)
    assert torch.equal(any_model.generate(**without_vision(turn), **GREEDY, past_key_values=cache), expected)


def test_steps_and_chunks_of_one_token_are_refused_too(backbone, any_model):
    inputs, cache = first_turn(backbone, any_model)
    record = CacheRecord.of(cache)
    assert record is not None
    mask = inputs["attention_mask"][:, : record.seen + 1].clone()
    mask[0, -3] = 0
    with pytest.raises(ValueError, match="`attention_mask` hides tokens behind others"):
        any_model(input_ids=torch.full((len(mask), 1), 9), attention_mask=mask, past_key_values=cache)
    text = prompt(backbone.batch([[9], [5]], "right"))
    with pytest.raises(ValueError, match="`attention_mask` hides tokens behind others"):
        any_model.generate(**text, **GREEDY, prefill_chunk_size=1)


def test_text_padded_on_the_right_leaves_no_cache(backbone, any_model):
    inputs = prompt(backbone.batch([[9], [5]], "right"))
    assert any_model(**inputs).past_key_values is None
    with pytest.raises(ValueError, match="`attention_mask` hides tokens behind others"):
        any_model.generate(**inputs, **GREEDY)


def test_in_training_no_mask_is_read_back_and_only_a_cache_that_is_asked_for_is_left(backbone, monkeypatch):
    """`Trainer` asks for none. Native layers read the mask themselves, as those of other backbones do."""
    model, inputs = backbone.model().train(), backbone.batch([[9], [5]], "right")
    outputs = model(**backbone.batch(ROWS, "right"))
    assert outputs.past_key_values is None
    assert model(**backbone.batch([[9], [5]], "left"), use_cache=True).past_key_values.get_seq_length() == 9
    monkeypatch.setattr(MropeBackbone, "native_forward", lambda self, **arguments: arguments)
    ours = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    for train in (True, False):
        with Recorder() as recorder:
            assert model.train(train).model.native_forward(**ours)["use_cache"] is False
        assert bool(recorder.seen & WAITING) is not train


@pytest.mark.parametrize("video", [True, False], ids=["video", "text"])
def test_a_cache_of_other_layers_is_refused(backbone, any_model, video):
    inputs = prompt(backbone.batch(ONE if video else [[9]], "left"))
    with pytest.raises(ValueError, match="`past_key_values` has no recurrent layers"):
        any_model(**inputs, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="`past_key_values` has no recurrent layers"):
        any_model.generate(**inputs, **GREEDY, past_key_values=DynamicCache())


def test_a_cropped_cache_is_refused(backbone, any_model):
    turn, cache = first_turn(backbone, any_model)
    cache.activate_past_recording()
    with torch.no_grad():
        any_model(input_ids=torch.tensor([[7, 8]] * 2), past_key_values=cache)
    cache.crop(-2)
    with pytest.raises(ValueError, match="`past_key_values` cannot be used again: it was cropped"):
        any_model.generate(**without_vision(turn), **GREEDY, past_key_values=cache)
    cache.reset()
    assert CacheRecord.of(cache) is None


@pytest.mark.parametrize(
    "options", [{"prompt_lookup_num_tokens": 2}, {"assistant_model": None}], ids=["lookup", "assistant"]
)
def test_decoding_with_candidates_is_refused(backbone, any_model, options):
    options = {name: any_model if value is None else value for name, value in options.items()}
    inputs = prompt(backbone.batch(ONE, "left"))
    with pytest.raises(ValueError, match="not supported with stateful models"):
        any_model.generate(**inputs, **GREEDY, pruning_ratio=0.5, **options)
