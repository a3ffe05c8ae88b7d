"""vLLM engines on tiny checkpoints, requests to them, and what `generate` computes for the same."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: `make test-vllm`")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine in this process
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # vLLM's sampler alone takes a minute to compile

import torch
from PIL import Image
from transformers import AutoModelForMultimodalLM, AutoProcessor
from vllm import LLM, SamplingParams

from stts_hf.data.frames import process
from stts_hf.modeling.sequence_stts import Tokens
from tests.checkpoints import TINY

STEPS = 12
TOLERANCE = 1e-4  # of log-probabilities in float32: found 1e-5, while a wrong mask or position gives 1e-2


@dataclass
class Request:
    """A prompt of `media`, video files and images in the order of the template, and a question."""

    question: str
    videos: Sequence[Path] = ()
    images: Sequence[Image.Image] = field(default_factory=list)

    def prompt(self, processor: Any) -> str:
        media = [{"type": "image"}] * len(self.images) + [{"type": "video"}] * len(self.videos)
        content: Any = [*media, {"type": "text", "text": self.question}]
        return processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )

    def for_vllm(self, processor: Any) -> Any:
        data = {"video": [video.read_bytes() for video in self.videos], "image": list(self.images)}
        ids = processor.tokenizer(self.prompt(processor), add_special_tokens=False)["input_ids"]
        return {"prompt_token_ids": ids, "multi_modal_data": {name: items for name, items in data.items() if items}}

    def for_model(self, processor: Any) -> dict[str, torch.Tensor]:
        """The processor's inputs."""
        parts = self.prompt(processor).split(processor.video_token)
        if len(self.videos) > getattr(processor, "max_videos", len(self.videos)):
            return self._put_together(processor, parts)
        options: dict[str, Any] = {"images": list(self.images)} if self.images else {}
        videos = [str(video) for video in self.videos]
        return dict(process(processor, text=[self.prompt(processor)], videos=videos, **options, return_tensors="pt"))

    def _put_together(self, processor: Any, parts: Sequence[str]) -> dict[str, torch.Tensor]:
        """Of Molmo2's, which takes one video a text: `parts` of the prompt with a video between two."""
        pieces = []
        for before, video in zip(parts, self.videos, strict=False):
            pieces.append(processor(text=before + processor.video_token, videos=[str(video)], return_tensors="pt"))
        pieces.append(processor(text=parts[-1], return_tensors="pt"))
        inputs = {}
        for name in ("input_ids", "attention_mask", "mm_token_type_ids"):  # one BOS, the first's
            inputs[name] = torch.cat([piece[name][:, bool(place) :] for place, piece in enumerate(pieces)], dim=-1)
        pooling, patches = [], 0
        for piece in pieces[:-1]:
            rows = piece["video_token_pooling"]
            pooling.append(torch.where(rows >= 0, rows + patches, rows))
            patches += piece["pixel_values_videos"].shape[:2].numel()
        inputs["video_token_pooling"] = torch.cat(pooling)
        for name in ("pixel_values_videos", "video_grids"):
            inputs[name] = torch.cat([piece[name] for piece in pieces[:-1]])
        return inputs


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

    def __init__(self, ratio: float, rule: str = "original", checkpoint: Path = TINY, **options: Any):
        settings: dict[str, Any] = {"pruning_ratio": ratio, "pruned_position_ids": rule}
        self.processor: Any = AutoProcessor.from_pretrained(checkpoint)
        self.model: Any = AutoModelForMultimodalLM.from_pretrained(checkpoint, **settings).eval()
        self.llm = LLM(
            str(checkpoint),
            dtype="float32",
            enforce_eager=True,
            hf_overrides=settings,
            max_logprobs=-1,
            disable_log_stats=True,
            max_num_seqs=8,
            **options,
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
