"""How far vLLM's answers are from those of `generate`, for docs/benchmarks/vllm.md:

    python -m tests.stts_hf.serving.figures         # in the environment of `make test-vllm`

Largest differences of log-probabilities, over all tokens of the vocabulary and 12 greedy steps of the requests that the
tests make: for each setting, with parts of the plugin left out (up to the step at which an answer begins to differ),
and of first tokens in bfloat16.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from vllm.v1.core.sched.scheduler import Scheduler

from stts_hf.serving.attention import VisionStep
from stts_hf.serving.molmo2 import Molmo2Processor
from stts_hf.serving.processing import MultiModalProcessor
from stts_hf.serving.qwen3_vl import Qwen3VLForServing
from stts_hf.serving.scheduler import WholeVisionScheduler
from tests.stts_hf.serving.cases import SETTINGS, Request, make_checkpoints, make_clips, make_requests
from tests.stts_hf.serving.engines import Answer, Engine


def difference(served: Answer, expected: Answer) -> float:
    """Largest of log-probabilities, up to and with the first step whose token differs."""
    differs = (served.token_ids != expected.token_ids).nonzero().flatten().tolist()
    steps = differs[0] + 1 if differs else len(served.token_ids)
    return float((served.log_probabilities[:steps] - expected.log_probabilities[:steps]).abs().max())


def compare(served: Sequence[Answer], expected: Sequence[Answer]) -> tuple[float, int]:
    """The largest difference, and how many answers are others."""
    pairs = list(zip(served, expected, strict=True))
    others = sum(one.token_ids.tolist() != other.token_ids.tolist() for one, other in pairs)
    return max(difference(*pair) for pair in pairs), others


def without_deepstack(self: Any, positions: Any, inputs_embeds: Any, notes: Any, **inputs: Any) -> Any:
    """Qwen3-VL's `run` without deepstack's features."""
    return RUN(self, positions, inputs_embeds, None, **inputs)


RUN = Qwen3VLForServing.run
LEFT_OUT: dict[str, tuple[str, Any, str, Any]] = {
    "the mask of vision tokens": ("molmo2", VisionStep, "requests", lambda self, metadata: iter(())),
    "the scheduler": (
        "molmo2",
        WholeVisionScheduler,
        "_try_schedule_encoder_inputs",
        Scheduler._try_schedule_encoder_inputs,  # the method that ours replaces
    ),
    "hashes of all items of a prompt": (
        "molmo2",
        Molmo2Processor,
        "_get_mm_hashes",
        MultiModalProcessor._get_mm_hashes,
    ),
    "deepstack's features": ("qwen3_vl", Qwen3VLForServing, "run", without_deepstack),
    "positions in a video": (
        "qwen3_vl",
        Qwen3VLForServing,
        "place",
        lambda self, modality, item: torch.arange(len(item["ids"])).expand(3, -1),
    ),
}


# Each ends its engine before the next begins: vLLM takes apart with one what the next has set up in this process.
def as_tested(checkpoint: Path, ratio: float, rule: str, requests: Sequence[Request]) -> tuple[float, float]:
    """The largest difference with all requests at once, and again from the prefix cache."""
    engine = Engine(checkpoint, ratio, rule)
    expected = [engine.generate(request) for request in requests]
    first, again = (compare(engine.serve(requests), expected)[0] for _ in range(2))
    return first, again


def with_a_part_left_out(checkpoint: Path, requests: Sequence[Request], both: Request) -> tuple[float, int]:
    """The largest difference, and how many answers are others. `both` finds its first video in the cache."""
    engine = Engine(checkpoint, 0.5)
    expected = [engine.generate(request) for request in [*requests, both]]
    served = engine.serve(requests)
    engine.forget()
    engine.serve([Request(both.question, both.videos[:1])])
    return compare([*served, *engine.serve([both])], expected)


def in_bfloat16(checkpoint: Path, requests: Sequence[Request]) -> tuple[float, float]:
    """How far the first tokens of vLLM and of `generate` are from those in float32."""
    engine = Engine(checkpoint, 0.5, dtype="bfloat16")
    exact = [engine.generate(request).log_probabilities[0] for request in requests]
    of_vllm = [answer.log_probabilities[0] for answer in engine.serve(requests)]
    engine.model.bfloat16()
    of_generate = [engine.generate(request).log_probabilities[0] for request in requests]
    far = [
        max(float((one - other).abs().max()) for one, other in zip(found, exact, strict=True))
        for found in (of_vllm, of_generate)
    ]
    return far[0], far[1]


def main() -> None:
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        checkpoints, clips = make_checkpoints(Path(name)), make_clips(Path(name))
        requests = make_requests(clips)
        print("| | all at once | again, from the prefix cache |\n| --- | --- | --- |")
        for backbone, ratio, rule in SETTINGS:
            first, again = as_tested(checkpoints[backbone], ratio, rule, requests)
            print(f"| {backbone}, k = {ratio}, {rule} | {first:.1e} | {again:.1e} |", flush=True)
        print("\n| left out at k = 0.5 | difference | other answers of 9 |\n| --- | --- | --- |")
        for part, (backbone, owner, method, instead) in LEFT_OUT.items():
            with mock.patch.object(owner, method, instead):
                both = Request("Which?", [clips[0], clips[3]])
                worst, others = with_a_part_left_out(checkpoints[backbone], requests, both)
            print(f"| {part} ({backbone}) | {worst:.1e} | {others} |", flush=True)
        print("\n| first token in bfloat16 | vLLM | generate |\n| --- | --- | --- |")
        for backbone, checkpoint in checkpoints.items():
            of_vllm, of_generate = in_bfloat16(checkpoint, requests)
            print(f"| {backbone} | {of_vllm:.2f} | {of_generate:.2f} |", flush=True)


if __name__ == "__main__":
    main()
