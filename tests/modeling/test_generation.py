"""Every decoding method, on prompts that lose tokens, against a loop that recomputes everything at each step."""

import sys
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, Molmo2ForConditionalGeneration, StaticCache
from transformers.cache_utils import StaticLayer

from stts_hf.modeling.vision_tokens_stts import features_of_rows
from tests.modeling.reference import Inputs, one_by_one, returned_by
from tests.tiny import Image, Part, Video, build_inputs, tiny_config, tiny_model
from tests.version_marks import since_transformers_5_23

NEW_TOKENS = 8
PROMPTS: dict[str, list[list[Part]]] = {
    "one_video": [[3, Video(4), 5]],
    "different_lengths": [[3, Video(4), 5], [2, Video(2), 9], [6]],
    "images_and_videos": [[2, Image(), 2, Video(3), 4], [2, Video(2), 3], [2, Image((1, 1)), 3]],
    "single_frame": [[3, Video(1), 4]],
}
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(scope="module", params=["original", "compact"])
def model(request):
    return tiny_model(tiny_config(model_overrides={"pruned_position_ids": request.param}))


def next_scores(model, inputs: Inputs, prompt: torch.Tensor, pruning_ratio: float | None = None) -> torch.Tensor:
    """Scores (1, vocabulary) of the token after `prompt` (1, L), the text so far, with everything computed anew."""
    added = prompt.shape[1] - inputs["input_ids"].shape[1]
    longer = inputs | {
        "input_ids": prompt,
        "attention_mask": torch.ones_like(prompt),
        "mm_token_type_ids": torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, added)),
    }
    return model(**longer, pruning_ratio=pruning_ratio, use_cache=False).logits[:, -1]


@torch.no_grad()
def recompute(model, inputs: Inputs, pruning_ratio: float | None = None, steps: int = NEW_TOKENS) -> torch.Tensor:
    """Greedy answer (1, steps) to a single row."""
    prompt = inputs["input_ids"]
    for _ in range(steps):
        best = next_scores(model, inputs, prompt, pruning_ratio).argmax(-1, keepdim=True)
        prompt = torch.cat([prompt, best], dim=-1)
    return prompt[:, -steps:]


def expected_sequences(model, inputs: Inputs, rows: list[list[Part]], pruning_ratio: float | None = None):
    """The caller's whole prompt, then each row's greedy answer."""
    answers = [recompute(model, row, pruning_ratio) for row in one_by_one(inputs, rows)]
    return torch.cat([inputs["input_ids"], torch.cat(answers)], dim=-1)


@pytest.mark.parametrize("rows", PROMPTS.values(), ids=PROMPTS.keys())
@pytest.mark.parametrize("pruning_ratio", [None, 0.0, 0.3, 1.0])
def test_greedy_equals_recomputing(model, rows, pruning_ratio):
    inputs = build_inputs(rows)
    sequences = model.generate(**inputs, **GREEDY, pruning_ratio=pruning_ratio)
    assert torch.equal(sequences, expected_sequences(model, inputs, rows, pruning_ratio))


@pytest.mark.parametrize("rows", ["one_video", "different_lengths"])
def test_features_of_rows_are_not_searched_for(model, rows, monkeypatch):
    """They follow each other, and how many each row has is known without looking."""
    pruned = returned_by(model.model, "prune", monkeypatch)
    model.generate(**build_inputs(PROMPTS[rows]), **GREEDY, pruning_ratio=0.5)
    known = features_of_rows(pruned[0])
    assert sum(map(len, known)) == len(pruned[0].features[0][1])
    assert known[0].untyped_storage().data_ptr() == pruned[0].features[0][1].untyped_storage().data_ptr()
    pruned[0].features_per_row = None
    for found, expected in zip(features_of_rows(pruned[0]), known, strict=True):
        assert torch.equal(found, expected)


WAYS: dict[str, dict[str, Any]] = {
    "without_cache": {"use_cache": False},
    "static_cache": {"cache_implementation": "static", "disable_compile": True},
    "own_cache": {"past_key_values": DynamicCache},
    "chunks_that_would_split_a_video": {"prefill_chunk_size": 7},
    "chunks_within_the_text": {"prefill_chunk_size": 31},
}
NEEDS = dict.fromkeys(
    ["static_cache", "chunks_that_would_split_a_video", "chunks_within_the_text"], since_transformers_5_23
)


