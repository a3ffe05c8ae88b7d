"""Measures workloads: one warm-up pass that counts FLOPs and memory, then timed passes of stock and STTS in turns."""

import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._dynamo.exc import FailOnRecompileLimitHit

from stts_hf.benchmark.clocks import Clock, FlopClock, UncountedAttention, clock_of, flop_counter
from stts_hf.benchmark.geometries import Models, build_models, configure
from stts_hf.benchmark.memory import is_out_of_memory, limited_to_free_memory, peak_memory
from stts_hf.benchmark.stages import BACKWARD, DECODE_TOKEN, FORWARD, OPTIMISER, TOTAL, StageRecorder
from stts_hf.benchmark.workloads import Workload, workload_inputs
from stts_hf.modeling.scoring_stts import num_kept_blocks

STOCK = "stock"
FEWEST_REPEATS = 3
# Compiled code and the kernels of other packages have no formulas in PyTorch's counter.
COUNTED_WITH_SDPA = ("flex_attention", "flash_attention_2", "flash_attention_3")


class Runner:
    """Runs passes of one workload, by stock Molmo2 or by STTS. inputs: from `workload_inputs`."""

    def __init__(self, workload: Workload, models: Models, inputs: dict[str, Any]) -> None:
        self.workload = workload
        self.model, self.stock = models
        self.inputs = inputs
        self.optimiser: torch.optim.Optimizer | None = None
        if workload.mode == "training":
            # Trainer's own choice. A step of size zero costs what any step costs, and keeps the weights.
            self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=0.0, weight_decay=0.0, fused=True)
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            self.optimiser.step()  # makes the optimiser's state, which no pass shall pay for
            self.optimiser.zero_grad(set_to_none=True)

    def run(self, ratio: float | None, clock: Clock) -> dict[str, float]:
        """One pass at pruning ratio `k`, or by stock Molmo2 for None. Returns what `clock` says of each stage."""
        model = self.stock if ratio is None else self.model
        call = {} if ratio is None else {"pruning_ratio": ratio}
        if self.optimiser is not None:
            return self._train(model, call, clock, self.optimiser)
        recorder = StageRecorder(model, clock)
        try:
            with torch.no_grad():
                recorder.start()
                if self.workload.mode == "tower":
                    names = ("pixel_values_videos", "video_token_pooling", "video_grids")
                    model.model.get_video_features(**{name: self.inputs[name] for name in names}, **call)
                    recorder.mark("end")
                    return recorder.vision_stages()
                outputs = model(**self.inputs, **call, logits_to_keep=1, use_cache=True)
                recorder.mark("end")
                stages = recorder.prompt_stages()
                return stages | self._decode(model, outputs.past_key_values, clock)
        finally:
            recorder.close()

    def _decode(self, model: Any, cache: Any, clock: Clock) -> dict[str, float]:
        count, mask = self.workload.decode_tokens, self.inputs["attention_mask"]
        if not count:
            return {}
        start = clock.read()
        for _ in range(count):
            mask = torch.cat([mask, mask[:, :1]], dim=-1)
            tokens = self.inputs["input_ids"][:, -1:]
            model(input_ids=tokens, attention_mask=mask, past_key_values=cache, use_cache=True)
        end = clock.read()
        clock.synchronize()
        return {DECODE_TOKEN: clock.between(start, end) / count}

    def _train(
        self, model: Any, call: dict[str, float], clock: Clock, optimiser: torch.optim.Optimizer
    ) -> dict[str, float]:
        clock.synchronize()
        readings = [clock.read()]
        try:
            loss = model(**self.inputs, **call, use_cache=False).loss
            for step in (lambda: None, loss.backward, optimiser.step):
                step()
                readings.append(clock.read())
            clock.synchronize()
        finally:
            optimiser.zero_grad(set_to_none=True)
        stages = dict(zip((FORWARD, BACKWARD, OPTIMISER), map(clock.between, readings, readings[1:]), strict=False))
        return stages | {TOTAL: clock.between(readings[0], readings[-1])}


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
    Measures each workload on `device` and yields its cell of the result (see `measure`) as soon as it is complete.

    Each gets a share of `seconds` in proportion to its cost and stops early, though never below 3 rounds, when that is
    spent; at most `repeats` rounds. One that does not fit into memory, or fails in a kernel, says so in its cell.
    """
    models: Models | None = None
    built_for = None
    deadline = time.perf_counter() + seconds
    for dtype in (torch.float32, torch.bfloat16, torch.float16):  # allocates cuBLAS's working space, which is no pass's
        torch.ones(16, 16, device=device, dtype=dtype).mm(torch.ones(16, 16, device=device, dtype=dtype))
    for index, workload in enumerate(workloads):
        remaining = sum(later.cost for later in workloads[index:])
        share = max(deadline - time.perf_counter(), 0) * workload.cost / remaining
        cell: dict[str, Any] = {"workload": dataclasses.asdict(workload), "title": workload.title}
        with _prepared(workload, device):
            try:
                if models is None or built_for != (workload.geometry, workload.dtype):
                    models = None
                    _clear_away(device, cache=True)
                    models = build_models(workload.geometry, getattr(torch, workload.dtype), device)
                    built_for = (workload.geometry, workload.dtype)
                cell |= measure(workload, models, device, repeats, share, on_pass)
            except Exception as error:
                cell |= {**_failure(error), "variants": []}
        _clear_away(device, cache=True)
        yield cell


def measure(
    workload: Workload,
    models: Models,
    device: torch.device,
    repeats: int,
    seconds: float,
    on_pass: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """
    Measures one workload: `{"status", "order", "variants"}`, stock first among the variants, each with `stages` (raw
    `seconds` of every round and `flops`), `peak_memory` in bytes, and how many tokens were left.

    `order` is the order in which variants ran in each timed round: stock and each ratio take turns, and every round
    begins with another of them, so that drift of the machine affects all alike.
    """
    configure(models, workload, workload.backend)
    runner = Runner(workload, models, workload_inputs(workload, models[0].config, device))
    variants: dict[float | None, dict[str, Any]] = {}
    for ratio in (None, *workload.ratios):
        variants[ratio] = variant = describe(workload, models[0].config, ratio)
        with _noting_failure(variant, device):
            variant |= _warm_up(runner, ratio, device)
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
    """Name, ratio, and how many tokens a row has: of the video in mode "tower", else in the language model."""
    rows, cols = config.vision_config.block_grid
    tokens = num_kept_blocks(workload.frames, rows * cols, ratio or 0.0)
    if workload.mode != "tower":
        tokens += workload.frames * (workload.timestamp_tokens + 2) + workload.text_tokens
    return {"name": variant_name(ratio), "pruning_ratio": ratio, "status": "ok", "tokens": tokens}


def _warm_up(runner: Runner, ratio: float | None, device: torch.device) -> dict[str, Any]:
    """`stages` with their FLOPs, `peak_memory`, and `not_counted` with the reason where FLOPs are None."""
    _clear_away(device)
    models, workload = (runner.model, runner.stock), runner.workload
    with_sdpa = workload.backend in COUNTED_WITH_SDPA
    configure(models, workload, "sdpa" if with_sdpa else workload.backend)
    (flops, not_counted), peak = peak_memory(lambda: _count(runner, ratio), device)
    if with_sdpa:
        configure(models, workload, workload.backend)
        _clear_away(device)
        _, peak = peak_memory(lambda: runner.run(ratio, clock_of(device)), device)
    variant: dict[str, Any] = {"stages": {}, "peak_memory": peak} | (
        {"not_counted": not_counted} if not_counted else {}
    )
    for stage, count in flops.items():
        variant["stages"][stage] = {"flops": None if not_counted else count, "seconds": []}
    return variant


def _count(runner: Runner, ratio: float | None) -> tuple[dict[str, float], str]:
    """FLOPs of every stage, with attention counted in full, mask or not; and what makes them worthless, if anything."""
    with flop_counter() as counter, UncountedAttention() as uncounted:
        flops = runner.run(ratio, FlopClock(counter))
    names = ", ".join(sorted(uncounted.names))
    return flops, f"this PyTorch has no formula for {names}" if names else ""


def _clear_away(device: torch.device, cache: bool = False) -> None:
    """Frees what the last pass left. CUDA's cache stays before a pass, as it would in use."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    gc.collect()
    if device.type == "cuda" and cache:
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _prepared(workload: Workload, device: torch.device) -> Iterator[None]:
    """
    Allocations fail rather than the machine; collecting garbage before each pass skips what was imported before; and
    flex_attention is compiled anew. PyTorch would go on uncompiled, which is another algorithm, after eight shapes;
    here 64 are allowed, and more fail.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(limited_to_free_memory(device))
        if workload.backend == "flex_attention":
            torch.compiler.reset()
            stack.enter_context(torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True))
        gc.collect()
        gc.freeze()
        stack.callback(gc.unfreeze)
        yield


@contextlib.contextmanager
def _noting_failure(variant: dict[str, Any], device: torch.device) -> Iterator[None]:
    """A pass that does not fit, or compile, or run on this device, is noted in its variant; the others go on."""
    try:
        yield
        return
    except Exception as error:
        variant |= _failure(error)
    _clear_away(device, cache=True)  # after the exception is gone, which refers to the pass's tensors


def _failure(error: Exception) -> dict[str, str]:
    """Status and reason of a failure that may be the shape's or the kernel's; raises every other error again."""
    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if is_out_of_memory(error):
        return {"status": "out of memory", "reason": reason}
    # Triton's errors ("out of resource: shared memory") are no RuntimeError.
    kernels = isinstance(error, RuntimeError | FailOnRecompileLimitHit) or type(error).__module__.startswith("triton")
    if not kernels:
        raise error
    return {"status": "failed", "reason": reason}
