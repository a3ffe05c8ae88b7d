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

VISION_TOWER, SCORE, SELECT_AND_PACK, CONNECTOR = "vision_tower", "score", "select_and_pack", "connector"
SEQUENCE, LANGUAGE_MODEL, DECODE_TOKEN = "sequence", "language_model", "decode_per_token"
FORWARD, BACKWARD, OPTIMISER = "forward", "backward", "optimiser_step"
TOTAL = "total"
ENCODING = (VISION_TOWER, SCORE, SELECT_AND_PACK, CONNECTOR)
STAGES = (*ENCODING, SEQUENCE, LANGUAGE_MODEL, FORWARD, BACKWARD, OPTIMISER, TOTAL, DECODE_TOKEN)  # as in tables

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


class FlopClock(Clock):
    """Reads FLOPs, while its `counter` is entered."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.counter = FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION)

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


class StageRecorder:
    """
    Reads `clock` wherever a pass of `model` (stock or STTS, with head) in its `with` block crosses the border of a
    stage, by hooks on modules. No other class hooks the model. Gradient checkpointing runs hooks a second time, so this
    is for inference only.

        start | ... | tower: layers 0..l | score, select, pack | layers l + 1.. | connector | ... | LLM and head | end

    Stock Molmo2 and STTS have the same borders. "sequence" is what the dots stand for: embedding, dropping
    placeholders, merging features, the mask. "select and pack" includes the gathers of survivors inside layer `l + 1`,
    before and after its attention, and the packing of bins after it.
    """

    def __init__(self, model: nn.Module, clock: Clock) -> None:
        self.clock = clock
        self.readings: dict[str, Any] = {}
        self._gathers: list[tuple[str, str]] = []  # parts of layer l + 1, and after it, that select and pack
        tower = model.get_submodule("model.vision_tower")
        modules: dict[str, nn.Module] = {
            "tower": tower,
            "connector": model.get_submodule("model.multi_modal_projector"),
            "language_model": model.get_submodule("model.language_model"),
        }
        pruning_layer = getattr(tower.config, "pruning_layer", None)
        if pruning_layer is not None:  # not stock Molmo2
            dense, pruned, *later = list(tower.get_submodule("layers").children())[pruning_layer : pruning_layer + 3]
            modules |= {"dense": dense, "pruned": pruned, "scorer": tower.get_submodule("scorer")}
            modules |= {name: pruned.get_submodule(name) for name in ("layer_norm1", "self_attn", "layer_norm2")}
            # The queries' gather, and the residual's, which cannot be told apart from its addition.
            self._gathers += [("layer_norm1_out", "self_attn_in"), ("self_attn_out", "layer_norm2_in")]
            if later and getattr(tower.config, "packing", None) == "first_fit_descending":
                modules["after_pruned"] = later[0]
                self._gathers.append(("pruned_out", "after_pruned_in"))
        self._hooks: list[Any] = []
        for name, module in modules.items():
            self._hooks.append(module.register_forward_pre_hook(functools.partial(self._read, f"{name}_in")))
            self._hooks.append(module.register_forward_hook(functools.partial(self._read, f"{name}_out")))

    def _read(self, name: str, *_: Any) -> None:
        self.readings.setdefault(name, self.clock.read())

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
        stages = {
            VISION_TOWER: self._between("tower_in", "tower_out"),
            CONNECTOR: self._between("tower_out", "connector_out"),
            TOTAL: self._between("start", "end"),
        }
        if "pruned_in" in self.readings:  # not at k = 1, where no later layer runs
            stages[SELECT_AND_PACK] = self._between("dense_out", "pruned_in")
            stages[SELECT_AND_PACK] += sum(self._between(*gather) for gather in self._gathers)
            if "scorer_out" in self.readings:  # untrained selectors have none
                stages[SCORE] = self._between("scorer_in", "scorer_out")
                stages[SELECT_AND_PACK] -= stages[SCORE]
        if "language_model_in" in self.readings:
            stages[SEQUENCE] = self._between("start", "tower_in") + self._between("connector_out", "language_model_in")
            stages[LANGUAGE_MODEL] = self._between("language_model_in", "end")
        return stages

    def _between(self, start: str, end: str) -> float:
        return self.clock.between(self.readings[start], self.readings[end])


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
