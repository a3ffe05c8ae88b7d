"""Options of `generate` from wherever transformers lets them be set, and what comes with the sequences."""

import sys
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, Molmo2ForConditionalGeneration, StaticCache
from transformers.cache_utils import StaticLayer

from stts_hf.benchmark.models import stock_twin
from tests.tiny import Part, Video, build_inputs, tiny_model
from tests.version_marks import since_transformers_5_23

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
ROWS: list[list[Part]] = [[3, Video(4), 5], [2, Video(2), 9]]


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.mark.parametrize("where", ["argument", "generation_config", "model_config"])
def test_a_ratio_counts_wherever_generate_is_told_of_it(model, where, monkeypatch):
    settings: dict[str, Any] = {
        "argument": {**GREEDY, "pruning_ratio": 0.9},
        "generation_config": {"generation_config": GenerationConfig(**GREEDY, pruning_ratio=0.9)},
        "model_config": GREEDY,
    }[where]
    if where == "model_config":
        monkeypatch.setattr(model, "generation_config", GenerationConfig(pruning_ratio=0.9))
    output = model.generate(**build_inputs(ROWS), **settings, return_dict_in_generate=True)
    expected = model(**build_inputs(ROWS), pruning_ratio=0.9)
    for found, mask in zip(output.keep_mask, expected.keep_mask, strict=True):
        assert torch.equal(found, mask)


@pytest.mark.parametrize("settings", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
def test_what_was_kept_comes_with_the_sequences(model, settings):
    inputs = build_inputs(ROWS)
    output = model.generate(**inputs, **GREEDY, **settings, pruning_ratio=0.5, return_dict_in_generate=True)
    expected = model(**inputs, pruning_ratio=0.5)
    assert torch.equal(output.kept_indices, expected.kept_indices)
    for name in ("keep_mask", "token_scores"):
        for found, video in zip(output[name], expected[name], strict=True):
            assert torch.equal(found, video)


def test_without_videos_all_was_kept(model):
    inputs = build_inputs([[3], [5]])
    output = model.generate(**inputs, **GREEDY, return_dict_in_generate=True)
    assert torch.equal(output.kept_indices, torch.arange(inputs["input_ids"].shape[1]).expand(2, -1))
    assert output.keep_mask is None
    assert output.token_scores is None


@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no_cache"])
def test_right_padded_text_is_stocks(model, use_cache):
    inputs = build_inputs([[9], [5]], padding_side="right")
    stock: Any = stock_twin(model)
    assert type(stock).__name__ == Molmo2ForConditionalGeneration.__name__
    settings = GREEDY | {"return_dict_in_generate": True, "output_logits": True, "use_cache": use_cache}
    for ours, theirs in zip(
        model.generate(**inputs, **settings).logits, stock.generate(**inputs, **settings).logits, strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)


def test_token_types_of_the_first_turn_are_enough_for_the_second(model):
    inputs = build_inputs(ROWS)
    first = model.generate(**inputs, **GREEDY, return_dict_in_generate=True)
    whole = torch.nn.functional.pad(first.sequences, (0, 3), value=7)
    again = {"input_ids": whole, "attention_mask": torch.nn.functional.pad(inputs["attention_mask"], (0, 9), value=1)}
    types = torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, 9))
    expected = model.generate(**(inputs | again | {"mm_token_type_ids": types}), **GREEDY)
    found = model.generate(
        **again, mm_token_type_ids=inputs["mm_token_type_ids"], past_key_values=first.past_key_values, **GREEDY
    )
    assert torch.equal(found, expected)
    assert torch.equal(model.generate(**(inputs | again), **GREEDY), expected)


@pytest.mark.parametrize("where", ["argument", "config"])
def test_a_limit_within_the_prompt_is_refused_in_the_callers_count(model, where):
    inputs = build_inputs(ROWS)
    length = inputs["input_ids"].shape[1]
    settings = {**GREEDY, "max_new_tokens": None, "max_length": 20}
    if where == "config":
        settings = {"generation_config": GenerationConfig(**settings)}
    with pytest.raises(ValueError, match=rf"`max_length` is 20, but the prompt alone has {length} tokens"):
        model.generate(**inputs, **settings)


def test_positions_of_the_caller_are_followed(model):
    inputs = build_inputs(ROWS)
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    expected = model.generate(**inputs, **GREEDY)
    # Only distances between positions count, so a shift of all of them changes nothing.
    assert torch.equal(model.generate(**inputs, **GREEDY, position_ids=positions + 100), expected)
    jump = positions + 50 * (positions > 12)
    assert not torch.equal(model.generate(**inputs, **GREEDY, position_ids=jump), expected)


def test_the_callers_generation_config_is_left_alone(model):
    inputs = build_inputs(ROWS[:1])
    config = GenerationConfig(**{**GREEDY, "max_new_tokens": None}, max_length=60, min_length=59)
    before = config.to_dict()
    own = model.generation_config.to_dict()
    model.generate(**inputs, generation_config=config)
    assert config.to_dict() == before
    assert model.generation_config.to_dict() == own


@pytest.mark.parametrize("way", ["cache_implementation", "past_key_values", "prefill_chunk_size"])
def test_what_older_transformers_decodes_wrongly_is_refused(model, monkeypatch, way):
    """Before 5.23 native Molmo2 prepares inputs as any model does, and forgets the bidirectional block there."""
    if "prepare_inputs_for_generation" in vars(Molmo2ForConditionalGeneration):
        monkeypatch.delattr(Molmo2ForConditionalGeneration, "prepare_inputs_for_generation")
    inputs = build_inputs(ROWS[:1])
    values = {
        "cache_implementation": "static",
        "past_key_values": StaticCache(model.config.text_config, max_cache_len=256),
        "prefill_chunk_size": 8,
    }
    with pytest.raises(ValueError, match=r"needs transformers 5\.23"):
        model.generate(**inputs, **GREEDY, **{way: values[way]})
    assert model.generate(**inputs, **GREEDY).shape[1] == inputs["input_ids"].shape[1] + 6


@since_transformers_5_23
def test_a_step_of_decoding_does_not_ask_how_long_the_cache_is(model, monkeypatch):
    """A static cache knows its length on the device alone."""
    inputs = build_inputs([[3, Video(2), 5]])
    asked: list[str] = []
    real = StaticLayer.get_seq_length

    def get_seq_length(layer):
        asked.append(sys._getframe(2).f_code.co_filename)  # who asked the cache, which asks its layer
        return real(layer)

    monkeypatch.setattr(StaticLayer, "get_seq_length", get_seq_length)
    model.generate(**inputs, **GREEDY, cache_implementation="static", disable_compile=True)
    assert asked
    assert sum(file.endswith("_stts.py") for file in asked) <= 2  # for the prompt, never for a token
