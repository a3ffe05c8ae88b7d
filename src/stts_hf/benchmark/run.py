"""A preset from beginning to end: checks, measurements, and the result as one dictionary that `json` can write."""

import contextlib
import datetime
import itertools
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from stts_hf import __version__
from stts_hf.benchmark.measure import measure_workloads
from stts_hf.benchmark.presets import Preset
from stts_hf.benchmark.reading import measure_clip
from stts_hf.benchmark.report import SCHEMA

PACKAGES = ("torch", "transformers", "av", "numpy", "flash-attn")
FLASH_BACKENDS = {"flash_attention_2": is_flash_attn_2_available, "flash_attention_3": is_flash_attn_3_available}


def check_runnable(preset: Preset, device: torch.device, force: bool = False) -> None:
    """Raises `ValueError` where a preset cannot or should not run on `device`, before anything slow happens."""
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {device} cannot be timed; cpu and cuda can")
    if preset.needs_gpu and device.type == "cpu" and not force:
        raise ValueError(
            f"preset {preset.name!r} is for a GPU, and --device is cpu: {preset.needs_gpu}, or --force --backends sdpa "
            "to run it anyway"
        )
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


def run_preset(preset: Preset, device: torch.device, command: str) -> Iterator[dict[str, Any]]:
    """
    Measures everything in `preset`; yields the result so far whenever a cell is complete, and at the end once more with
    `"finished": True`. command: what the user typed, to be named beside every figure.
    """
    clock = time.perf_counter()
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "preset": preset.name,
        "command": command,
        "started": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M UTC}",
        "finished": False,
        "machine": describe_machine(device),
        "versions": describe_versions(),
        "cells": [],
    }
    of_models = measure_workloads(preset.workloads, device, preset.repeats)
    of_readers = (measure_clip(clip, preset.repeats) for clip in preset.clips)
    for cell in itertools.chain(of_models, of_readers):
        result["cells"].append(cell)
        result["seconds"] = time.perf_counter() - clock
        result["machine"]["load_after"] = os.getloadavg()[0]
        yield result
    yield result | {"finished": True}


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Processor, cores and threads in use, memory in bytes, GPU, and how busy the machine is before measuring."""
    about = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in about.splitlines() if line.startswith("model name")]
    machine: dict[str, Any] = {
        "cpu": names[0] if names else platform.machine(),
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
