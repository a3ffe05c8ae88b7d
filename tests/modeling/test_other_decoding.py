"""Ways to decode that are not `generate`'s own: functions and folders of custom decoding, continuous batching."""

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from tests.backbones import Clip, Picture, daily, prompt

GREEDY = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
# As folders of the Hub hold it: a loop of its own. It gets the prompt that is left, and where its tokens stand.
DECODING = '''
import torch


def generate(model, input_ids, position_ids, attention_mask, mm_token_type_ids, max_new_tokens, **inputs):
    """The likeliest token of each step, without a cache."""
    sequences, pad = input_ids, torch.nn.functional.pad
    for step in range(max_new_tokens):
        outputs = model(
            input_ids=sequences,
            position_ids=position_ids,
            attention_mask=attention_mask,
            mm_token_type_ids=mm_token_type_ids,
            **inputs,
        )
        sequences = torch.cat([sequences, outputs.logits[:, -1:].argmax(-1)], -1)
        position_ids = torch.cat([position_ids, position_ids[..., -1:] + 1], -1)
        attention_mask, mm_token_type_ids = pad(attention_mask, (0, 1), value=1), pad(mm_token_type_ids, (0, 1))
    return sequences
'''


@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_a_folder_of_custom_decoding_says_what_generate_says(backbone, ratio, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    (tmp_path / "mine" / "custom_generate").mkdir(parents=True)
    (tmp_path / "mine" / "custom_generate" / "generate.py").write_text(DECODING)
    model, inputs = backbone.model(), prompt(backbone.batch([[3, Clip(4), 5]], "left"))
    expected = model.generate(**inputs, **GREEDY, pruning_ratio=ratio)
    found = model.generate(
        **inputs,
        max_new_tokens=6,
        pruning_ratio=ratio,
        custom_generate=str(tmp_path / "mine"),
        trust_remote_code=True,
    )
    assert torch.equal(found, expected)


def test_a_function_of_custom_decoding_gets_the_pruned_prompt(backbone):
    """transformers' own greedy loop, handed in as a function: it goes through the cache that `generate` set up."""
    model, inputs = backbone.model(), prompt(backbone.batch([[3, Clip(4), 5]], "left"))
    seen = []

    def decode(model, input_ids, **kwargs):
        seen.append(input_ids.shape[1])
        return model._sample(input_ids, **kwargs)

    found = model.generate(**inputs, **GREEDY, pruning_ratio=0.5, custom_generate=decode)
    assert torch.equal(found, model.generate(**inputs, **GREEDY, pruning_ratio=0.5))
    assert seen[0] < inputs["input_ids"].shape[1]


@daily
def test_continuous_batching_of_text_says_what_generate_says(backbone):
    model = backbone.model().eval()
    prompts = [[5, 6, 7, 8, 9], [7, 8, 9]]
    expected = [model.generate(torch.tensor([ids]), **GREEDY)[0, len(ids) :].tolist() for ids in prompts]
    config = GenerationConfig(do_sample=False, max_new_tokens=6, eos_token_id=-1, pad_token_id=0)
    small = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)  # else it takes most of the memory
    outputs = model.generate_batch(prompts, generation_config=config, continuous_batching_config=small)
    assert [outputs[f"req_{index}"].generated_tokens for index in range(2)] == expected


@pytest.mark.parametrize("part", [Clip(2), Picture()], ids=["video", "image"])
def test_continuous_batching_refuses_placeholders(backbone, part):
    model, inputs = backbone.model(), backbone.batch([[3, part, 5]], "left")
    with pytest.raises(ValueError, match=r"`inputs\[1\]` has placeholders of a video or image.*call `generate`"):
        model.generate_batch([[5, 6], inputs["input_ids"][0].tolist()], max_new_tokens=2)
