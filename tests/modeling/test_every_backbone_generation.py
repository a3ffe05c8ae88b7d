"""`generate` on every backbone: limits, streamers, candidates and rows, on prompts that lose tokens."""

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList

from tests.backbones import Clip, Picture, Rows, longer, prompt
from tests.version_marks import since_transformers_5_23

NEW_TOKENS = 4
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": None, "pad_token_id": 0}
ONE: Rows = [[3, Clip(4), 5]]
MIXED: Rows = [[2, Picture(), 2, Clip(3), 4], [2, Clip(2), 3]]


@pytest.fixture
def one(backbone):
    """A prompt with a video."""
    return prompt(backbone.batch(ONE, "left"))


@pytest.mark.parametrize("way", [{}, {"use_cache": False}, {"num_beams": 2}], ids=["greedy", "without-cache", "beams"])
@pytest.mark.parametrize("ratio", [0.0, 0.5])
@pytest.mark.parametrize("side", ["left", "right"])
def test_generate_continues_each_row_as_it_would_alone(backbone, any_model, side, ratio, way):
    inputs = prompt(backbone.batch(MIXED, side))
    together = any_model.generate(**inputs, **GREEDY, **way, pruning_ratio=ratio)
    assert torch.equal(together[:, :-4], inputs["input_ids"])
    for answer, row in zip(together[:, -4:], backbone.alone(MIXED), strict=True):
        assert torch.equal(answer, any_model.generate(**prompt(row), **GREEDY, **way, pruning_ratio=ratio)[0, -4:])


@since_transformers_5_23
@pytest.mark.parametrize("rows", [MIXED, [[2, Picture(), 3]], [[6], [4]]], ids=["mixed", "image", "text"])
def test_a_static_cache_gives_the_tokens_of_a_growing_one(backbone, any_model, rows):
    """Some text models then get a mask for each kind of their layers."""
    inputs = prompt(backbone.batch(rows, "left"))
    found = any_model.generate(**inputs, **GREEDY, cache_implementation="static", disable_compile=True)
    assert torch.equal(found, any_model.generate(**inputs, **GREEDY))


@pytest.mark.parametrize("where", ["argument", "generation_config", "model"])
def test_max_length_counts_the_whole_prompt(one, any_model, where):
    inputs = dict(one)
    limit = inputs["input_ids"].shape[1] + 3
    settings = {name: value for name, value in GREEDY.items() if name != "max_new_tokens"}
    before = any_model.generation_config
    try:
        if where == "argument":
            sequences = any_model.generate(**inputs, **settings, max_length=limit)
        elif where == "generation_config":
            sequences = any_model.generate(**inputs, generation_config=GenerationConfig(**settings, max_length=limit))
        else:
            any_model.generation_config = GenerationConfig(**settings, max_length=limit)
            sequences = any_model.generate(**inputs)
    finally:
        any_model.generation_config = before
    assert sequences.shape[1] == limit


def test_min_length_counts_the_whole_prompt(one, any_model):
    inputs = dict(one)
    length = inputs["input_ids"].shape[1]
    first = int(any_model.generate(**inputs, **GREEDY)[0, length])
    settings = GREEDY | {"eos_token_id": first}
    assert any_model.generate(**inputs, **settings).shape[1] == length + 1
    # As in transformers, an end is forbidden while the text so far is shorter.
    assert any_model.generate(**inputs, **settings, min_length=length).shape[1] == length + 1
    assert any_model.generate(**inputs, **settings, min_length=length + 1).shape[1] > length + 1
    assert any_model.generate(**inputs, **settings, min_length=length + 3).shape[1] > length + 3


def test_the_callers_inputs_are_left_alone(backbone, any_model):
    inputs = prompt(backbone.batch(MIXED, "left"))
    before = {name: value.clone() for name, value in inputs.items()}
    any_model.generate(**inputs, **GREEDY)
    assert all(torch.equal(inputs[name], value) for name, value in before.items())


class Recorder:
    def __init__(self):
        self.values: list[torch.Tensor] = []
        self.ended = False

    def put(self, value):
        self.values.append(value)

    def end(self):
        self.ended = True


def test_a_streamer_gets_the_whole_prompt_and_then_each_token(one, any_model):
    inputs = dict(one)
    streamer = Recorder()
    sequences = any_model.generate(**inputs, **GREEDY, streamer=streamer)
    assert torch.equal(streamer.values[0], inputs["input_ids"])
    assert torch.equal(torch.cat(streamer.values[1:]), sequences[0, inputs["input_ids"].shape[1] :])
    assert streamer.ended


