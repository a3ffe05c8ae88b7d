"""What a pass is measured in: seconds, FLOPs of matrix products and attention, and the most bytes that it holds.

Peak memory is what a pass needs beyond what is allocated before it: activations, gradients, caches and working space,
not weights, inputs and the optimiser's state. On a CPU it is the running sum of the allocations and releases that
PyTorch's allocator reports to `torch.profiler`: exact for tensors, without what a library keeps for itself (oneDNN's
packed weights).
"""

import contextlib
import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

Result = TypeVar("Result")
Shape = torch.Size


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


def attention_flops(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """Two products, logits and output. query: (B, heads, L, d); key, value: (B, heads or fewer, S, d)."""
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[-2] * (width + value[-1])


def attention_backward_flops(gradient: Shape, query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """Five products: logits once more, and two gradients of each product of the forward pass."""
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[-2] * (3 * width + 2 * value[-1])


# PyTorch before 2.15 has no formula for the attention kernel of a CPU and counts nothing there.
CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
}


def flop_counter() -> FlopCounterMode:
    """PyTorch's counter, with formulas for the attention kernel of a CPU."""
    return FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION)


class FlopClock(Clock):
    """Reads FLOPs."""

    def __init__(self, counter: FlopCounterMode) -> None:
        super().__init__(torch.device("cpu"))
        self.counter = counter

    def read(self) -> int:
        return self.counter.get_total_flops()


class UncountedAttention(TorchDispatchMode):
    """Collects in `names` the attention operators that run without a formula, so that no ideal is silently wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket)
        known = func.overloadpacket in flop_registry or func.overloadpacket in CPU_ATTENTION
        if ("attn" in name or "attention" in name) and not known:
            self.names.add(name)
        return func(*args, **(kwargs or {}))


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
    free = proc_bytes("/proc/meminfo", "MemAvailable")
    if device.type != "cpu" or free is None:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_DATA)
    limit = (proc_bytes("/proc/self/status", "VmData") or 0) + free
    hard = before[1]
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


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
