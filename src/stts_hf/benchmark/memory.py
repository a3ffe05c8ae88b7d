"""Peak memory of a pass, and what to do where there is not enough.

What counts is what a pass needs beyond what lies in memory before it: activations, gradients, caches and working space,
not weights, inputs and the optimiser's state. On CUDA that is `max_memory_allocated` over `memory_allocated`. On a CPU
it is the running sum of every allocation and release that PyTorch's allocator reports to `torch.profiler`: exact for
tensors, blind to what a library keeps for itself (oneDNN's packed weights).
"""

import contextlib
import gc
import os
import resource
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

Result = TypeVar("Result")

_OUT_OF_MEMORY = (
    "can't allocate memory",
    "bad allocation",
    "std::bad_alloc",
    "out of memory",
    "not enough memory",
    "STATUS_ALLOC_FAILED",  # cuBLAS and cuDNN, which want memory of their own
)


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
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    happened: list[Any] = profiler.profiler.kineto_results.events()
    events = [event for event in happened if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return result, most


def is_out_of_memory(error: BaseException) -> bool:
    """Whether PyTorch, on whichever device, failed for want of memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _OUT_OF_MEMORY)


@contextlib.contextmanager
def limited_to_free_memory(device: torch.device) -> Iterator[None]:
    """
    Lets allocations on a CPU fail, while it lasts, instead of driving the machine out of memory: the kernel would then
    kill the process, and every result with it. Elsewhere does nothing; the device has a limit of its own.
    """
    free = free_memory()
    if device.type != "cpu" or free is None:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_lowest(_data_size() + free, before[1]), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def free_memory() -> int | None:
    """Bytes that the machine could still give, or None where the kernel does not say."""
    return _kilobytes("/proc/meminfo", "MemAvailable")


def total_memory() -> int:
    """Bytes of memory in the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def release(device: torch.device) -> None:
    """Throws away what nobody holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _data_size() -> int:
    return _kilobytes("/proc/self/status", "VmData") or 0


def _kilobytes(path: str, field: str) -> int | None:
    with contextlib.suppress(FileNotFoundError), open(path) as lines:
        for line in lines:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return None


def _lowest(wanted: int, hard: int) -> int:
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    """The profiler's library writes notes of its own, past Python, over the progress bar."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
