"""Prompt lookup proposes what followed the same words earlier in the prompt.

Where placeholders followed them, stock Molmo2's lookup ends in an `IndexError`: they lie outside the head's vocabulary.
"""

from typing import Any

import pytest
import torch

from tests.modeling.reference import Inputs
from tests.tiny import Video, build_inputs, image_inputs, tiny_config, tiny_model

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(scope="module")
def model():
    """`test_every_backbone_generation.py` looks up at original positions."""
    return tiny_model(tiny_config(model_overrides={"pruned_position_ids": "compact"}))


def prompt() -> Inputs:
    return build_inputs([[4, Video(3), 6]])


@pytest.mark.parametrize("pruning_ratio", [0.5, 1.0])
def test_lookup_gives_the_tokens_of_greedy_decoding(model, pruning_ratio):
    inputs = prompt()
    expected = model.generate(**inputs, **GREEDY, pruning_ratio=pruning_ratio)
    found = model.generate(**inputs, **GREEDY, pruning_ratio=pruning_ratio, prompt_lookup_num_tokens=5)
    assert torch.equal(found, expected)


def test_lookup_accepts_what_the_model_would_say(model):
    """A prompt that holds the answer already is where lookup saves steps; it must still be the same answer."""
    inputs = build_inputs([[4, Video(3), 6]])
    length = inputs["input_ids"].shape[1]
    said = model.generate(**inputs, **GREEDY)
    turn = inputs | {
        "input_ids": torch.cat([said, inputs["input_ids"][:, -3:]], dim=-1),
        "attention_mask": torch.ones(1, said.shape[1] + 3, dtype=torch.int64),
        "mm_token_type_ids": torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, said.shape[1] + 3 - length)),
    }
    expected = model.generate(**turn, **GREEDY)
    assert torch.equal(model.generate(**turn, **GREEDY, prompt_lookup_num_tokens=4), expected)


@pytest.mark.parametrize("kind", ["text", "image"])
def test_lookup_works_without_a_video(model, kind):
    inputs = build_inputs([[10]]) if kind == "text" else image_inputs()
    expected = model.generate(**inputs, **GREEDY)
    assert torch.equal(model.generate(**inputs, **GREEDY, prompt_lookup_num_tokens=5), expected)


def test_lookup_over_a_reused_cache(model):
    inputs = prompt()
    first = model.generate(**inputs, **GREEDY, prompt_lookup_num_tokens=5, return_dict_in_generate=True)
    question = inputs["input_ids"][:, 2:5]
    whole = torch.cat([first.sequences, question], dim=-1)
    added = whole.shape[1] - inputs["input_ids"].shape[1]
    again = inputs | {
        "input_ids": whole,
        "attention_mask": torch.ones_like(whole),
        "mm_token_type_ids": torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, added)),
    }
    expected = model.generate(**again, **GREEDY)
    found = model.generate(input_ids=whole, past_key_values=first.past_key_values, **GREEDY, prompt_lookup_num_tokens=5)
    assert torch.equal(found, expected)
