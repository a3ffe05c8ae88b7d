"""Peak memory of a pass, and a limit that turns want of memory into an error.

The peak is what a pass needs beyond what is allocated before it: activations, gradients, caches and working space, not
weights, inputs and the optimiser's state. On CUDA that is `max_memory_allocated` less `memory_allocated`. On a CPU it
is the running sum of the allocations and releases that PyTorch's allocator reports to `torch.profiler`: exact for
tensors, without what a library keeps for itself (oneDNN's packed weights).
"""

import contextlib
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

Result = TypeVar("Result")


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


def is_out_of_memory(error: BaseException) -> bool:
    """Whether PyTorch, on whichever device, failed for want of memory."""
    signs = ("can't allocate memory", "bad_alloc", "bad allocation", "out of memory", "STATUS_ALLOC_FAILED")
    said = isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
    return said or isinstance(error, MemoryError | torch.OutOfMemoryError)


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
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
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
