"""Rows of checks: each says how far a path is from the reference, and a row that fails leaves the others alone."""

import contextlib
import gc
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from .runner import RESULT, UNFINISHED

GOES_ON = "STTS_GPU_CHECKS_GO_ON"  # set where a process continues after one whose CUDA context had ended
NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True)
class Check:
    """
    run: relative errors of forward and gradients (None if there are none). tolerance: largest of both for a path
    that computes the same. lacks: the kernel that is not here, or "".
    """

    name: str
    dtype: torch.dtype
    run: Callable[[], tuple[float, float | None]]
    tolerance: tuple[float, float]
    lacks: str = ""


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the whole tensor, in the 2-norm; NaN counts as infinite."""
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    error = ((found - expected).norm() / expected.norm().clamp_min(1e-12)).item()
    return error if error == error else float("inf")


def run_checks(checks: Iterable[Check], device: torch.device, folder: Path, about: dict[str, Any]) -> None:
    """
    Runs and writes them row by row. Rows that an earlier call passed before its time was up stay as they are. After a
    row that ended the CUDA context, such as by an assertion on the device, the process begins anew with the next.
    """
    rows: list[dict[str, Any]] = []
    result, earlier = {**about, "finished": False, "checks": rows}, passed_earlier(folder, about)
    for check in checks:
        known = earlier.get((check.name, NAMES[check.dtype]))
        rows.append(known or run_check(check, device))
        print(json.dumps(rows[-1]), flush=True)
        (folder / UNFINISHED).write_text(json.dumps(result, indent=1) + "\n")
        if known is None and rows[-1]["state"] == "failed" and has_ended(device):
            os.environ[GOES_ON] = "1"
            os.execv(sys.executable, sys.orig_argv)  # noqa: S606  # this very command
    (folder / RESULT).write_text(json.dumps(result | {"finished": True}, indent=1) + "\n")
    (folder / UNFINISHED).unlink(missing_ok=True)
    (folder / "README.md").write_text(page(result))


def passed_earlier(folder: Path, about: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """
    Rows with state "ok" of an unfinished result of the same device and versions, by name and dtype; after a restart,
    all rows. Packages that were installed since do not matter.
    """
    with contextlib.suppress(OSError, ValueError, KeyError):
        result = json.loads((folder / UNFINISHED).read_text())
        same = all(result[key] == about[key] for key in ("title", "device"))
        if same and result["versions"].items() <= about["versions"].items():
            rows = (row for row in result["checks"] if GOES_ON in os.environ or row["state"] == "ok")
            return {(row["name"], row["dtype"]): row for row in rows}
    return {}


def has_ended(device: torch.device) -> bool:
    """Whether a device computes nothing more for this process."""
    try:
        torch.zeros(1, device=device).item()
    except RuntimeError:
        return True
    return False


def run_check(check: Check, device: torch.device) -> dict[str, Any]:
    row: dict[str, Any] = {"name": check.name, "dtype": NAMES[check.dtype], "state": "left out", "reason": check.lacks}
    row["tolerance"] = check.tolerance
    if check.lacks:
        return row
    started = time.perf_counter()
    try:
        forward, backward = check.run()
        far = forward > check.tolerance[0] or (backward or 0.0) > check.tolerance[1]
        row |= {"state": "differs" if far else "ok", "forward": forward, "backward": backward}
    except Exception as error:  # whatever a kernel raises
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if "modeling" in Path(frame.filename).parts] or frames
        where = f"{Path(own[-1].filename).name}:{own[-1].lineno}"
        row |= {"state": "failed", "reason": f"{type(error).__name__}, {where}: {' '.join(str(error).split())[:300]}"}
    row["seconds"] = time.perf_counter() - started
    gc.collect()
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):  # of a context that a device-side assertion ended
            torch.cuda.empty_cache()
    return row


def table(rows: Iterable[dict[str, Any]]) -> str:
    lines = ["| path | dtype | | forward | gradients | s |", "| --- | --- | --- | ---: | ---: | ---: |"]
    for row in rows:
        errors = [
            f"{row[name]:.1e} ({most:g})" if row.get(name) is not None else ""
            for name, most in zip(("forward", "backward"), row["tolerance"], strict=True)
        ]
        said = row["state"] + (f": {row['reason']}" if row.get("reason") else "")
        cells = [row["name"], row["dtype"], said.replace("|", "\\|"), *errors, f"{row.get('seconds', 0):.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def page(result: dict[str, Any]) -> str:
    return (
        f"# {result['title']}\n\n{result['device']}. "
        f"{', '.join(f'{name} {version}' for name, version in result['versions'].items())}.\n\n"
        f"Relative errors (2-norm) against float32 on the CPU. In brackets "
        "what a path that computes the same may have.\n\n"
        f"{table(result['checks'])}\n"
    )


def describe(title: str, device: torch.device) -> dict[str, Any]:
    """What a result says of itself; imports nothing that an older transformers lacks."""
    versions = {"python": platform.python_version()}
    for package in ("torch", "transformers", "flash-attn", "triton"):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {"title": title, "device": f"{device}: {where}", "versions": versions}


def compute_exactly() -> None:
    """No TF32: float32 on CUDA is compared with float32 on the CPU."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
