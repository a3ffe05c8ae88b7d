"""Measures workloads: one pass of warm-up that counts FLOPs and memory, then timed passes that take turns."""

import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._dynamo import exc as dynamo_errors
from torch._dynamo.exc import TorchDynamoException
from torch.utils.flop_counter import flop_registry

from stts_hf.benchmark.clocks import FlopClock, clock_of
from stts_hf.benchmark.flops import flop_counter
from stts_hf.benchmark.geometries import build_models, configure
from stts_hf.benchmark.memory import is_out_of_memory, limited_to_free_memory, peak_memory, release
from stts_hf.benchmark.passes import Runner
from stts_hf.benchmark.workloads import Workload, workload_inputs
from stts_hf.modeling.scoring_stts import num_kept_blocks

STOCK = "stock"
FEWEST_REPEATS = 3
# Compiled code and the kernels of other packages have no formulas in PyTorch's counter.
COUNTED_WITH_SDPA = ("flex_attention", "flash_attention_2", "flash_attention_3")
# What PyTorch says of tensors that a program put together wrongly, by a RuntimeError as a kernel's refusal is. There is
# no telling them apart but by their words, and not all of them: another one is noted as failed, with its type.
_MISTAKES = (
    "cannot be multiplied",
    "must match",
    "is invalid for input of size",
    "to be on the same device",
    "to have the same dtype",
)
_OLD_NAMES = ("cache_size_limit", "fail_on_cache_limit_hit")
_TOO_OFTEN: type[Exception] = getattr(dynamo_errors, "FailOnRecompileLimitHit", TorchDynamoException)
Counts = dict[tuple[Workload, float | None], dict[str, Any]]  # FLOPs of the stages of passes with sdpa


def variant_name(ratio: float | None) -> str:
    """What a variant is called in results: "stock", or its pruning ratio."""
    return STOCK if ratio is None else f"{ratio:g}"


def measure_workloads(
    workloads: Sequence[Workload],
    device: torch.device,
    repeats: int,
    seconds: float,
    on_pass: Callable[[str], None] = lambda _: None,
) -> Iterator[dict[str, Any]]:
    """
    Measures each workload on `device`, and yields a cell of the result for each as soon as it is there (see `measure`).

    Each gets a share of `seconds` in proportion to its cost and stops early, though never below 3 rounds, when that is
    spent; at most `repeats` rounds. One that does not fit into memory, or fails in a kernel, says so in its cell; the
    others go on.
    """
    models: Any = None
    counts: Counts = {}
    built_for = None
    deadline = time.perf_counter() + seconds
    _load_libraries(device)
    for index, workload in enumerate(workloads):
        remaining = sum(later.cost for later in workloads[index:])
        share = max(deadline - time.perf_counter(), 0) * workload.cost / remaining
        cell: dict[str, Any] = {"workload": dataclasses.asdict(workload), "title": workload.title}
        with limited_to_free_memory(device), _old_objects_out_of_sight(), _compiled_anew():
            try:
                if built_for != (workload.geometry, workload.dtype):
                    models = None
                    release(device)
                    models = build_models(workload.geometry, getattr(torch, workload.dtype), device)
                    built_for = (workload.geometry, workload.dtype)
                cell |= measure(workload, models, device, repeats, share, on_pass, counts)
            except Exception as error:
                cell |= {**_failure(error), "variants": []}
        release(device)
        yield cell


def measure(
    workload: Workload,
    models: Any,
    device: torch.device,
    repeats: int,
    seconds: float,
    on_pass: Callable[[str], None] = lambda _: None,
    counts: Counts | None = None,
) -> dict[str, Any]:
    """
    Measures one workload: `{"status", "order", "variants"}`, each variant with `stages` (raw `seconds` of every round
    and `flops`), `peak_memory` and `resident_memory` in bytes, and how many tokens it kept.

    `counts` holds FLOPs that were counted with sdpa before, and takes in what is.
    `order` is the order in which variants ran in each timed round: stock and each ratio take turns, and every round
    begins with another of them, so that whatever drifts drifts for all.
    """
    _configure(models, workload, workload.backend)
    runner = Runner(workload, models, workload_inputs(workload, models[0].config, device))
    variants: dict[float | None, dict[str, Any]] = {}
    counts = {} if counts is None else counts
    for ratio in (None, *workload.ratios):
        variants[ratio] = variant = describe(workload, models[0].config, ratio)
        with _noting_failure(variant, device):
            flops, variant["peak_memory"] = _warm_up(runner, ratio, device, counts, variant)
            variant["resident_memory"] = runner.resident_memory()
            variant["stages"] = {stage: {"flops": count, "seconds": []} for stage, count in flops.items()}
        on_pass(workload.title)
    able = [ratio for ratio, variant in variants.items() if variant["status"] == "ok"]
    clock, order, started = clock_of(device), [], time.perf_counter()
    for done in range(repeats):
        spent = time.perf_counter() - started
        if not able or (done >= FEWEST_REPEATS and spent * (done + 1) / done > seconds):
            break
        first = done % len(able)
        turn = able[first:] + able[:first]
        for ratio in turn:
            _clear_away(device)
            with _noting_failure(variants[ratio], device):
                for stage, taken in runner.run(ratio, clock).items():
                    variants[ratio]["stages"][stage]["seconds"].append(taken)
            on_pass(workload.title)
        order.append([variant_name(ratio) for ratio in turn])
        able = [ratio for ratio in able if variants[ratio]["status"] == "ok"]
    return {"status": "ok", "order": order, "variants": list(variants.values())}


