"""What a pass and its stages are measured in: seconds, FLOPs of matrix products and attention, and most bytes held.

Peak memory is what a pass needs beyond what is allocated before it: activations, gradients, caches and working space,
not weights, inputs and the optimiser's state. On a CPU it is the running sum of the allocations and releases that
PyTorch's allocator reports to `torch.profiler`: exact for tensors, without what a library keeps for itself (oneDNN's
packed weights).
"""

import contextlib
import functools
import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from stts_hf.model_parts import CONNECTOR, LANGUAGE_MODEL, PARTS, VISION_TOWER

SEQUENCE, DECODE_TOKEN = "sequence", "decode_per_token"
FORWARD, BACKWARD, OPTIMISER = "forward", "backward", "optimiser_step"
TOTAL = "total"
STAGES = (
    VISION_TOWER,
    CONNECTOR,
    SEQUENCE,
    LANGUAGE_MODEL,
    FORWARD,
    BACKWARD,
    OPTIMISER,
    TOTAL,
    DECODE_TOKEN,
)  # as in tables

Result = TypeVar("Result")


class Clock:
    """
    Seconds on the host, or on CUDA between events in the current stream, where time in which the device is idle counts
    for the stage that it is in. `read` forces no host-device sync; `synchronize` has to run before `between`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_cuda = device, device.type == "cuda"

    def read(self) -> Any:
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def synchronize(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize(self.device)

    def between(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) / 1000 if self.on_cuda else end - start


def attention_flops(operator: Any) -> Callable[..., int]:
    """
    FLOPs of one of PyTorch's attention kernels, by its schema's names; query: (B, heads, L, d), key and value: (B,
    heads or fewer, S, d). Two products forward, logits and output; five backward, logits once more and two gradients of
    each. A causal kernel leaves out the pairs of query and key that may not see each other.
    """
    names = [argument.name for argument in operator.default._schema.arguments]  # noqa: SLF001  # PyTorch has no other way

    def count(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        given = dict(zip(names, args, strict=False)) | kwargs
        (batch, heads, length, width), depth = given["query"], given["value"][-1]
        pairs = length * (length + 1) // 2 if given.get("is_causal") else length * given["key"][-2]
        return 2 * batch * heads * pairs * (width + depth if names[0] == "query" else 3 * width + 2 * depth)

    return count


# torch 2.14's counter has no formula for a CPU's kernel, and every version's counts causal attention as if each query
# saw each key, which no kernel computes.
ATTENTION = {
    operator: attention_flops(operator)
    for kernel in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
    for operator in (
        getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}"),
        getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_backward"),
    )
}


class FlopClock(Clock):
    """Reads FLOPs instead of seconds, while its `counter` is entered."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.counter = FlopCounterMode(display=False, custom_mapping=ATTENTION)

    def read(self) -> int:
        return self.counter.get_total_flops()


class UncountedAttention(TorchDispatchMode):
    """Collects in `names` the attention operators that run without a formula, so that no ideal is silently wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, known = str(func.overloadpacket), func.overloadpacket in {**flop_registry, **ATTENTION}
        if ("attn" in name or "attention" in name) and not known:
            self.names.add(name)
        return func(*args, **(kwargs or {}))


class StageRecorder:
    """
    Reads `clock` wherever a pass of `model` (stock or STTS, with head) in its `with` block crosses the border of a
    stage, by hooks on the modules that the backbone's `parts` name. No other class hooks the model. Gradient
    checkpointing runs hooks a second time, so this is for inference only.

        start | ... | tower | connector | ... | LLM and head | end

    "sequence" is what the dots stand for: embedding, dropping placeholders, merging features, positions, the mask. A
    connector within the tower is counted as the connector's.
    """

    def __init__(self, model: nn.Module, clock: Clock) -> None:
        self.clock = clock
        self.readings: dict[str, list[Any]] = {}  # of each border, by its calls
        self._hooks: list[Any] = []
        backbone: Any = model.get_submodule("model")
        names = {part: [name for name, of in backbone.parts.items() if of == part] for part in PARTS}
        (tower,), (language_model, *_) = names[VISION_TOWER], names[LANGUAGE_MODEL]
        hooked = [("tower", tower), ("language_model", language_model)]
        hooked += [("inner" if it.startswith(f"{tower}.") else "connector", it) for it in names[CONNECTOR]]
        for name, path in hooked:
            part = backbone.get_submodule(path)
            for module in part if isinstance(part, nn.ModuleList) else [part]:
                self._hooks.append(module.register_forward_pre_hook(functools.partial(self._read, f"{name}_in")))
                self._hooks.append(module.register_forward_hook(functools.partial(self._read, f"{name}_out")))

    def _read(self, name: str, *_: Any) -> None:
        self.readings.setdefault(name, []).append(self.clock.read())

    def __enter__(self) -> "StageRecorder":
        self.clock.synchronize()
        self._read("start")
        return self

    def __exit__(self, *_: Any) -> None:
        self._read("end")
        for hook in self._hooks:
            hook.remove()

    def stages(self) -> dict[str, float]:
        """What the clock says of each stage, after the block; without a language model's stages where none ran."""
        self.clock.synchronize()
        calls = zip(*(self.readings.get(name, []) for name in ("inner_in", "inner_out")), strict=True)
        within = sum(self.clock.between(*readings) for readings in calls)
        encoded = "connector_out" if "connector_out" in self.readings else "tower_out"
        stages = {
            VISION_TOWER: self._between("tower_in", "tower_out") - within,
            CONNECTOR: self._between("tower_out", encoded) + within,
            TOTAL: self._between("start", "end"),
        }
        if "language_model_in" in self.readings:
            stages[SEQUENCE] = self._between("start", "tower_in") + self._between(encoded, "language_model_in")
            stages[LANGUAGE_MODEL] = self._between("language_model_in", "end")
        return stages

    def _between(self, start: str, end: str) -> float:
        return self.clock.between(self.readings[start][0], self.readings[end][0])


def peak_memory(run: Callable[[], Result], device: torch.device) -> tuple[Result, int]:
    """Runs `run` once. Returns its result and the most bytes it held beyond those allocated before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = run()
        torch.cuda.synchronize(device)
        return result, torch.cuda.max_memory_allocated(device) - before
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with _quiet_stderr():
        profiler.start()
    try:
        result = run()
    finally:
        with _quiet_stderr():
            profiler.stop()
    kineto = profiler.profiler.kineto_results if profiler.profiler else None
    if kineto is None:
        raise RuntimeError("torch.profiler recorded nothing, so the peak memory is unknown.")
    events: list[Any] = [event for event in kineto.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return result, most


@contextlib.contextmanager
def limited_to_free_memory(device: torch.device) -> Iterator[None]:
    """
    Lets allocations on a CPU fail beyond the memory that Linux calls available; without a limit the kernel would kill
    the process, and every result with it. Elsewhere does nothing.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    free = proc_bytes("/proc/meminfo", "MemAvailable")
    if device.type == "cpu" and free is not None:
        limit = (proc_bytes("/proc/self/status", "VmData") or 0) + free
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def proc_bytes(path: str, field: str) -> int | None:
    """A field of a file in Linux' /proc that counts kB, in bytes; None where there is no such file or field."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":")), None)


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    """The profiler's C++ library logs to stderr, over the progress bar."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
