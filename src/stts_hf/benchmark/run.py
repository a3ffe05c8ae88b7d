"""A preset from beginning to end: checks, measurements, and the result as one dictionary."""

import datetime
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from stts_hf.benchmark.front_end import measure_front_end
from stts_hf.benchmark.machine import describe_machine, describe_versions
from stts_hf.benchmark.measure import measure_workloads
from stts_hf.benchmark.presets import Preset
from stts_hf.benchmark.readers import READERS, measure_readers

SCHEMA = 1
FLASH_BACKENDS = {
    "flash_attention_2": ("flash-attn", is_flash_attn_2_available),
    "flash_attention_3": ("flash-attn-3", is_flash_attn_3_available),
}


def check_runnable(preset: Preset, device: torch.device, force: bool = False) -> None:
    """Raises `ValueError` where a preset cannot or should not run on `device`, before anything slow happens."""
    if preset.needs_gpu and device.type == "cpu" and not force:
        sdpa = " --backends sdpa" if any(w.backend == "flex_attention" for w in preset.workloads) else ""
        raise ValueError(
            f"preset {preset.name!r} is for a GPU, and --device is cpu: {preset.needs_gpu}, or --force{sdpa} to run it "
            "anyway"
        )
    if force and not preset.needs_gpu:
        raise ValueError(f"--force has no effect on preset {preset.name!r}, which runs on any device; leave it out")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {device} cannot be timed; cpu and cuda can")
    for workload in preset.workloads:
        if workload.backend == "flex_attention" and device.type == "cpu":
            raise ValueError(
                "backend 'flex_attention' is for a GPU: on a CPU PyTorch has no backward pass for it, and its forward "
                "pass does not compile for Molmo2's mask (2.15); use --backends sdpa"
            )
        if workload.backend in FLASH_BACKENDS:
            package, is_available = FLASH_BACKENDS[workload.backend]
            missing = [] if is_available() else [f"the package {package}, which is not installed or not usable here"]
            if device.type != "cuda":
                missing.append(f"a CUDA device, but --device is {device}")
            if workload.dtype == "float32":
                missing.append("--dtypes bfloat16 or float16, but the dtype is float32")
            if missing:
                raise ValueError(f"backend {workload.backend!r} needs {'; and '.join(missing)}; or use --backends sdpa")
            if workload.layout == "first_fit_descending":
                raise ValueError(
                    "layout 'first_fit_descending' needs an attention mask, which flash attention does not take; use "
                    "--layouts varlen or --backends sdpa"
                )


def run_preset(
    preset: Preset,
    device: torch.device,
    command: str,
    on_pass: Callable[[str], None] = lambda _: None,
    on_progress: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """
    Measures everything in `preset` and returns the result, which `json` can write.

    Args:
        command: what the user typed, to be named beside every figure.
        on_pass: called with what was just done, `count_passes(preset)` times at most.
        on_progress: called with the result so far, `"finished": False`, whenever something more is in it.
    """
    started, clock = datetime.datetime.now(datetime.timezone.utc), time.perf_counter()
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "preset": preset.name,
        "command": command,
        "started": started.strftime("%Y-%m-%d %H:%M UTC"),
        "finished": False,
        "workloads": len(preset.workloads),
        "machine": describe_machine(device),
        "versions": describe_versions(),
        "front_end": [],
        "cells": [],
        "readers": None,
    }

    def report() -> None:
        result["seconds"] = time.perf_counter() - clock
        result["machine"]["load_after"] = os.getloadavg()[0]
        on_progress(result)

    for frames in preset.front_end_frames:
        result["front_end"].append(measure_front_end(frames, preset.repeats, preset.video_size, on_pass))
        report()
    seconds = max(60 * preset.budget_minutes - (time.perf_counter() - clock), 0.0)
    for cell in measure_workloads(preset.workloads, device, preset.repeats, seconds, on_pass):
        result["cells"].append(cell)
        report()
    if preset.video_seconds:
        result["readers"] = measure_readers(
            preset.video_seconds, preset.video_frames, preset.repeats, preset.video_size, on_pass
        )
        report()
    result["finished"] = True
    return result


def count_passes(preset: Preset) -> int:
    """The most times that `run_preset` calls `on_pass`; fewer where the time runs out first."""
    model = sum((1 + len(workload.ratios)) * (1 + preset.repeats) for workload in preset.workloads)
    files = len(preset.front_end_frames) * (preset.repeats + 1)
    return model + files + (1 + len(READERS) * preset.repeats if preset.video_seconds else 0)
