"""Measures workloads: one pass of warm-up that counts FLOPs and memory, then timed passes that take turns."""

import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._dynamo.exc import TorchDynamoException
from torch.utils.flop_counter import FlopCounterMode

from stts_hf.benchmark.clocks import FlopClock, clock_of
from stts_hf.benchmark.geometries import build_models, configure
from stts_hf.benchmark.memory import is_out_of_memory, limited_to_free_memory, peak_memory, release
from stts_hf.benchmark.passes import Runner
from stts_hf.benchmark.workloads import Workload, workload_inputs
from stts_hf.modeling.scoring_stts import num_kept_blocks

STOCK = "stock"
FEWEST_REPEATS = 3


def variant_name(ratio: float | None) -> str:
    """What a variant is called in results: "stock", or its pruning ratio."""
    return STOCK if ratio is None else f"{ratio:g}"


def measure_workloads(
    workloads: Sequence[Workload],
    device: torch.device,
    repeats: int,
    seconds: float,
    on_pass: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """
    Measures each workload on `device`, and returns a cell of the result for each (see `measure`).

    Each gets a share of `seconds` in proportion to its cost and stops early, though never below 3 rounds, when that is
    spent; at most `repeats` rounds. One that does not fit into memory says so in its cell; the others go on.
    """
    cells = []
    models: Any = None
    built_for = None
    deadline = time.perf_counter() + seconds
    for index, workload in enumerate(workloads):
        remaining = sum(later.cost for later in workloads[index:])
        share = max(deadline - time.perf_counter(), 0) * workload.cost / remaining
        cell: dict[str, Any] = {"workload": dataclasses.asdict(workload), "title": workload.title}
        with limited_to_free_memory(device), _old_objects_out_of_sight():
            try:
                if built_for != (workload.geometry, workload.dtype):
                    models = None
                    release(device)
                    models = build_models(workload.geometry, getattr(torch, workload.dtype), device)
                    built_for = (workload.geometry, workload.dtype)
                cell |= measure(workload, models, device, repeats, share, on_pass)
            except Exception as error:
                cell |= {"status": _why_it_failed(error), "reason": _one_line(error), "variants": []}
        cells.append(cell)
        release(device)
    return cells


def measure(
    workload: Workload,
    models: Any,
    device: torch.device,
    repeats: int,
    seconds: float,
    on_pass: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """
    Measures one workload: `{"status", "order", "variants"}`, each variant with `stages` (raw `seconds` of every round
    and `flops`), `peak_memory` and `resident_memory` in bytes, and how many tokens it kept.

    `order` is the order in which variants ran in each timed round: stock and each ratio take turns, and every round
    begins with another of them, so that whatever drifts drifts for all.
    """
    training = workload.mode == "training"
    configure(models, workload.layout, workload.backend, training, workload.checkpointing and training)
    runner = Runner(workload, models, workload_inputs(workload, models[0].config, device))
    variants: dict[float | None, dict[str, Any]] = {}
    for ratio in (None, *workload.ratios):
        variants[ratio] = variant = describe(workload, models[0].config, ratio)
        with _noting_want_of_memory(variant, device):
            flops, variant["peak_memory"] = _warm_up(runner, ratio, device)
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
            with _noting_want_of_memory(variants[ratio], device):
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


def _warm_up(runner: Runner, ratio: float | None, device: torch.device) -> tuple[dict[str, float], int]:
    """FLOPs of every stage, and the peak memory of a pass."""
    _clear_away(device)

    def count() -> dict[str, float]:
        with FlopCounterMode(display=False) as counter:
            return runner.run(ratio, FlopClock(counter))

    workload, models = runner.workload, (runner.model, runner.stock)
    if workload.backend != "flex_attention":
        return peak_memory(count, device)
    # Compiled code cannot be counted; the products are those of masked attention in full.
    training = workload.mode == "training"
    configure(models, workload.layout, "sdpa", training, workload.checkpointing and training)
    flops = count()
    configure(models, workload.layout, workload.backend, training, workload.checkpointing and training)
    _clear_away(device)
    _, peak = peak_memory(lambda: runner.run(ratio, clock_of(device)), device)
    return flops, peak


def _clear_away(device: torch.device) -> None:
    """Before a pass: nothing of the last one is left. CUDA's cache stays, as it would in use."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    gc.collect()


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
def _noting_want_of_memory(variant: dict[str, Any], device: torch.device) -> Iterator[None]:
    """A pass that does not fit, or compile, is noted in its variant; the others go on."""
    try:
        yield
        return
    except Exception as error:
        variant |= {"status": _why_it_failed(error), "reason": _one_line(error)}
    release(device)  # not before the exception is gone, which holds on to the pass's tensors


def _why_it_failed(error: Exception) -> str:
    """What a result says of a failure that is this shape's or backend's own. Raises every other error again."""
    if is_out_of_memory(error):
        return "out of memory"
    if isinstance(error, TorchDynamoException):
        return "does not compile"
    raise error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
