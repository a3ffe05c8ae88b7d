"""Prompt lookup proposes what followed the same words earlier in the prompt.

Where placeholders followed them, stock Molmo2's lookup ends in an `IndexError`: they lie outside the head's vocabulary.
"""

from typing import Any

import pytest
import torch

from tests.tiny import Video, build_inputs, image_inputs, tiny_config, tiny_model

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(scope="module")
def model():
    """`test_every_backbone_generation.py` looks up at original positions."""
    return tiny_model(tiny_config(model_overrides={"pruned_position_ids": "compact"}))


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
