"""A preset from beginning to end: checks, measurements, and the result as one dictionary that `json` can write.

Of each workload one warm-up pass counts FLOPs and memory; then stock and STTS are timed in turns.
"""

import contextlib
import dataclasses
import datetime
import gc
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._dynamo.exc import FailOnRecompileLimitHit
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from stts_hf.benchmark import meters
from stts_hf.benchmark.evs import AFTER_TOWER, prune_after_tower
from stts_hf.benchmark.geometries import GEOMETRIES, geometry_config, workload_inputs
from stts_hf.benchmark.meters import Clock, StageRecorder
from stts_hf.benchmark.models import Models, build_models, configure, pruning_settings
from stts_hf.benchmark.moving_clips import correlate, draw_clips, share_kept
from stts_hf.benchmark.presets import Preset, Workload
from stts_hf.benchmark.report import SCHEMA
from stts_hf.benchmark.turns import take_turns
from stts_hf.selectors import LEARNED
from stts_hf.shortages import is_out_of_memory
from stts_hf.versions import __version__

PACKAGES = ("torch", "transformers", "av", "numpy", "flash-attn")
CLIPS, CLIP_FRAMES = 8, 16  # on which it is looked at what a selector keeps
FLASH_BACKENDS = {"flash_attention_2": is_flash_attn_2_available, "flash_attention_3": is_flash_attn_3_available}
# Compiled code and the kernels of other packages have no formulas in PyTorch's counter.
COUNTED_WITH_SDPA = ("flex_attention", *FLASH_BACKENDS)


def check_runnable(preset: Preset, device: torch.device) -> None:
    """Raises `ValueError` where a preset cannot or should not run on `device`, before anything slow happens."""
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {device} cannot be timed; cpu and cuda can")
    if preset.needs_gpu and device.type == "cpu":
        raise ValueError(f"preset {preset.name!r} is for a GPU, and --device is cpu: {preset.needs_gpu}")
    for workload in preset.workloads:
        needs = ""
        if workload.backend == "flex_attention" and device.type == "cpu":
            needs = "a GPU: on a CPU PyTorch 2.15 has no backward pass for it"
        if workload.backend in FLASH_BACKENDS:
            bins, installed = workload.layout == "first_fit_descending", FLASH_BACKENDS[workload.backend]()
            if bins or not installed or device.type == "cpu" or workload.dtype == "float32":
                needs = "its package, a CUDA device, --dtypes bfloat16 or float16, and --layouts varlen"
        if needs:
            raise ValueError(f"backend {workload.backend!r} needs {needs}; or use --backends sdpa")
        vision = geometry_config(workload.geometry).vision_config
        for name, value in pruning_settings(workload).items():
            setattr(vision, name, value)
        vision.validate_pruning()


def run_preset(preset: Preset, device: torch.device, command: str) -> Iterator[dict[str, Any]]:
    """Measures everything in `preset`; see `measure_cells`."""
    return measure_cells(preset.name, measure_workloads(preset.workloads, device, preset.repeats), device, command)


