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
from pathlib import Path
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
    """
    Bytes that the machine, and a control group with a limit (Docker, Kubernetes, Slurm), could still give; None where
    the kernel does not say.
    """
    known = [_kilobytes("/proc/meminfo", "MemAvailable"), free_in_control_groups()]
    return min((count for count in known if count is not None), default=None)


def free_in_control_groups(membership: str = "/proc/self/cgroup", mounted: str = "/sys/fs/cgroup") -> int | None:
    """
    Bytes below the limits of the process's own control group and of those that it lies in, versions 1 and 2 alike;
    None without a limit. Cached files count as free, as in `MemAvailable`: the kernel drops them before it kills.
    """
    try:
        lines = Path(membership).read_text().splitlines()
    except OSError:
        return None
    free = []
    for line in lines:
        _, controllers, own = line.split(":", 2)
        if controllers == "":
            root, limit, usage, cached = Path(mounted), "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit, usage = Path(mounted, "memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"
            cached = "total_inactive_file"
        else:
            continue
        # A container may see only its own group, mounted as the root, under the path that it has outside.
        folder = root / own.lstrip("/")
        while True:
            allowed, used = _number(folder / limit), _number(folder / usage)
            if allowed is not None and used is not None:
                free.append(max(allowed - used + _statistic(folder / "memory.stat", cached), 0))
            if folder == root or root not in folder.parents:
                break
            folder = folder.parent
    return min(free, default=None)


def _number(path: Path) -> int | None:
    """The number in a file; None where there is no such file, or "max" in it."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _statistic(path: Path, field: str) -> int:
    try:
        pairs = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return 0
    return next((int(value) for name, value in pairs if name == field), 0)


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
