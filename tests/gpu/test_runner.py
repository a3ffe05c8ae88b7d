"""The runner of `make gpu`: limits, skipping, and failures that leave the others alone."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from examples.gpu import runner
from examples.gpu.runner import Part, folder_of, run_parts

WRITES = "import pathlib, sys; print('hello'); pathlib.Path(sys.argv[-1], '{}').write_text('{{\"finished\": true}}')"


def part(name: str, code: str, limit: float = 60.0, lacks: str = "") -> Part:
    return Part(name, "a", name, [sys.executable, "-c", code], limit, lacks)


def run(folder: Path, *parts: Part, seconds: float = 60.0, at_once: int = 1) -> list[tuple[str, str]]:
    outcomes = run_parts(parts, folder, seconds, {"FOR_A_PART": "here"}, lambda line: None, at_once)
    return [(outcome.state, outcome.reason) for outcome in outcomes]


def ends(pid: int) -> bool:
    """A process that was killed is gone, or a zombie, a moment later."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.1)
    return False


def test_a_part_has_its_environment_and_log_and_is_not_run_again(tmp_path):
    code = "import os; print(os.environ['FOR_A_PART']); " + WRITES.format("result.json")
    assert run(tmp_path, part("one", code)) == [("ok", "")]
    assert (tmp_path / "gpu-work" / "one.log").read_text().splitlines() == ["here", "hello"]
    (tmp_path / "gpu-work" / "one.log").unlink()
    assert run(tmp_path, part("one", code)) == [("was there", "")]
    assert not (tmp_path / "gpu-work" / "one.log").exists()


def test_a_part_is_told_how_long_it_has(tmp_path):
    code = "import pathlib, sys; pathlib.Path(sys.argv[-1], 'result.json').write_text(sys.argv[-2])"
    run(tmp_path, part("one", code, limit=40.0))
    assert json.loads((tmp_path / "gpu-one" / "result.json").read_text()) == pytest.approx(34.0)


def test_a_failure_is_kept_beside_the_results_of_others(tmp_path):
    failing, good = part("failing", "raise ValueError('no such kernel')"), part("good", WRITES.format("result.json"))
    states = run(tmp_path, failing, good)
    assert states[0] == ("failed", "ValueError: no such kernel")
    assert states[1][0] == "ok"
    found = json.loads((folder_of(failing, tmp_path) / "failure.json").read_text())
    assert (found["status"], found["reason"]) == (1, "ValueError: no such kernel")
    assert run(tmp_path, part("failing", WRITES.format("result.json")))[0][0] == "ok"  # it is tried again
    assert not (folder_of(failing, tmp_path) / "failure.json").exists()


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_part_ends_at_its_limit_with_all_that_it_started(tmp_path, monkeypatch, at_once):
    monkeypatch.setattr(runner, "GRACE", 0.5)
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    code = (
        "import pathlib, subprocess, sys, time; "
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}]); "
        "pathlib.Path(sys.argv[-1], 'child').write_text(str(child.pid)); "
        "pathlib.Path(sys.argv[-1], 'unfinished.json').write_text('{}'); time.sleep(60)"
    )
    slow, good = part("slow", code, limit=3.0), part("good", WRITES.format("result.json"))
    started = time.monotonic()
    (state, reason), (other, _) = run(tmp_path, slow, good, at_once=at_once)
    assert time.monotonic() - started < 30
    assert (state, other) == ("unfinished", "ok")
    assert re.fullmatch(r"stopped after \d+ s", reason)  # 3, or more on a loaded machine
    pid = int((folder_of(slow, tmp_path) / "child").read_text())
    assert ends(pid)


@pytest.mark.parametrize(
    ("error", "state"),
    [
        ("import surely_not_installed", "left out"),
        ("from json import surely_no_name_of_it", "left out"),
        ("from stts_hf.versions import surely_no_name_of_it", "failed"),
    ],
    ids=["package", "old-package", "ours"],
)
def test_a_package_that_is_missing_leaves_a_part_out(tmp_path, error, state):
    [(found, reason)] = run(tmp_path, part("one", error))
    assert found == state
    assert "surely" in reason


def test_what_is_known_to_lack_something_is_not_started(tmp_path):
    assert run(tmp_path, part("one", "1 / 0", lacks="no vLLM")) == [("left out", "no vLLM")]
    assert run(tmp_path, part("one", "1 / 0"), seconds=5.0) == [("left out", "no time was left of HOURS")]


def test_control_c_ends_the_part(tmp_path):
    code = f"""
import signal, sys
from pathlib import Path
from examples.gpu.runner import Part, run_parts
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
code = "import os, pathlib, sys, time; pathlib.Path(sys.argv[-1], 'pid').write_text(str(os.getpid())); time.sleep(60)"
part = Part("one", "a", "", [sys.executable, "-c", code], 60.0)
run_parts([part], Path({str(tmp_path)!r}), 60.0, {{}}, print)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    pid = tmp_path / "gpu-one" / "pid"
    deadline = time.monotonic() + 30
    while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) != 0
    child = int(pid.read_text())
    assert ends(child)