def measure_cells(
    name: str, cells: Iterable[dict[str, Any]], device: torch.device, command: str
) -> Iterator[dict[str, Any]]:
    """
    Takes the cells of a result as they are measured; yields the result so far whenever one is complete, and at the end
    once more with `"finished": True`. command: what the user typed, to be named beside every figure.
    """
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
    """Processor, cores and threads in use, memory in bytes, GPU, and how busy the machine is before measuring."""
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
    """Versions of what took part; the commit where the package runs from a checkout, with "+" if that was changed."""
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
    """Runs passes of one workload, by the stock model or by STTS. inputs: from `workload_inputs`."""

    def __init__(self, workload: Workload, models: Models, inputs: dict[str, Any]) -> None:
        self.workload, self.inputs = workload, inputs
        self.model, self.stock = models
        if workload.mode == "training":
            # Trainer's own choice. A step of size zero costs what any step costs, and keeps the weights.
            self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=0.0, weight_decay=0.0, fused=True)
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            self.optimiser.step()  # makes the optimiser's state, which no pass shall pay for
            self.optimiser.zero_grad(set_to_none=True)

    def run(self, ratio: float | None, clock: Clock) -> dict[str, float]:
        """One pass at pruning ratio `k`, or by the stock model for None. Returns what `clock` says of each stage."""
        if ratio is None:
            return self._pass(self.stock, {}, clock)
        with self._pruning():
            return self._pass(self.model, {"pruning_ratio": ratio}, clock)

    def _pruning(self) -> contextlib.AbstractContextManager[None]:
        """Within it, the model prunes as the workload says."""
        after = self.workload.selector == AFTER_TOWER
        return prune_after_tower(self.model.model) if after else contextlib.nullcontext()

    def _pass(self, model: Any, call: dict[str, float], clock: Clock) -> dict[str, float]:
        if self.workload.mode == "training":
            return self._train(model, call, clock)
        with torch.no_grad(), StageRecorder(model, clock) as recorder:
            if self.workload.mode == "tower":
                model.model.get_video_features(**self._videos(self.inputs), **call)
                cache = None
            else:
                cache = model(**self.inputs, **call, logits_to_keep=1, use_cache=True).past_key_values
        return recorder.stages() | (self._decode(model, cache, clock) if cache else {})

    def _videos(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Of a call's inputs, what the tower takes."""
        return {name: inputs[name] for name in self.model.model.video_inputs if name in inputs}

    @torch.no_grad()
    def look_at_clips(self, number: int) -> list[tuple[torch.Tensor, np.ndarray]]:
        """Of some drawn clips, what ranks their blocks, (T, n), and how much of each block moves, (T, n)."""
        found, geometry, config = [], GEOMETRIES[self.workload.geometry], self.model.config
        side, cells = geometry.clip_size(config)
        with self._pruning():
            for clip in draw_clips(number, CLIP_FRAMES, side, cells):
                videos = self._videos(geometry.read_clip(clip.frames, config))
                videos = {name: tensor.to(self.model.device) for name, tensor in videos.items()}
                scores = self.model.model.get_video_features(**videos).token_scores[0].float().cpu()
                moving = clip.moving.reshape(len(scores), -1, cells, cells).mean(1)  # of the video frames in each frame
                found.append((scores, moving.reshape(len(scores), -1)))
        return found

    def count_tokens(self, ratio: float) -> int:
        """How many tokens a row has at pruning ratio `k`: of the video in mode "tower", else in the language model."""
        plan = self.model.model.plan_videos(self.inputs, ratio)
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

    def _train(self, model: Any, call: dict[str, float], clock: Clock) -> dict[str, float]:
        clock.synchronize()
        readings = [clock.read()]
        try:
            loss = model(**self.inputs, **call, use_cache=False).loss
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


def measure_workloads(workloads: Sequence[Workload], device: torch.device, repeats: int) -> Iterator[dict[str, Any]]:
    """
    Measures each workload on `device` in `repeats` rounds and yields its cell of the result (see `measure`) as soon as
    it is complete. One that does not fit into memory, or fails in a kernel, says so in its cell.
    """
    models: Models | None = None
    built_for = None
    for dtype in (torch.float32, torch.bfloat16, torch.float16):  # allocates cuBLAS's working space, which is no pass's
        torch.ones(16, 16, device=device, dtype=dtype).mm(torch.ones(16, 16, device=device, dtype=dtype))
    for workload in workloads:
        cell: dict[str, Any] = {"workload": dataclasses.asdict(workload), "title": workload.title, "variants": []}
        with _prepared(workload, device), _noting_failure(cell, device):
            if models is None or built_for != (workload.geometry, workload.dtype):
                models = None
                _clear_away(device, cache=True)
                models = build_models(workload.geometry, getattr(torch, workload.dtype), device)
                built_for = (workload.geometry, workload.dtype)
            cell |= measure(workload, models, device, repeats)
        _clear_away(device, cache=True)
        yield cell


def measure(workload: Workload, models: Models, device: torch.device, repeats: int) -> dict[str, Any]:
    """
    Measures one workload: `{"status", "order", "variants"}`, stock first among the variants, each with `stages` (raw
    `seconds` of every round and `flops`), `peak_memory` in bytes, and `tokens`, how many a row has: of the video in
    mode "tower", else in the language model; and `motion` where nothing trained ranks the blocks (see `look_at_clips`):
    of each clip, the correlation of ranking and motion, and the share of what moves that is kept.
    """
    configure(models, workload, workload.backend)
    runner = Runner(workload, models, workload_inputs(workload, models[0].config, device))
    variants: list[dict[str, Any]] = []
    for ratio in (None, *workload.ratios):
        name, tokens = "stock" if ratio is None else f"{ratio:g}", runner.count_tokens(ratio or 0.0)
        variants.append({"name": name, "pruning_ratio": ratio, "status": "ok", "tokens": tokens})

    def warm_up(variant: dict[str, Any]) -> None:
        with _noting_failure(variant, device):
            variant |= _warm_up(runner, variant["pruning_ratio"], device)

    def run(variant: dict[str, Any]) -> None:
        _clear_away(device)
        with _noting_failure(variant, device):
            for stage, taken in runner.run(variant["pruning_ratio"], Clock(device)).items():
                variant["stages"][stage]["seconds"].append(taken)

    order = take_turns(workload.title, variants, repeats, warm_up, run)
    if workload.selector not in LEARNED and workload.mode != "training":
        clips = runner.look_at_clips(CLIPS)
        for variant in variants:
            if variant["pruning_ratio"] and variant["status"] == "ok":
                variant["motion"] = {
                    "correlation": [correlate(scores, moving) for scores, moving in clips],
                    "kept": [share_kept(scores, moving, variant["pruning_ratio"]) for scores, moving in clips],
                }
    return {"status": "ok", "order": order, "variants": variants}


def _warm_up(runner: Runner, ratio: float | None, device: torch.device) -> dict[str, Any]:
    """`stages` with their FLOPs, `peak_memory`, and `not_counted` with the reason where FLOPs are None."""
    _clear_away(device)
    models, workload = (runner.model, runner.stock), runner.workload
    with_sdpa = workload.backend in COUNTED_WITH_SDPA
    configure(models, workload, "sdpa" if with_sdpa else workload.backend)
    clock = meters.FlopClock()
    with clock.counter, meters.UncountedAttention() as uncounted:
        flops, peak = meters.peak_memory(lambda: runner.run(ratio, clock), device)
    if with_sdpa:
        configure(models, workload, workload.backend)
        _clear_away(device)
        _, peak = meters.peak_memory(lambda: runner.run(ratio, Clock(device)), device)
    names = ", ".join(sorted(uncounted.names))
    stages: dict[str, Any] = {
        stage: {"flops": None if names else count, "seconds": []} for stage, count in flops.items()
    }
    reason = {"not_counted": f"this PyTorch has no formula for {names}"} if names else {}
    return {"stages": stages, "peak_memory": peak, **reason}


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
        stack.enter_context(meters.limited_to_free_memory(device))
        if workload.backend == "flex_attention":
            torch.compiler.reset()
            stack.enter_context(torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True))
        gc.collect()
        gc.freeze()
        stack.callback(gc.unfreeze)
        yield


@contextlib.contextmanager
def _noting_failure(found: dict[str, Any], device: torch.device) -> Iterator[None]:
    """What does not fit, or compile, or run on this device, is noted in its variant or cell; the others go on."""
    try:
        yield
        return
    except Exception as error:
        found |= _failure(error)
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