@pytest.mark.parametrize("left_out", ["nothing", "mm_token_type_ids", "attention_mask"])
@pytest.mark.parametrize("way", [pytest.param(WAYS[way], marks=NEEDS.get(way, ()), id=way) for way in WAYS])
@pytest.mark.parametrize("rows", [[[3, Video(4), 25]], [[2, Image(), Video(2), 4], [3, Video(4), 53]]], ids=["1", "2"])
def test_every_way_of_caching_gives_the_tokens_of_recomputing(model, rows, way, left_out):
    inputs = build_inputs(rows)
    expected = expected_sequences(model, inputs, rows)
    if left_out == "attention_mask":
        assert inputs.pop("attention_mask").all()
    elif left_out == "mm_token_type_ids":  # then vision tokens are causal, as in stock Molmo2
        expected = model.generate(**inputs, **GREEDY)
    arguments = {name: value() if isinstance(value, type) else value for name, value in way.items()}
    assert torch.equal(model.generate(**inputs, **GREEDY, **arguments), expected)


def test_one_beam_of_many_scores_at_least_as_well_as_greedy(model):
    inputs = build_inputs(PROMPTS["one_video"])
    greedy = model.generate(**inputs, **GREEDY, return_dict_in_generate=True, output_logits=True)
    chosen = greedy.sequences[:, -NEW_TOKENS:]
    steps = torch.stack(greedy.logits, dim=1).log_softmax(-1)
    score = steps.gather(-1, chosen[..., None]).sum()
    beams = model.generate(**inputs, **GREEDY, num_beams=4, return_dict_in_generate=True, output_scores=True)
    # Beam search divides by the number of new tokens to the power of `length_penalty` = 1.
    assert float(beams.sequences_scores[0]) * NEW_TOKENS >= float(score) - 1e-4


@pytest.mark.parametrize("copies", [1, 3])
def test_sampling_equals_drawing_from_recomputed_scores(model, copies):
    inputs = build_inputs(PROMPTS["one_video"])
    settings = GREEDY | {"do_sample": True, "top_k": 0, "temperature": 0.7}
    torch.manual_seed(5)
    sequences = model.generate(**inputs, **settings, num_return_sequences=copies)
    torch.manual_seed(5)
    prompts = inputs["input_ids"].repeat(copies, 1)
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            scores = torch.cat([next_scores(model, inputs, prompt[None]) for prompt in prompts])
            drawn = torch.multinomial((scores / 0.7).softmax(-1), num_samples=1)
            prompts = torch.cat([prompts, drawn], dim=-1)
    assert torch.equal(sequences, prompts)


def test_positions_of_the_caller_are_followed(model):
    inputs = build_inputs(PROMPTS["different_lengths"])
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    expected = model.generate(**inputs, **GREEDY)
    # Only distances between positions count, so a shift of all of them changes nothing.
    assert torch.equal(model.generate(**inputs, **GREEDY, position_ids=positions + 100), expected)
    jump = positions + 50 * (positions > 12)
    assert not torch.equal(model.generate(**inputs, **GREEDY, position_ids=jump), expected)


def test_the_callers_generation_config_is_left_alone(model):
    inputs = build_inputs(PROMPTS["one_video"])
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
    inputs = build_inputs(PROMPTS["one_video"])
    values = {
        "cache_implementation": "static",
        "past_key_values": StaticCache(model.config.text_config, max_cache_len=256),
        "prefill_chunk_size": 8,
    }
    with pytest.raises(ValueError, match=r"needs transformers 5\.23"):
        model.generate(**inputs, **GREEDY, **{way: values[way]})
    assert model.generate(**inputs, **GREEDY).shape[1] == inputs["input_ids"].shape[1] + NEW_TOKENS


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
    model.generate(**inputs, **GREEDY | {"max_new_tokens": 8}, cache_implementation="static", disable_compile=True)
    assert asked
    assert sum(file.endswith("_stts.py") for file in asked) <= 2  # for the prompt, never for a token
