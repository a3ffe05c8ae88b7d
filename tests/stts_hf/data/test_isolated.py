"""A function in another process: what comes back, and what its death costs."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from stts_hf.data.isolated import Isolated, ProcessDied
from stts_hf.data.prefetch import prefetch

PATIENCE = 120  # seconds until a test that would hang fails


class Odd(Exception):
    """Cannot be made again of what it says."""

    def __init__(self, code: int, words: str):
        super().__init__(f"{code}: {words}")


def work(task):
    kind, value = task
    if kind == "double":
        return {"tensor": torch.full((300, 300), float(value)) * 2, "process": os.getpid()}
    if kind == "kill":
        os.kill(os.getpid(), value)
    if kind == "sleep":
        time.sleep(value)
    if kind == "odd":
        raise Odd(3, "broken")
    raise ValueError(value)


@pytest.fixture(scope="module")
def isolated():
    with Isolated(work) as isolated:
        yield isolated


def test_results_are_made_in_one_other_process(isolated):
    first, second = (isolated(("double", number)) for number in (1, 2))
    assert torch.equal(first["tensor"], torch.full((300, 300), 2.0))
    assert torch.equal(second["tensor"], torch.full((300, 300), 4.0))
    assert first["process"] == second["process"] != os.getpid()
    first["tensor"].add_(1)  # may be written to


def test_errors_come_through(isolated):
    with pytest.raises(ValueError, match=r"^no video$"):
        isolated(("raise", "no video"))
    with pytest.raises(ValueError, match="Odd: 3: broken"):
        isolated(("odd", None))


def test_a_death_is_the_error_of_its_call_alone(isolated):
    before = isolated(("double", 1))["process"]
    with pytest.raises(ProcessDied, match="the process ended with SIGSEGV"):
        isolated(("kill", signal.SIGSEGV))
    assert isolated(("double", 1))["process"] != before


def test_a_call_that_hangs_ends_after_its_time():
    with Isolated(work, timeout=0.2) as isolated:
        started = time.perf_counter()
        with pytest.raises(ProcessDied, match=r"longer than 0\.2 seconds"):
            isolated(("sleep", 10 * PATIENCE))
        assert time.perf_counter() - started < PATIENCE
        assert isolated(("double", 1))["process"] != os.getpid()


BUSY = """
import time
from stts_hf.data.isolated import Isolated, start_early
if __name__ == "__main__":
    start_early("torch")
    print("importing", flush=True)
    time.sleep(1)
    with Isolated(time.sleep) as isolated:
        isolated(0)
        print("working", flush=True)
        isolated(1)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_ctrl_c_is_for_the_caller_alone(tmp_path):
    """Neither the fork server, while it imports PyTorch, nor a process at work minds it, or prints a traceback."""
    (tmp_path / "script.py").write_text(BUSY)
    script = [sys.executable, tmp_path / "script.py"]
    with subprocess.Popen(script, stdout=-1, stderr=-1, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        for expected in ("importing", "working"):
            assert process.stdout.readline().strip() == expected
            time.sleep(0.3)
            others = {int(path.name) for path in Path("/proc").glob("[0-9]*")} - {process.pid}
            for other in others:
                with contextlib.suppress(ProcessLookupError):
                    if os.getsid(other) == process.pid:
                        os.kill(other, signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (0, "")


def test_leaving_ends_calls_under_way():
    started = time.perf_counter()
    isolated = Isolated(work)
    tasks = [("double", 1), ("sleep", 10 * PATIENCE), ("double", 2)]
    with contextlib.closing(prefetch(isolated, tasks)) as results, isolated:
        assert next(results)["process"] != os.getpid()
    assert time.perf_counter() - started < PATIENCE
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]
    with pytest.raises(ProcessDied, match="were ended"):
        isolated(("double", 1))


UNGUARDED = """
from stts_hf.data.isolated import Isolated
with Isolated(len) as isolated:
    print(isolated("abc"))
"""


@pytest.mark.slow
def test_a_script_that_cannot_be_imported_twice_is_told_so(tmp_path):
    (tmp_path / "script.py").write_text(UNGUARDED)
    run = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, timeout=PATIENCE)
    assert run.returncode == 1
    assert 'must do so under `if __name__ == "__main__":`; num_workers=0 needs none.' in run.stderr
