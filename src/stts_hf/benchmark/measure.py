"""Measures workloads: a warm-up pass per variant counts FLOPs and memory; then stock and STTS are timed in turns."""

import contextlib
import datetime
import gc
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.exc import FailOnRecompileLimitHit
from tqdm import tqdm
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from stts_hf.benchmark import meters
from stts_hf.benchmark.geometries import GEOMETRIES, workload_inputs
from stts_hf.benchmark.meters import Clock, StageRecorder
from stts_hf.benchmark.models import Models, build_models, configure, set_pruning, stock_inputs
from stts_hf.benchmark.presets import Preset, Workload
from stts_hf.benchmark.report import SCHEMA
from stts_hf.errors import is_out_of_memory
from stts_hf.modeling.budget_stts import KeepRule
from stts_hf.versions import __version__

PACKAGES = ("torch", "transformers", "av", "numpy", "flash-attn")
FLASH_BACKENDS = {"flash_attention_2": is_flash_attn_2_available, "flash_attention_3": is_flash_attn_3_available}
# PyTorch's counter has no formulas for compiled code and other packages' kernels.
COUNTED_WITH_SDPA = ("flex_attention", *FLASH_BACKENDS)

Variant = dict[str, Any]


def check_runnable(preset: Preset, device: torch.device) -> None:
    """Raises `ValueError` if a preset cannot run on `device`, before anything slow happens."""
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {device} cannot be timed; choose cpu or cuda")
    if preset.needs_gpu and device.type == "cpu":
        raise ValueError(f"preset {preset.name!r} is for a GPU, and --device is cpu: {preset.needs_gpu}")
    for workload in preset.workloads:
        if workload.clock == "processor" and device.type == "cuda":
            raise ValueError("--clocks processor does not count a GPU's seconds; leave it out, or use --device cpu")
        needs = ""
        if workload.backend in COUNTED_WITH_SDPA and device.type == "cpu":
            needs = "a GPU"
        elif workload.backend in FLASH_BACKENDS and not FLASH_BACKENDS[workload.backend]():
            needs = "its package"
        if needs:
            raise ValueError(f"backend {workload.backend!r} needs {needs}; or use --backends sdpa")
        set_pruning(GEOMETRIES[workload.geometry].config(), workload)


