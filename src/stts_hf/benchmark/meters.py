"""Seconds, FLOPs of matrix products and attention, and peak memory, of a pass and of its stages."""

import contextlib
import functools
import itertools
import math
import os
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import psutil
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from stts_hf.model_parts import CONNECTOR, LANGUAGE_MODEL, VISION_TOWER

SEQUENCE, DECODE_TOKEN = "sequence", "decode_per_token"
FORWARD, BACKWARD, OPTIMISER = "forward", "backward", "optimiser_step"
TOTAL = "total"
# In the order of the tables.
STAGES = (VISION_TOWER, CONNECTOR, SEQUENCE, LANGUAGE_MODEL, FORWARD, BACKWARD, OPTIMISER, TOTAL, DECODE_TOKEN)
# Of a prompt, as commands and pages show them.
COLUMNS = {"vision tower": VISION_TOWER, "LLM prefill": LANGUAGE_MODEL, "pixels to logits": TOTAL}

Result = TypeVar("Result")


@dataclass
class Cost:
    """
    Of a prompt. tokens: in the cache. cache_bytes: of keys and values. flops: by `COLUMNS`. rounds: milliseconds of
    each pass by `COLUMNS`, in the order in which the variants took turns.
    """

    tokens: int = 0
    cache_bytes: int = 0
    flops: dict[str, int] = field(default_factory=dict)
    rounds: dict[str, list[float]] = field(default_factory=lambda: {column: [] for column in COLUMNS})


class Clock:
    """
    Seconds on the host, or between CUDA events, idle time included; `synchronize` before `between`. of_processor:
    seconds that a CPU works for this process; with one thread, what runs beside it does not count.
    """

    def __init__(self, device: torch.device, of_processor: bool = False) -> None:
        self.device, self.on_cuda, self.of_processor = device, device.type == "cuda", of_processor

    def read(self) -> Any:
        if not self.on_cuda:
            return time.process_time() if self.of_processor else time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def synchronize(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize(self.device)

    def between(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) / 1000 if self.on_cuda else end - start


def attention_flops(operator: Any) -> Callable[..., int]:
    """FLOPs of an attention kernel, forward or backward; causal attention counts the visible pairs alone."""
    names = [argument.name for argument in operator.default._schema.arguments]  # noqa: SLF001  # PyTorch has no other way

    def count(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        given = dict(zip(names, args, strict=False)) | kwargs
        (batch, heads, length, width), depth = given["query"], given["value"][-1]
        pairs = length * (length + 1) // 2 if given.get("is_causal") else length * given["key"][-2]
        return 2 * batch * heads * pairs * (width + depth if names[0] == "query" else 3 * width + 2 * depth)

    return count


# torch 2.14 has no formula for the CPU's kernel and for experts (each row, or column, meets one), and no version leaves
# out the pairs that causal kernels skip.
FORMULAS = {
    operator: attention_flops(operator)
    for kernel in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
    for name in (f"_scaled_dot_product_{kernel}", f"_scaled_dot_product_{kernel}_backward")
    for operator in (getattr(torch.ops.aten, name),)
}
FORMULAS[torch.ops.aten._grouped_mm] = lambda rows, matrices, *_, **options: 2 * math.prod(rows) * matrices[-1]  # noqa: SLF001


class Untracked(contextlib.nullcontext[None]):
    """Instead of PyTorch's tracker of modules, whose hooks keep what gradient checkpointing recomputes in memory."""

    parents = ("Global",)


class FlopClock(Clock):
    """Reads FLOPs instead of seconds, while its `counter` is entered."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.counter = FlopCounterMode(display=False, custom_mapping=FORMULAS)
        self.counter.mod_tracker = Untracked()  # type: ignore[assignment]

    def read(self) -> int:
        return self.counter.get_total_flops()


class StageRecorder:
    """
    Reads `clock` at the borders of the stages of one inference pass of `model` (stock or STTS, with head) in its `with`
    block, by hooks on the modules that the backbone's `parts` name. (Gradient checkpointing runs hooks twice.)

        start | ... | tower | connector | ... | LLM and head | end

    "sequence" is the dots: embedding, dropping placeholders, merging features, positions, the mask. A connector within
    the tower counts as connector.
    """

    def __init__(self, model: nn.Module, clock: Clock) -> None:
        self.clock = clock
        self._readings: list[tuple[str, Any]] = []  # the stage that begins, and the clock's reading
        self._hooks: list[Any] = []
        backbone: Any = model.get_submodule("model")
        paths = {part: path for path, part in reversed(backbone.parts.items())}  # the first of each
        connectors = [path for path, part in backbone.parts.items() if part == CONNECTOR]
        within = all(path.startswith(f"{paths[VISION_TOWER]}.") for path in connectors)
        self._watch(backbone, paths[VISION_TOWER], VISION_TOWER, SEQUENCE if within else CONNECTOR)
        self._watch(backbone, paths[LANGUAGE_MODEL], LANGUAGE_MODEL, LANGUAGE_MODEL)
        for path in connectors:
            self._watch(backbone, path, CONNECTOR, VISION_TOWER if within else SEQUENCE)

    def _watch(self, backbone: nn.Module, path: str, stage: str, following: str) -> None:
        module = backbone.get_submodule(path)
        for one in module if isinstance(module, nn.ModuleList) else [module]:
            self._hooks.append(one.register_forward_pre_hook(functools.partial(self._begin, stage)))
            self._hooks.append(one.register_forward_hook(functools.partial(self._begin, following)))

    def _begin(self, stage: str, *_: Any) -> None:
        self._readings.append((stage, self.clock.read()))

    def __enter__(self) -> "StageRecorder":
        self.clock.synchronize()
        self._begin(SEQUENCE)
        return self

    def __exit__(self, *_: Any) -> None:
        self._begin(TOTAL)
        for hook in self._hooks:
            hook.remove()

    def stages(self) -> dict[str, float]:
        """The clock's reading for each stage, after the block; no language model's stages if none ran."""
        self.clock.synchronize()
        stages: dict[str, float] = dict.fromkeys((VISION_TOWER, CONNECTOR, SEQUENCE), 0)
        for (stage, start), (_, end) in itertools.pairwise(self._readings):
            stages[stage] = stages.get(stage, 0) + self.clock.between(start, end)
        if LANGUAGE_MODEL not in stages:
            del stages[SEQUENCE]
        return stages | {TOTAL: self.clock.between(self._readings[0][1], self._readings[-1][1])}


def peak_memory(run: Callable[[], Result], device: torch.device) -> tuple[Result, int]:
    """Runs `run` once; its result, and the most bytes it held beyond those before; on a CPU those of tensors."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = run()
        torch.cuda.synchronize(device)
        return result, torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its messages would break the progress bar
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = run()
    kineto = profiler.profiler and profiler.profiler.kineto_results
    events: list[Any] = [event for event in kineto.events() if event.name() == "[memory]"] if kineto else []
    sums = itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return result, max(sums, default=0)


@contextlib.contextmanager
def limited_to_free_memory(device: torch.device) -> Iterator[None]:
    """Lets allocations beyond the free memory of a Linux machine fail, where the kernel would kill the process."""
    process, (soft, hard) = psutil.Process(), resource.getrlimit(resource.RLIMIT_DATA)
    if device.type == "cpu" and psutil.LINUX and hard == resource.RLIM_INFINITY:
        free = process.memory_info().data + psutil.virtual_memory().available
        resource.setrlimit(resource.RLIMIT_DATA, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
