"""vLLM engines on tiny checkpoints, and what `generate` computes for the same requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: `make test-vllm`")

import torch
from transformers import AutoModelForMultimodalLM, AutoProcessor
from vllm import LLM, SamplingParams

from stts_hf.modeling.sequence_stts import Tokens
from tests.stts_hf.serving.cases import Request

STEPS = 12
TOLERANCE = 1e-4  # of log-probabilities in float32: found 1e-5, while a wrong mask or position gives 1e-2


@dataclass
class Answer:
    """
    token_ids: (steps,). log_probabilities: (steps, vocabulary). prompt: token ids that vLLM saw; num_cached: how many
    of them it did not compute.
    """

    token_ids: torch.Tensor
    log_probabilities: torch.Tensor
    prompt: Sequence[int] = ()
    num_cached: int = 0


class Engine:
    """vLLM on a tiny checkpoint, and the model in transformers with the same settings."""

    def __init__(self, checkpoint: Path, ratio: float, rule: str = "original", **options: Any):
        settings: dict[str, Any] = {"pruning_ratio": ratio, "pruned_position_ids": rule}
        self.processor: Any = AutoProcessor.from_pretrained(checkpoint)
        self.model: Any = AutoModelForMultimodalLM.from_pretrained(checkpoint, **settings).eval()
        self.llm = LLM(
            str(checkpoint),
            enforce_eager=True,
            hf_overrides=settings,
            max_logprobs=-1,
            disable_log_stats=True,
            max_model_len=1024,
            # Molmo2's prompts go whole into a step, of as many tokens as `max_model_len`; Qwen3-VL's are cut in videos.
            max_num_batched_tokens=112,
            max_num_seqs=8,
            **{"dtype": "float32", **options},
        )

    def serve(self, requests: Sequence[Request]) -> list[Answer]:
        """All at once."""
        sampling = SamplingParams(temperature=0, max_tokens=STEPS, logprobs=-1, ignore_eos=True)
        answers = []
        for output in self.llm.generate([r.for_vllm(self.processor) for r in requests], sampling, use_tqdm=False):
            found, vocabulary = output.outputs[0], self.model.config.text_config.vocab_size
            steps = [[step[token].logprob for token in range(vocabulary)] for step in found.logprobs]
            prompt, cached = output.prompt_token_ids, output.num_cached_tokens
            answers.append(Answer(torch.tensor(found.token_ids), torch.tensor(steps), prompt, cached))
        return answers

    def forget(self) -> None:
        assert self.llm.reset_prefix_cache()

    @torch.no_grad()
    def generate(self, request: Request) -> Answer:
        inputs = request.for_model(self.processor)
        output = self.model.generate(
            **inputs,
            max_new_tokens=STEPS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            eos_token_id=-1,
            pad_token_id=0,
        )
        new = output.sequences[0, Tokens(inputs["input_ids"]).shape[1] :]
        return Answer(new, torch.stack(output.logits)[:, 0].log_softmax(-1))


def worst(served: Sequence[Answer], expected: Sequence[Answer]) -> float:
    """Largest difference of log-probabilities; raises where tokens differ, since later steps would not compare."""
    for one, other in zip(served, expected, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
    pairs = zip(served, expected, strict=True)
    return max(float((one.log_probabilities - other.log_probabilities).abs().max()) for one, other in pairs)
