"""`generate` on every backbone: decoding methods on prompts that lose tokens, against the naive construction, which
computes everything anew at each step, and against stock; limits, streamers and candidates.
"""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList

from tests.backbones import Backbone, Clip, Inputs, Picture, Rows, daily, longer, prompt, with_compact
from tests.version_marks import since_transformers_5_23

NEW_TOKENS = 4
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": None, "pad_token_id": 0}
ONE: Rows = [[3, Clip(4), 5]]
PADDED: Rows = [[3, Clip(4), 5], [2, Clip(1), 9], [6]]
MIXED: Rows = [[2, Picture(), 2, Clip(3), 4], [2, Clip(2), 3]]
TEXT: Rows = [[9], [5]]


@pytest.fixture
def one(backbone):
    """A prompt with a video."""
    return prompt(backbone.batch(ONE, "left"))


def next_scores(backbone: Backbone, model: Any, row: Inputs, ids: torch.Tensor, ratio: float | None) -> torch.Tensor:
    """Logits (vocabulary,) of the token after `ids` (1, L), a sample and what was said so far."""
    types = torch.nn.functional.pad(row["mm_token_type_ids"], (0, ids.shape[1] - row["input_ids"].shape[1]))
    return backbone.naive(model, row | {"input_ids": ids, "mm_token_type_ids": types}, ratio).logits[-1]


def naive_answers(backbone: Backbone, model: Any, rows: Rows, ratio: float) -> torch.Tensor:
    """Greedy answers (B, new tokens)."""
    answers = []
    for row in map(prompt, backbone.alone(rows)):
        ids = row["input_ids"]
        for _ in range(NEW_TOKENS):
            ids = torch.cat([ids, next_scores(backbone, model, row, ids, ratio).argmax().view(1, 1)], dim=-1)
        answers.append(ids[:, -NEW_TOKENS:])
    return torch.cat(answers)


@with_compact
@pytest.mark.parametrize("rows", [PADDED, MIXED], ids=["padded", "mixed"])
@torch.no_grad()
def test_greedy_answers_are_the_naive_ones(backbone, any_model, rows):
    for ratio in (0.0, 0.5, 1.0):
        expected = naive_answers(backbone, any_model, rows, ratio)
        for side in ("left", "right"):
            inputs = prompt(backbone.batch(rows, side))
            found = any_model.generate(**inputs, **GREEDY, pruning_ratio=ratio)
            assert torch.equal(found, torch.cat([inputs["input_ids"], expected], dim=-1))


@daily
@torch.no_grad()
def test_samples_are_drawn_from_the_naive_scores(backbone, any_model, one):
    settings = GREEDY | {"do_sample": True, "top_k": 0, "temperature": 0.7, "num_return_sequences": 3}
    torch.manual_seed(5)
    sequences = any_model.generate(**one, **settings)
    torch.manual_seed(5)
    expected = one["input_ids"].repeat(3, 1)
    for _ in range(NEW_TOKENS):
        scores = torch.stack([next_scores(backbone, any_model, one, ids[None], None) for ids in expected])
        drawn = torch.multinomial((scores / 0.7).softmax(-1), num_samples=1)
        expected = torch.cat([expected, drawn], dim=-1)
    assert torch.equal(sequences, expected)
    assert len(set(map(tuple, sequences.tolist()))) > 1


@daily
def test_beams_continue_each_row_as_they_would_alone(backbone, any_model):
    found = any_model.generate(**prompt(backbone.batch(MIXED, "right")), **GREEDY, num_beams=2)[:, -NEW_TOKENS:]
    for answer, row in zip(found, backbone.alone(MIXED), strict=True):
        assert torch.equal(answer, any_model.generate(**prompt(row), **GREEDY, num_beams=2)[0, -NEW_TOKENS:])


WAYS = {
    "without-cache": {"use_cache": False},
    "own-cache": {"past_key_values": DynamicCache},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "chunks-that-would-split-a-video": {"prefill_chunk_size": 7},
    "chunks-within-the-text": {"prefill_chunk_size": 31},
}
NEEDS = {name: () if "cache" in name else since_transformers_5_23 for name in WAYS}