def measure_cells(
    name: str, cells: Iterable[dict[str, Any]], device: torch.device, command: str
) -> Iterator[dict[str, Any]]:
    """Yields the result so far after each of the `cells`, and once more with `"finished": True`."""
    clock = time.perf_counter()
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "preset": name,
        "command": command,
        "started": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M UTC}",
        "finished": False,
        "machine": describe_machine(device),
        "versions": describe_versions(),
        "cells": [],
    }
    for cell in cells:
        result["cells"].append(cell)
        result["seconds"] = time.perf_counter() - clock
        result["machine"]["load_after"] = os.getloadavg()[0]
        yield result
    yield result | {"finished": True}


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Processor, cores and threads in use, memory in bytes, GPU, and the load average."""
    about = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = (line.partition(":")[2].strip() for line in about if line.startswith("model name"))
    machine: dict[str, Any] = {
        "cpu": next(names, platform.machine()),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "device": str(device),
        "load_before": os.getloadavg()[0],
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        machine |= {"gpu": properties.name, "gpu_memory": properties.total_memory, "cuda": torch.version.cuda}
    return machine


def describe_versions() -> dict[str, str]:
    """Versions of the packages, and in a checkout the commit, with "+" after it if the code differs from it."""
    versions = {"stts_hf": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    root = Path(__file__).resolve().parents[3]
    git = ["git", "-C", str(root)]
    if (root / ".git").exists():
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            commit = subprocess.check_output([*git, "rev-parse", "--short=12", "HEAD"], text=True).strip()
            changed = subprocess.call([*git, "diff", "--quiet", "HEAD", "--", "modeling", "src"])
            versions["commit"] = commit + ("+" if changed else "")
    return versions


class Runner:
    """Runs passes of one workload by the stock model or by STTS. inputs: from `workload_inputs`."""

    def __init__(self, workload: Workload, models: Models, inputs: dict[str, Any]) -> None:
        self.workload, self.inputs = workload, inputs
        self.model, self.stock = models
        if workload.mode == "training":
            # Trainer's default. A step of size zero takes as long as any other and keeps the weights.
            self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=0.0, weight_decay=0.0, fused=True)
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            self.optimiser.step()  # allocates the optimiser's state before any pass is measured
            self.optimiser.zero_grad(set_to_none=True)

    def run(self, ratio: float | None, clock: Clock) -> dict[str, float]:
        """One pass at pruning ratio `k`, or by the stock model for None. Returns the clock's reading of each stage."""
        if ratio is None:
            model, inputs = self.stock, stock_inputs(self.stock, self.inputs)
        else:
            model, inputs = self.model, self.inputs | {"pruning_ratio": ratio}
        if self.workload.mode == "training":
            return self._train(model, inputs, clock)
        with torch.no_grad(), StageRecorder(model, clock) as recorder:
            if self.workload.mode == "tower":
                names = (*self.model.model.video_inputs, "pixel_values", "pruning_ratio")
                encode = getattr(model.model, "get_video_features", model.model.get_image_features)
                encode(**{name: inputs[name] for name in names if name in inputs})
                cache = None
            else:
                cache = model(**inputs, logits_to_keep=1, use_cache=True).past_key_values
        return recorder.stages() | (self._decode(model, cache, clock) if cache else {})

    def count_tokens(self, ratio: float) -> int:
        """Tokens per row at pruning ratio `k`: of the video in mode "tower", else in the language model."""
        plan = self.model.model.make_plan(self.inputs, KeepRule(ratio))
        others = self.inputs["input_ids"].shape[1] - plan.num_blocks[0]
        return plan.num_kept[0] + (0 if self.workload.mode == "tower" else others)

    @torch.no_grad()
    def _decode(self, model: Any, cache: Any, clock: Clock) -> dict[str, float]:
        """Without a mask: no row is padded, and stock Qwen3-VL takes a mask's length for that of the new tokens."""
        count, tokens = self.workload.decode_tokens, self.inputs["input_ids"][:, -1:]
        start = clock.read()
        for _ in range(count):
            model(input_ids=tokens, past_key_values=cache, use_cache=True)
        end = clock.read()
        clock.synchronize()
        return {meters.DECODE_TOKEN: clock.between(start, end) / count}

    def _train(self, model: Any, inputs: dict[str, Any], clock: Clock) -> dict[str, float]:
        clock.synchronize()
        readings = [clock.read()]
        try:
            loss = model(**inputs, use_cache=False).loss
            readings.append(clock.read())
            loss.backward()
            readings.append(clock.read())
            self.optimiser.step()
            readings.append(clock.read())
            clock.synchronize()
        finally:
            self.optimiser.zero_grad(set_to_none=True)
        parts = map(clock.between, readings, readings[1:])
        stages = dict(zip((meters.FORWARD, meters.BACKWARD, meters.OPTIMISER), parts, strict=True))
        return stages | {meters.TOTAL: clock.between(readings[0], readings[-1])}


def take_turns(
    title: str,
    variants: Sequence[Variant],
    repeats: int,
    warm_up: Callable[[Variant], object],
    run: Callable[[Variant], object],
) -> None:
    """Calls `warm_up` with each variant, then `run` in rounds that start with another one each, against drift."""
    with tqdm(total=len(variants) * (1 + repeats), desc=title, unit="pass", leave=False, disable=None) as bar:
        for variant in variants:
            warm_up(variant)
            bar.update()
        for number in range(repeats):
            turn = [variant for variant in variants if variant["status"] == "ok"]
            first = number % max(len(turn), 1)
            for variant in turn[first:] + turn[:first]:
                run(variant)
                bar.update()


