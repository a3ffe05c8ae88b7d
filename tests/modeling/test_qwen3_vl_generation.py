"""Every decoding method, on prompts that lose tokens, against a loop that recomputes everything at each step."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

from tests.backbones import longer, without_vision
from tests.naive_qwen3_vl import naive_forward
from tests.tiny_qwen3_vl import Image, Inputs, Part, Video, batch, samples, text_of, tiny_model
from tests.version_marks import since_transformers_5_23

NEW_TOKENS = 5
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": None, "pad_token_id": 0}
PROMPTS: dict[str, list[list[Part]]] = {
    "one-video": [[3, Video(4), 5]],
    "different-lengths": [[3, Video(4), 5], [2, Video(2, 3, 2), 9], [6]],
    "images-and-videos": [[2, Image(), 2, Video(3), 4, Video(2, 1, 3), 2], [2, Video(2), 3], [2, Image(1, 2), 3]],
}


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@torch.no_grad()
def recompute(model, row: Inputs, ratio: float, steps: int = NEW_TOKENS) -> torch.Tensor:
    """Greedy answer (1, steps) to one sample, by the naive construction alone."""
    row = text_of(row)
    for _ in range(steps):
        best = naive_forward(model, row, ratio).logits[-1].argmax().view(1, 1)
        types = torch.nn.functional.pad(row["mm_token_type_ids"], (0, 1))
        row = row | {"input_ids": torch.cat([row["input_ids"], best], dim=-1), "mm_token_type_ids": types}
    return row["input_ids"][:, -steps:]


def expected_sequences(model, alone: list[Inputs], ratio: float) -> torch.Tensor:
    """The caller's whole prompt, then each row's greedy answer."""
    return torch.cat([batch(alone)["input_ids"], torch.cat([recompute(model, row, ratio) for row in alone])], dim=-1)


@pytest.mark.parametrize("rows", PROMPTS.values(), ids=PROMPTS.keys())
@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_greedy_equals_recomputing(model, rows, ratio):
    alone = samples(rows)
    sequences = model.generate(**text_of(batch(alone)), **GREEDY, pruning_ratio=ratio)
    assert torch.equal(sequences, expected_sequences(model, alone, ratio))


def test_sampled_copies_are_drawn_from_the_scores_of_the_whole_prompt(model):
    inputs = text_of(batch(samples(PROMPTS["one-video"])))
    settings = GREEDY | {"do_sample": True, "top_k": 0, "num_return_sequences": 3, "return_dict_in_generate": True}
    torch.manual_seed(5)
    out = model.generate(**inputs, **settings, output_logits=True)
    with torch.no_grad():
        expected = naive_forward(model, inputs).logits[-1]
    torch.testing.assert_close(out.logits[0], expected.expand(3, -1), atol=2e-5, rtol=0)
    assert len({tuple(row) for row in out.sequences.tolist()}) == 3


def test_positions_of_the_caller_are_followed(model):
    inputs = text_of(batch(samples(PROMPTS["images-and-videos"])))
    grids = (inputs["image_grid_thw"], inputs["video_grid_thw"], inputs["attention_mask"])
    axes, _ = model.model.get_rope_index(inputs["input_ids"], inputs["mm_token_type_ids"], *grids)
    expected = model.generate(**inputs, **GREEDY)
    assert torch.equal(model.generate(**inputs, **GREEDY, position_ids=axes), expected)
    order = (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0)[None]
    assert torch.equal(model.generate(**inputs, **GREEDY, position_ids=torch.cat([order, axes])), expected)


# Second turns.


@pytest.mark.parametrize("ratio", [0.0, 0.5])
@pytest.mark.parametrize(
    "form",
    [
        "whole-prompt",
        "new-tokens-and-whole-mask",
        "static",
        pytest.param("in-chunks", marks=since_transformers_5_23),
    ],
)
@pytest.mark.parametrize("rows", PROMPTS.values(), ids=PROMPTS.keys())
def test_second_and_third_turns_over_the_cache_equal_recomputing(model, rows, ratio, form):
    inputs = text_of(batch(samples(rows)))
    cache: Any = DynamicCache()
    options = {}
    if form == "static":
        cache, options = StaticCache(model.config.text_config, max_cache_len=120), {"disable_compile": True}
    said = model.generate(**inputs, **GREEDY, past_key_values=cache, pruning_ratio=ratio, **options)
    for turn_number in range(2):
        turn = longer(inputs, said, seed=turn_number)
        model.generate(**text_of(batch(samples([[2, Video(2, 3, 3), 3]]))), **GREEDY)  # leaves nothing stale
        expected = model.generate(**turn, **GREEDY, pruning_ratio=ratio)
        seen = said.shape[1] - 1 if form == "new-tokens-and-whole-mask" else 0  # the last was never an input
        again = without_vision(turn) | {"input_ids": turn["input_ids"][:, seen:]}
        chunks = {"prefill_chunk_size": 2} if form == "in-chunks" else {}
        found = model.generate(**again, **GREEDY, past_key_values=cache, **options, **chunks)
        assert torch.equal(found, expected[:, seen:])
        said = expected


def test_a_new_video_in_a_second_turn_equals_recomputing(model):
    """Vision tokens are causal, so the cache of what came before them stays right."""
    (whole,) = samples([[3, Video(3), 5]])
    (new,) = samples([[4, Video(2, 3, 2), 3]], seed=9)
    first, second = text_of(whole), text_of(new)
    cache = DynamicCache()
    said = model.generate(**first, **GREEDY, past_key_values=cache)
    ids = torch.cat([said, second["input_ids"]], dim=-1)
    types = torch.nn.functional.pad(first["mm_token_type_ids"], (0, NEW_TOKENS))
    turn = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": torch.cat([types, second["mm_token_type_ids"]], dim=-1),
    }
    vision = ("pixel_values_videos", "video_grid_thw")
    expected = model.generate(**turn, **{n: torch.cat([first[n], second[n]]) for n in vision}, **GREEDY)
    found = model.generate(**turn, **{name: second[name] for name in vision}, **GREEDY, past_key_values=cache)
    assert torch.equal(found, expected)
