"""Prompt lookup proposes what followed the same words earlier in the prompt, and there a video may follow."""

from typing import Any

import pytest
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from stts_hf.modeling.generation_stts import VocabularyPromptLookup
from tests.modeling.reference import Inputs
from tests.tiny import FRAME_START, PATCH, Video, build_inputs, image_inputs, tiny_config, tiny_model

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(scope="module", params=["original", "compact"])
def model(request):
    return tiny_model(tiny_config(model_overrides={"pruned_position_ids": request.param}))


def echoing_prompt() -> Inputs:
    """Its last tokens are those that stand before the video and before its first frame."""
    inputs = build_inputs([[4, Video(3), 6]])
    ids = inputs["input_ids"]
    assert int(ids[0, 5]) == FRAME_START
    ids[0, -3:] = ids[0, 2:5]
    return inputs


def test_the_prompt_makes_lookup_propose_what_the_head_cannot_score():
    """Otherwise the test below would show nothing."""
    lookup = PromptLookupCandidateGenerator(
        eos_token_id=None, num_output_tokens=5, max_matching_ngram_size=3, max_length=200, vocab_size=512
    )
    ids = echoing_prompt()["input_ids"]
    proposed, _ = lookup.get_candidates(ids)
    assert proposed[0, ids.shape[1] :].tolist()[:2] == [FRAME_START, PATCH]
    proposed, _ = VocabularyPromptLookup(lookup).get_candidates(ids)
    assert torch.equal(proposed, ids)


@pytest.mark.parametrize("pruning_ratio", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("kind", ["echo", "plain"])
def test_lookup_gives_the_tokens_of_greedy_decoding(model, kind, pruning_ratio):
    inputs = echoing_prompt() if kind == "echo" else build_inputs([[4, Video(3), 6]])
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
    inputs["input_ids"][0, -2:] = inputs["input_ids"][0, :2]  # in the image prompt, an image follows them
    expected = model.generate(**inputs, **GREEDY)
    assert torch.equal(model.generate(**inputs, **GREEDY, prompt_lookup_num_tokens=5), expected)


def test_lookup_over_a_reused_cache(model):
    inputs = echoing_prompt()
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
