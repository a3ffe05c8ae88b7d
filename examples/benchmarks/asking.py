"""Several questions about one video: each with a call of its own, or behind what the model read of the video once."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch

from stts_hf.benchmark.geometries import START, random_words, workload_inputs
from stts_hf.benchmark.measure import take_turns
from stts_hf.benchmark.meters import TOTAL, peak_memory
from stts_hf.benchmark.models import build_models, configure
from stts_hf.benchmark.presets import Workload
from stts_hf.inference.generate import ReadHeads, read_heads
from stts_hf.inference.requests import Answer, Prepared, Request

QUESTIONS = 10
CALLS, ONE_BY_ONE, TOGETHER = "a call each", "read once, asked one by one", "read once, asked in one batch"
_PER_TOKEN = ("input_ids", "attention_mask", "mm_token_type_ids")


@dataclasses.dataclass
class Questions:
    """
    Random questions about a workload's video, and the ways to ask them; each returns the answers' tokens (questions,
    decode_tokens).

    head: arguments of `model(...)` up to the end of the video. ids: (questions, tokens).
    """

    model: Any
    head: dict[str, Any]
    ids: torch.Tensor
    pruning_ratio: float
    decode_tokens: int

    @classmethod
    def draw(cls, workload: Workload, pruning_ratio: float, device: torch.device) -> "Questions":
        model = build_models(workload.geometry, getattr(torch, workload.dtype), device)[0]
        configure((model, model), workload, workload.backend)
        inputs = workload_inputs(workload._replace(text_tokens=START + 1), model.config, device)
        head = {name: value[:, :-1] if name in _PER_TOKEN else value for name, value in inputs.items()}
        generator = torch.Generator(device).manual_seed(1)
        ids = random_words(model.config, (QUESTIONS, workload.text_tokens), generator)
        return cls(model, head, ids, pruning_ratio, workload.decode_tokens)

    @property
    def options(self) -> dict[str, Any]:
        return {"max_new_tokens": self.decode_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def tails(self, size: int) -> list[dict[str, torch.Tensor]]:
        """The questions in batches."""
        return [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in self.ids.split(size)]

    def read(self) -> ReadHeads:
        processor: Any = None  # that one prompt does not need
        prepared = Prepared(Request("", ""), Answer(), self.head)
        return read_heads(self.model, processor, [prepared], pruning_ratio=self.pruning_ratio)

    def call_for_each(self) -> torch.Tensor:
        found = []
        for tail in self.tails(1):
            parts = tail | {"mm_token_type_ids": torch.zeros_like(tail["input_ids"])}
            whole = {name: torch.cat([self.head[name], part], dim=-1) for name, part in parts.items()}
            inputs = self.head | whole
            sequences = self.model.generate(**inputs, pruning_ratio=self.pruning_ratio, **self.options)
            found.append(sequences[:, -self.decode_tokens :])
        return torch.cat(found)

    def ask_one_by_one(self) -> torch.Tensor:
        heads, row, found = self.read(), torch.zeros(1, dtype=torch.long), []
        for tail in self.tails(1):
            found.append(heads.answer(self.model, heads.cache, row, tail, **self.options))
            heads.rewind()
        return torch.cat(found)

    def ask_together(self) -> torch.Tensor:
        heads, rows, (tail,) = self.read(), torch.zeros(QUESTIONS, dtype=torch.long), self.tails(QUESTIONS)
        return heads.answer(self.model, heads.take(rows, keep=True), rows, tail, **self.options)


def measure_questions(workload: Workload, pruning_ratio: float, device: torch.device, repeats: int) -> dict[str, Any]:
    """
    Asks `QUESTIONS` questions of `text_tokens` tokens about a workload's video and lets the model write
    `decode_tokens` to each, in all ways, `repeats` times, in turns, after a warm-up. Returns a cell of the result: of
    each way the seconds of every round, the most bytes it held beyond weights and inputs in the warm-up, and whether
    all its tokens were those of a call each. Frames are there already: ways differ in what the model does.
    """
    questions = Questions.draw(workload, pruning_ratio, device)
    ways: dict[str, Callable[[], torch.Tensor]] = {
        CALLS: questions.call_for_each,
        ONE_BY_ONE: questions.ask_one_by_one,
        TOGETHER: questions.ask_together,
    }
    about = f"{QUESTIONS} questions of {workload.text_tokens} tokens, answers of {workload.decode_tokens}"
    title = f"{about}, k = {pruning_ratio:g}, {workload.title}"
    variants: list[dict[str, Any]] = [
        {"name": name, "status": "ok", "stages": {TOTAL: {"flops": None, "seconds": []}}} for name in ways
    ]
    expected = []

    def warm_up(variant: dict[str, Any]) -> None:
        tokens, variant["peak_memory"] = peak_memory(ways[variant["name"]], device)
        expected.append(tokens)
        variant["same_tokens"] = torch.equal(tokens, expected[0])

    def run(variant: dict[str, Any]) -> None:
        started = time.perf_counter()
        tokens = ways[variant["name"]]().cpu()  # waits for the device
        variant["stages"][TOTAL]["seconds"].append(time.perf_counter() - started)
        variant["same_tokens"] &= torch.equal(tokens, expected[0].cpu())

    take_turns(title, variants, repeats, warm_up, run)
    return {"title": title, "status": "ok", "variants": variants}