def describe(workload: Workload, config: Any, ratio: float | None) -> dict[str, Any]:
    """Name, ratio, and how many video tokens and tokens in all a row of the language model's sequence has."""
    rows, cols = config.vision_config.block_grid
    blocks = workload.frames * rows * cols
    kept = blocks if ratio is None else num_kept_blocks(workload.frames, rows * cols, ratio)
    others = workload.frames * (workload.timestamp_tokens + 2) + workload.text_tokens
    return {
        "name": variant_name(ratio),
        "pruning_ratio": ratio,
        "status": "ok",
        "video_tokens": kept,
        "row_tokens": kept + others if workload.mode != "tower" else None,
    }


def _warm_up(
    runner: Runner, ratio: float | None, device: torch.device, counts: Counts, variant: dict[str, Any]
) -> tuple[dict[str, float | None], int]:
    """
    FLOPs of every stage, and the peak memory of a pass. FLOPs that cannot be counted are None, and `variant` then says
    why in `not_counted`.
    """
    _clear_away(device)
    workload = runner.workload
    same_shape = (dataclasses.replace(workload, backend="sdpa", ratios=()), ratio)
    if workload.backend not in COUNTED_WITH_SDPA:
        stages, peak = peak_memory(lambda: _count(runner, ratio), device)
        if workload.backend == "sdpa":
            counts[same_shape] = stages
        counted: dict[str, float] = stages
    else:
        failure: dict[str, str] = {}
        if same_shape not in counts:
            with _noting_failure(failure, device):  # sdpa may need more memory than there is, and this backend less
                counts[same_shape] = _count_with_sdpa(runner, ratio)
        if failure:
            variant["not_counted"] = f"with sdpa, by which they are counted: {failure['status']} ({failure['reason']})"
        _clear_away(device)
        stages, peak = peak_memory(lambda: runner.run(ratio, clock_of(device)), device)
        counted = counts.get(same_shape, {})
    if ratio is not None and _has_no_formula(workload, device):
        variant["not_counted"] = "this PyTorch has no formula for its variable-length attention"
        counted = {}
    return {stage: counted.get(stage) for stage in stages}, peak


def _count(runner: Runner, ratio: float | None) -> dict[str, float]:
    with flop_counter() as counter:
        return runner.run(ratio, FlopClock(counter))


def _count_with_sdpa(runner: Runner, ratio: float | None) -> dict[str, float]:
    """FLOPs of the same pass with PyTorch's kernels, which are counted as attention in full, mask or not."""
    workload, models = runner.workload, (runner.model, runner.stock)
    _configure(models, workload, "sdpa")
    try:
        return _count(runner, ratio)
    finally:
        _configure(models, workload, workload.backend)


def _configure(models: Any, workload: Workload, backend: str) -> None:
    training = workload.mode == "training"
    configure(models, workload.layout, backend, training, workload.checkpointing and training)


def _has_no_formula(workload: Workload, device: torch.device) -> bool:
    """Whether sdpa in the vision tower is PyTorch's variable-length kernel, of a version that does not count it."""
    operator = getattr(torch.ops.torch_attn, "_varlen_attn", None)
    takes_it = device.type == "cuda" and workload.dtype != "float32" and workload.backend != "eager"
    return takes_it and operator is not None and operator not in flop_registry


def _clear_away(device: torch.device) -> None:
    """Before a pass: nothing of the last one is left. CUDA's cache stays, as it would in use."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    gc.collect()


def _load_libraries(device: torch.device) -> None:
    """On CUDA the first matrix product allocates cuBLAS's working space for good: no pass's memory."""
    if device.type == "cuda":
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            some = torch.ones(16, 16, device=device, dtype=dtype)
            torch.mm(some, some)


@contextlib.contextmanager
def _compiled_anew() -> Iterator[None]:
    """
    Each workload compiles for its own shapes. By default PyTorch gives up at the ninth and goes on uncompiled, which
    for flex_attention is another algorithm; here that many are allowed, and more fail.
    """
    torch.compiler.reset()
    new_names = hasattr(torch._dynamo.config, "recompile_limit")  # since PyTorch 2.7
    names = ("recompile_limit", "fail_on_recompile_limit_hit") if new_names else _OLD_NAMES
    with torch._dynamo.config.patch(dict(zip(names, (64, True), strict=True))):
        yield


@contextlib.contextmanager
def _old_objects_out_of_sight() -> Iterator[None]:
    """Collecting garbage before each pass looks at what measuring made, not at all that was ever imported."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def _noting_failure(variant: dict[str, Any], device: torch.device) -> Iterator[None]:
    """A pass that does not fit, or compile, or run on this device, is noted in its variant; the others go on."""
    try:
        yield
        return
    except Exception as error:
        variant |= _failure(error)
    release(device)  # not before the exception is gone, which holds on to the pass's tensors


def _failure(error: Exception) -> dict[str, str]:
    """
    Status and reason of a failure that is this shape's, backend's or device's own. Raises every other error again, as
    far as they can be told apart: that is a mistake in a program.
    """
    message = " ".join(str(error).split())[:300]
    if is_out_of_memory(error):
        return {"status": "out of memory", "reason": message}
    if isinstance(error, (TorchDynamoException, _TOO_OFTEN)):
        return {"status": "does not compile", "reason": message}
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _MISTAKES):
        raise error
    # A kernel's refusal is a RuntimeError, but Triton's errors ("out of resource: shared memory") have no such base.
    if isinstance(error, RuntimeError) or type(error).__module__.partition(".")[0] == "triton":
        return {"status": "failed", "reason": f"{type(error).__name__}: {message}"}
    raise error
