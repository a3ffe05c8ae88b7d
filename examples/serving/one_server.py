"""Requests per second and time to first token of one vLLM engine, for benchmark.py; needs vLLM only, and no STTS:

    python -m examples.serving.one_server CHECKPOINT --video "<|video|>" --frames 16 --side 378 --pruning-ratio 0.5

Each line of its input, such as "8 16", asks for 16 requests, 8 at a time, and is answered by a line of JSON: requests
per second, the median time to first token in seconds, the tokens of a prompt.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # vLLM's sampler alone takes a minute to compile
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import numpy as np
from vllm import LLM, SamplingParams

NEW_TOKENS = 16
MOST_AT_ONCE = 8


class Server:
    """A vLLM engine that caches nothing, and requests about videos of noise: `frames` of `side` x `side` pixels."""

    def __init__(self, checkpoint: str, overrides: Any, video: str, frames: int, side: int, **options: Any):
        self.llm = LLM(
            checkpoint,
            hf_overrides=overrides,
            max_num_batched_tokens=16384,
            max_num_seqs=MOST_AT_ONCE,
            enable_prefix_caching=False,
            mm_processor_cache_gb=0,
            enforce_eager=True,
            **options,
        )
        self.prompt, self.shape = f"{video}What moves?", (frames, side, side, 3)
        self.noise, self.names = np.random.default_rng(0), map(str, itertools.count())

    def request(self) -> Any:
        number = self.shape[0]
        metadata = {"total_num_frames": number, "fps": 2.0, "duration": number / 2, "frames_indices": [*range(number)]}
        metadata |= {"do_sample_frames": False, "video_backend": "opencv"}
        frames = self.noise.integers(0, 256, self.shape, np.uint8)
        return {"prompt": self.prompt, "multi_modal_data": {"video": [(frames, metadata)]}}

    def serve(self, requests: list[Any]) -> tuple[list[float], int]:
        """Answers them at once. Returns the seconds to the first token of each, and how many tokens a prompt has."""
        sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
        engine, length = self.llm.llm_engine, 0
        started: dict[str, float] = {}
        first: dict[str, float] = {}
        for request in requests:
            name = next(self.names)
            started[name] = time.perf_counter()
            engine.add_request(name, request, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                first.setdefault(output.request_id, time.perf_counter())
                length = len(output.prompt_token_ids)
        return [first[name] - started[name] for name in started], length

    def measure(self, at_once: int, number: int) -> dict[str, float]:
        """Of `number` requests, `at_once` at a time."""
        requests, waits, length = [self.request() for _ in range(number)], [], 0
        started = time.perf_counter()
        for begin in range(0, number, at_once):
            more, length = self.serve(requests[begin : begin + at_once])
            waits += more
        rate = number / (time.perf_counter() - started)
        return {"rate": rate, "first": statistics.median(waits), "length": length}


def main() -> None:
    parser = argparse.ArgumentParser(description="Requests per second of one vLLM engine.")
    parser.add_argument("checkpoint")
    parser.add_argument("--video", required=True, help="what stands for a video in a prompt")
    parser.add_argument("--frames", type=int, required=True)
    parser.add_argument("--side", type=int, required=True, help="pixels of a frame")
    parser.add_argument("--pruning-ratio", type=float)
    parser.add_argument("--evs", type=float, help="ratio of vLLM's own pruning")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--as-released", action="store_true", help="a stock Molmo2")
    arguments = parser.parse_args()
    overrides: Any = {} if arguments.pruning_ratio is None else {"pruning_ratio": arguments.pruning_ratio}
    if arguments.as_released:
        from examples.serving.stock_molmo2 import as_released  # here: it needs a transformers that has Molmo2

        overrides = as_released
    options: dict[str, Any] = {"dtype": arguments.dtype, "max_model_len": arguments.max_model_len}
    if arguments.evs is not None:
        options["video_pruning_rate"] = arguments.evs
    server = Server(arguments.checkpoint, overrides, arguments.video, arguments.frames, arguments.side, **options)
    server.serve([server.request()])
    for line in sys.stdin:
        print(json.dumps(server.measure(*map(int, line.split()))), flush=True)


if __name__ == "__main__":
    main()