def measure_workloads(workloads: Sequence[Workload], device: torch.device, repeats: int) -> Iterator[dict[str, Any]]:
    """Yields a cell of the result (see `measure`) for each workload, with the reason where it could not be measured."""
    models: Models | None = None
    built_for = None
    for dtype in (torch.float32, torch.bfloat16, torch.float16):  # allocates cuBLAS's workspace before any pass
        torch.ones(16, 16, device=device, dtype=dtype).mm(torch.ones(16, 16, device=device, dtype=dtype))
    for workload in workloads:
        cell: dict[str, Any] = {"workload": workload._asdict(), "title": workload.title, "variants": []}
        with _prepared(workload, device), _noting_failure(cell, device):
            if models is None or built_for != (workload.geometry, workload.dtype):
                models = None
                _free_memory(device, cache=True)
                models = build_models(workload.geometry, getattr(torch, workload.dtype), device)
                built_for = (workload.geometry, workload.dtype)
            cell |= measure(workload, models, device, repeats)
        _free_memory(device, cache=True)
        yield cell


def measure(workload: Workload, models: Models, device: torch.device, repeats: int) -> dict[str, Any]:
    """Measures a workload: "status" and "variants", stock first, with `stages`, `peak_memory` and `tokens`."""
    configure(models, workload, workload.backend)
    runner = Runner(workload, models, workload_inputs(workload, models[0].config, device))
    variants: list[Variant] = []
    for ratio in (None, *workload.ratios):
        name, tokens = "stock" if ratio is None else f"{ratio:g}", runner.count_tokens(ratio or 0.0)
        variants.append({"name": name, "pruning_ratio": ratio, "status": "ok", "tokens": tokens})

    def warm_up(variant: Variant) -> None:
        with _noting_failure(variant, device):
            variant |= _warm_up(runner, variant["pruning_ratio"], device)

    def run(variant: Variant) -> None:
        _free_memory(device)
        with _noting_failure(variant, device):
            clock = Clock(device, of_processor=workload.clock == "processor")
            for stage, taken in runner.run(variant["pruning_ratio"], clock).items():
                variant["stages"][stage]["seconds"].append(taken)

    take_turns(workload.title, variants, repeats, warm_up, run)
    return {"status": "ok", "variants": variants}


def _warm_up(runner: Runner, ratio: float | None, device: torch.device) -> Variant:
    """`stages` with their FLOPs, and `peak_memory`."""
    _free_memory(device)
    models, workload = (runner.model, runner.stock), runner.workload
    with_sdpa = workload.backend in COUNTED_WITH_SDPA
    configure(models, workload, "sdpa" if with_sdpa else workload.backend)
    clock = meters.FlopClock()
    with clock.counter:
        flops, peak = meters.peak_memory(lambda: runner.run(ratio, clock), device)
    if with_sdpa:
        configure(models, workload, workload.backend)
        _free_memory(device)
        _, peak = meters.peak_memory(lambda: runner.run(ratio, Clock(device)), device)
    return {"stages": {stage: {"flops": count, "seconds": []} for stage, count in flops.items()}, "peak_memory": peak}


def _free_memory(device: torch.device, cache: bool = False) -> None:
    """Collects garbage. CUDA's cache stays between passes, as in use."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    gc.collect()
    if device.type == "cuda" and cache:
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _prepared(workload: Workload, device: torch.device) -> Iterator[None]:
    """Limits memory; compiles flex_attention for up to 64 shapes, since PyTorch stops compiling after eight."""
    if workload.backend == "flex_attention":
        torch.compiler.reset()
    compiled_alone = torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True)
    with meters.limited_to_free_memory(device), compiled_alone:
        yield


@contextlib.contextmanager
def _noting_failure(found: dict[str, Any], device: torch.device) -> Iterator[None]:
    """Notes in a variant or cell what does not fit, compile or run on this device; every other error passes."""
    try:
        yield
        return
    except Exception as error:
        no_memory = is_out_of_memory(error)
        # Triton's errors ("out of resource: shared memory") are no RuntimeError.
        of_kernel = isinstance(error, RuntimeError | FailOnRecompileLimitHit) or "triton" in type(error).__module__
        if not (no_memory or of_kernel):
            raise
        found["status"] = "out of memory" if no_memory else "failed"
        found["reason"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    _free_memory(device, cache=True)  # after the exception is gone, which refers to the pass's tensors
