"""What a result was measured on and with."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from stts_hf import __version__
from stts_hf.benchmark.memory import total_memory

PACKAGES = ("torch", "transformers", "av", "numpy", "flash-attn", "torchcodec")


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Processor, cores and threads in use, memory in bytes, GPU, and how busy the machine is before measuring."""
    machine: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory": total_memory(),
        "system": platform.platform(),
        "device": str(device),
        "load_before": os.getloadavg()[0],
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        machine |= {"gpu": properties.name, "gpu_memory": properties.total_memory, "cuda": torch.version.cuda}
    return machine


def describe_versions() -> dict[str, str | None]:
    """Versions of what took part; the commit where the package runs from a checkout, with "+" if that was changed."""
    versions: dict[str, str | None] = {"stts_hf": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    versions["commit"] = _commit()
    return versions


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str | None:
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "modeling", "src")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None
