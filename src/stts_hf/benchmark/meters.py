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

from stts_hf.parts import CONNECTOR, LANGUAGE_MODEL, SCORER, VISION_TOWER

SCORE, SELECT_AND_PACK, SEQUENCE, DECODE_TOKEN = "score", "select_and_pack", "sequence", "decode_per_token"
FORWARD, BACKWARD, OPTIMISER = "forward", "backward", "optimiser_step"
TOTAL = "total"
ENCODING = (VISION_TOWER, SCORE, SELECT_AND_PACK, CONNECTOR)
STAGES = (*ENCODING, SEQUENCE, LANGUAGE_MODEL, FORWARD, BACKWARD, OPTIMISER, TOTAL, DECODE_TOKEN)  # as in tables

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


def attention_formula(operator: Any) -> Callable[..., int]:
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


# PyTorch's counter has no formula for the kernels of a CPU before 2.15, and counts causal attention as if every query
# saw every key, which no kernel computes.
ATTENTION = {
    operator: attention_formula(operator)
    for kernel in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
    for operator in (
        getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}"),
        getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_backward"),
    )
}


class FlopClock(Clock):
    """Reads FLOPs, while its `counter` is entered."""

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
        name = str(func.overloadpacket)
        known = func.overloadpacket in flop_registry or func.overloadpacket in ATTENTION
        if ("attn" in name or "attention" in name) and not known:
            self.names.add(name)
        return func(*args, **(kwargs or {}))


class StageRecorder:
    """
    Reads `clock` wherever a pass of `model` (stock or STTS, with head) in its `with` block crosses the border of a
    stage, by hooks on modules, which the backbone's `parts` name. No other class hooks the model. Gradient
    checkpointing runs hooks a second time, so this is for inference only.

        start | ... | tower: layers 0..l | score, select, pack | layers l + 1.. | connector | ... | LLM and head | end

    The stock model and STTS have the same borders. "sequence" is what the dots stand for: embedding, dropping
    placeholders, merging features, positions, the mask. "select and pack" includes the gathers of survivors inside
    layer `l + 1`, before and after its attention, and the packing after it; where queries are gathered within the
    attention, that is the attention's. A connector within the tower is counted as the connector's.
    """

    def __init__(self, model: nn.Module, clock: Clock) -> None:
        self.clock = clock
        self.readings: dict[str, Any] = {}
        self._pooling: list[list[Any]] = []  # readings before and after each call of a connector within the tower
        self._gathers: list[tuple[str, str]] = []  # parts of layer l + 1, and after it, that select and pack
        self._hooks: list[Any] = []
        backbone: Any = model.get_submodule("model")
        of_part: dict[str, dict[str, nn.Module]] = {}
        for name, part in backbone.parts.items():
            if part != SCORER:  # which the stock model lacks
                of_part.setdefault(part, {})[name] = backbone.get_submodule(name)
        ((place, tower),) = of_part[VISION_TOWER].items()
        modules = {"tower": tower, **of_part[LANGUAGE_MODEL]}
        for name, connector in of_part[CONNECTOR].items():
            if name.startswith(f"{place}."):
                for module in connector if isinstance(connector, nn.ModuleList) else [connector]:
                    self._hooks.append(module.register_forward_pre_hook(self._begin))
                    self._hooks.append(module.register_forward_hook(self._end))
            else:
                modules["connector"] = connector
        pruning_layer = getattr(tower.config, "pruning_layer", None)
        if pruning_layer is not None:  # not the stock model
            modules |= self._parts_of_layers(tower, pruning_layer)
        for name, module in modules.items():
            self._hooks.append(module.register_forward_pre_hook(functools.partial(self._read, f"{name}_in")))
            self._hooks.append(module.register_forward_hook(functools.partial(self._read, f"{name}_out")))

    def _parts_of_layers(self, tower: Any, pruning_layer: int) -> dict[str, nn.Module]:
        """What is hooked of layer `l`, layer `l + 1` and the scorer."""
        depth = tower.config.num_hidden_layers
        layers = next(it for it in tower.children() if isinstance(it, nn.ModuleList) and len(it) == depth)
        dense, pruned, *later = list(layers)[pruning_layer : pruning_layer + 3]
        children = dict(pruned.named_children())
        first_norm, second_norm = (module for name, module in children.items() if "norm" in name)
        attention = next(module for name, module in children.items() if "attn" in name)
        # The queries' gather, and the residual's, which cannot be told apart from its addition.
        self._gathers += [("first_norm_out", "attention_in"), ("attention_out", "second_norm_in")]
        found = {"dense": dense, "pruned": pruned, "scorer": tower.scorer, "attention": attention}
        found |= {"first_norm": first_norm, "second_norm": second_norm}
        if later:
            found["after_pruned"] = later[0]
            self._gathers.append(("pruned_out", "after_pruned_in"))
        return found

    def _read(self, name: str, *_: Any) -> None:
        self.readings.setdefault(name, self.clock.read())

    def _begin(self, *_: Any) -> None:
        self._pooling.append([self.clock.read()])

    def _end(self, *_: Any) -> None:
        self._pooling[-1].append(self.clock.read())

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
        within = sum(self.clock.between(*readings) for readings in self._pooling)
        encoded = "connector_out" if "connector_out" in self.readings else "tower_out"
        stages = {
            VISION_TOWER: self._between("tower_in", "tower_out") - within,
            CONNECTOR: self._between("tower_out", encoded) + within,
            TOTAL: self._between("start", "end"),
        }
        if "pruned_in" in self.readings:  # not at k = 1, where no later layer need run
            stages[SELECT_AND_PACK] = self._between("dense_out", "pruned_in")
            stages[SELECT_AND_PACK] += sum(self._between(*gather) for gather in self._gathers)
            if "scorer_out" in self.readings:  # untrained selectors have none
                stages[SCORE] = self._between("scorer_in", "scorer_out")
                stages[SELECT_AND_PACK] -= stages[SCORE]
        if "language_model_in" in self.readings:
            stages[SEQUENCE] = self._between("start", "tower_in") + self._between(encoded, "language_model_in")
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
