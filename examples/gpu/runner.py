"""
Runs parts, each in a process with a time limit and a log. `FOLDER/gpu-NAME` holds a part's result, or its failure.

A part writes `result.json`, and while it measures `unfinished.json`. What it cannot import is what it lacks.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULT, UNFINISHED, FAILURE = "result.json", "unfinished.json", "failure.json"
WORK = "gpu-work"  # logs, and what parts need between calls
LEAST = 20.0  # seconds, below which no part starts
GRACE = 10.0  # seconds between SIGTERM and SIGKILL
OK, KEPT, PARTIAL, LEFT_OUT, FAILED = "ok", "was there", "unfinished", "left out", "failed"


@dataclass(frozen=True)
class Part:
    """
    letter: of the list of what is worth most. limit: seconds. command: `--seconds S FOLDER` follows, S within limit.
    lacks: why this machine cannot run it, "" where it can.
    """

    name: str
    letter: str
    about: str
    command: Sequence[str]
    limit: float
    lacks: str = ""


@dataclass
class Outcome:
    """seconds: of the process. reason: why there is no whole result."""

    part: Part
    state: str
    seconds: float = 0.0
    reason: str = ""


def folder_of(part: Part, folder: Path) -> Path:
    return folder / f"gpu-{part.name}"


def run_parts(
    parts: Sequence[Part],
    folder: Path,
    seconds: float,
    environment: Mapping[str, str],
    note: Callable[[str], None],
    at_once: int = 1,
) -> list[Outcome]:
    """Runs what has no result yet, in order, for at most so many seconds. Every part has an outcome."""
    ends, stopping = time.monotonic() + seconds, threading.Event()

    def run(part: Part) -> Outcome:
        left = ends - time.monotonic()
        if part.lacks:
            outcome = Outcome(part, LEFT_OUT, reason=part.lacks)
        elif (folder_of(part, folder) / RESULT).exists():
            outcome = Outcome(part, KEPT)
        elif left < LEAST:
            outcome = Outcome(part, LEFT_OUT, reason="no time was left of HOURS")
        else:
            note(f"({part.letter}) {part.name}: {part.about}; at most {min(part.limit, left):.0f} s")
            outcome = run_part(part, folder, min(part.limit, left), environment, stopping)
        said = f": {outcome.reason}" if outcome.reason else f", {outcome.seconds:.0f} s" if outcome.seconds else ""
        note(f"({part.letter}) {part.name}: {outcome.state}{said}")
        return outcome

    with ThreadPoolExecutor(at_once) as pool:
        try:
            return list(pool.map(run, parts))
        except BaseException:  # Ctrl-C: parts are in sessions of their own, where it does not reach them
            stopping.set()
            pool.shutdown(cancel_futures=True)
            raise


def run_part(
    part: Part,
    folder: Path,
    limit: float,
    environment: Mapping[str, str],
    stopping: threading.Event | None = None,
) -> Outcome:
    """Runs one part. Its whole process group ends with it, at the limit or when `stopping` is set by force."""
    stopping = stopping or threading.Event()
    home, log = folder_of(part, folder), folder / WORK / f"{part.name}.log"
    for made in (home, log.parent):
        made.mkdir(parents=True, exist_ok=True)
    (home / FAILURE).unlink(missing_ok=True)
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*part.command, "--seconds", str(0.85 * limit), str(home)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        try:
            while process.poll() is None and time.monotonic() - started < limit and not stopping.wait(0.1):
                pass
        finally:
            timed_out = end_group(process)
    seconds = time.monotonic() - started
    reason = f"stopped after {seconds:.0f} s" if timed_out else last_line(log)
    if process.returncode == 0 and not timed_out and (home / RESULT).exists():
        return Outcome(part, OK, seconds)
    if not timed_out and is_lack(reason):
        state = LEFT_OUT
    else:
        state = PARTIAL if (home / UNFINISHED).exists() or (home / RESULT).exists() else FAILED
    found = {"state": state, "seconds": seconds, "status": process.returncode, "reason": reason}
    (home / FAILURE).write_text(json.dumps(found, indent=1) + "\n")
    return Outcome(part, state, seconds, reason)


def is_lack(reason: str) -> bool:
    """Whether an error says that another package or memory is missing; a name of our own that is gone is a mistake."""
    is_import = reason.startswith(("ImportError", "ModuleNotFoundError", "Left out: "))
    return is_import and not re.search(r"(from|named) '(stts_hf|examples|tests)\b", reason)


def end_group(process: "subprocess.Popen[bytes]") -> bool:
    """Ends what is left of a process and of those that it started. Returns whether it still ran."""
    still_runs = process.poll() is None
    if still_runs:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return still_runs


def last_line(log: Path, most: int = 300) -> str:
    """The last line of a log with text, which is an error's own in a traceback."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:most] if lines else "ended without a word"


def read_results(parts: Sequence[Part], folder: Path) -> dict[str, dict[str, Any]]:
    """Each part's result, or else what it had measured when it ended; parts without any are not there."""
    found = {}
    for part in parts:
        for name in (RESULT, UNFINISHED):
            path = folder_of(part, folder) / name
            if path.exists():
                found[part.name] = json.loads(path.read_text())
                break
    return found