@with_compact
@pytest.mark.parametrize("way", [pytest.param(WAYS[way], marks=NEEDS[way], id=way) for way in WAYS])
def test_every_way_of_caching_gives_the_same_tokens(backbone, any_model, way):
    """Where token types are left out, vision tokens are causal, as in stock Molmo2; other models need them."""
    (row,) = map(prompt, backbone.alone([[3, Clip(4), 25]]))
    prompts = [prompt(backbone.batch(rows, "left")) for rows in (MIXED, [[2, Picture(), 3]], TEXT)]
    prompts += [row, {name: value for name, value in row.items() if name != "attention_mask"}]
    if not any_model.model.vision_is_causal:
        prompts.append({name: value for name, value in row.items() if name != "mm_token_type_ids"})
    for inputs in prompts:
        expected = any_model.generate(**inputs, **GREEDY)
        settings = {name: value() if isinstance(value, type) else value for name, value in way.items()}
        assert torch.equal(any_model.generate(**inputs, **GREEDY, **settings), expected)


STOCKS = {"greedy": {}, "beams": {"num_beams": 3, "num_return_sequences": 2}, "without-cache": {"use_cache": False}}


@pytest.mark.parametrize("way", STOCKS.values(), ids=STOCKS.keys())
def test_without_pruning_all_tokens_are_stocks(backbone, way):
    model = backbone.model(pruning_ratio=0.0, trained_scorer=False)
    stock = backbone.stock(model)
    for rows in (TEXT, [[2, Picture(), 4], [6]], [[2, Clip(3), 4], [2, Clip(2), 4]]):
        inputs = prompt(backbone.batch(rows, "left"))
        expected = stock.generate(**inputs, **GREEDY, **way)
        assert torch.equal(model.generate(**inputs, **GREEDY, **way), expected)


@daily
def test_the_mask_of_padding_is_inferred_as_stock_does(backbone):
    model = backbone.model(pruning_ratio=0.0, trained_scorer=False)
    inputs = prompt(backbone.batch([[2, Clip(3), 4], [2, Clip(2), 4]], "left"))
    assert not inputs.pop("attention_mask").all()
    for end in (None, 1, [1, 2], 0):
        settings = GREEDY | {"eos_token_id": end}
        assert torch.equal(model.generate(**inputs, **settings), backbone.stock(model).generate(**inputs, **settings))


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


@daily
def test_lookup_gives_the_tokens_of_greedy_decoding(backbone, any_model):
    """The prompt that holds its answer already is where lookup saves steps. Stock's lookup fails for some videos."""
    turn = prompt(backbone.batch([[4, Clip(3), 6]], "left"))
    again = longer(turn, any_model.generate(**turn, **GREEDY))
    again["input_ids"][:, -3:] = turn["input_ids"][:, -3:]
    for inputs in (again, *(prompt(backbone.batch(rows, "left")) for rows in (ONE, [[2, Picture(), 6]], [[10]]))):
        for ratio in (0.5, 1.0):
            expected = any_model.generate(**inputs, **GREEDY, pruning_ratio=ratio)
            found = any_model.generate(**inputs, **GREEDY, pruning_ratio=ratio, prompt_lookup_num_tokens=5)
            assert torch.equal(found, expected)


def test_lookup_over_a_reused_cache(one, any_model):
    first = any_model.generate(**one, **GREEDY, prompt_lookup_num_tokens=5, return_dict_in_generate=True)
    turn = longer(one, first.sequences)
    expected = any_model.generate(**turn, **GREEDY)
    reused = {"input_ids": turn["input_ids"], "past_key_values": first.past_key_values}
    assert torch.equal(any_model.generate(**reused, **GREEDY, prompt_lookup_num_tokens=5), expected)


@daily
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
    with pytest.raises(TypeError, match="logits_processor"):
        any_model.generate(one["input_ids"], config, processors, logits_processor=processors, **rest)


@pytest.mark.parametrize("way", ["forward", "head", "generate", "get_video_features"])
@pytest.mark.parametrize(
    ("name", "meant"),
    [("prunning_ratio", "pruning_ratio"), ("pruned_lenght", "pruned_length"), ("selector", "config")],
)
def test_near_misses_of_our_arguments(one, any_model, way, name, meant, monkeypatch):
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
        monkeypatch.setattr(any_model, "generation_config", GenerationConfig(**{name: 0.9}))
        if name == "selector":  # `from_pretrained` puts it there
            call(**inputs, max_new_tokens=1)
            return
        with pytest.raises(ValueError, match=rf"`{name}` .*{meant}"):
            call(**inputs)


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