@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_lookup_gives_the_tokens_of_greedy_decoding(one, any_model, ratio):
    expected = any_model.generate(**one, **GREEDY, pruning_ratio=ratio)
    assert torch.equal(any_model.generate(**one, **GREEDY, pruning_ratio=ratio, prompt_lookup_num_tokens=5), expected)


def test_lookup_over_a_reused_cache(one, any_model):
    first = any_model.generate(**one, **GREEDY, prompt_lookup_num_tokens=5, return_dict_in_generate=True)
    turn = longer(one, first.sequences)
    expected = any_model.generate(**turn, **GREEDY)
    reused = {"input_ids": turn["input_ids"], "past_key_values": first.past_key_values}
    assert torch.equal(any_model.generate(**reused, **GREEDY, prompt_lookup_num_tokens=5), expected)


def test_an_assistant_gives_the_tokens_of_greedy_decoding(one, any_model, backbone):
    """The assistant sees the shortened prompt, without the videos' features: only its guesses are worse."""
    expected = any_model.generate(**one, **GREEDY)
    assistant = backbone.model(trained_scorer=False)
    assert torch.equal(any_model.generate(**one, **GREEDY, assistant_model=assistant), expected)


def test_a_right_padded_prompt_goes_on_over_its_cache(backbone, any_model):
    inputs = prompt(backbone.batch(MIXED, "right"))
    first = any_model.generate(**inputs, **GREEDY, return_dict_in_generate=True)
    turn = longer(inputs, first.sequences)
    over_the_cache = {"attention_mask": turn["attention_mask"], "past_key_values": first.past_key_values}
    expected = any_model.generate(**turn, **GREEDY)
    assert torch.equal(any_model.generate(turn["input_ids"], **over_the_cache, **GREEDY), expected)


def test_options_of_generate_by_their_place(one, any_model):
    """As in transformers: `generate(inputs, generation_config, logits_processor)`."""
    calls = []

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        calls.append(ids.shape)
        return scores

    rest = {name: value for name, value in one.items() if name != "input_ids"}
    config, processors = GenerationConfig(**GREEDY), LogitsProcessorList([processor])
    found = any_model.generate(one["input_ids"], config, processors, **rest, pruning_ratio=0.3)
    assert len(calls) == NEW_TOKENS
    assert torch.equal(found, any_model.generate(**one, **GREEDY, pruning_ratio=0.3))
    with pytest.raises(TypeError, match="`logits_processor`"):
        any_model.generate(one["input_ids"], config, processors, logits_processor=processors, **rest)


@pytest.mark.parametrize("way", ["forward", "head", "generate", "get_video_features"])
@pytest.mark.parametrize(
    ("name", "meant"),
    [("prunning_ratio", "pruning_ratio"), ("pruned_lenght", "pruned_length"), ("selector", "config")],
)
def test_near_misses_of_our_arguments(one, any_model, way, name, meant):
    calls = {"forward": any_model.model, "head": any_model, "generate": any_model.generate}
    inputs = one
    if way == "get_video_features":
        inputs = {given: one[given] for given in any_model.model.video_inputs if given in one}
    call = calls.get(way, any_model.model.get_video_features)
    with pytest.raises(ValueError, match=rf"`{name}` .*{meant}"):
        call(**inputs, **{name: 0.9})
    if way == "generate":
        with pytest.raises(ValueError, match=rf"`{name}` .*{meant}"):
            call(**inputs, generation_config=GenerationConfig(**{name: 0.9}))


def test_embeddings_beside_grids_without_pixels(backbone, one, any_model):
    """As stock takes them: grids without pixels say nothing."""
    if not any_model.model.num_axes:
        pytest.skip("no position depends on a grid")
    inputs = {"inputs_embeds": any_model.get_input_embeddings()(one["input_ids"])}
    inputs |= {name: one[name] for name in ("attention_mask", "video_grid_thw")}
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 3, "eos_token_id": None, "pad_token_id": 0}
    expected = backbone.stock(any_model).generate(**inputs, **settings)
    assert torch.equal(any_model.generate(**inputs, **settings), expected)


def test_arguments_of_ours_have_no_place(one, any_model):
    with pytest.raises(TypeError):
        any_model.model.get_video_features(*[one.get(name) for name in any_model.model.video_inputs], 0.5, False)
