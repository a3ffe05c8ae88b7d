"""SIGTERM: the step ends, a checkpoint is saved, `train` raises, and the run can be resumed."""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from stts_hf.training.checkpointing import last_checkpoint
from stts_hf.training.termination import TrainingTerminated
from tests.stts_hf.training.runs import KeepGradients, Rows, logged, trainer

ROOT = Path(__file__).parents[3]


def start(folder: Path, steps: int, workers: int = 0, **environment: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.stts_hf.training.terminated_run", folder, steps, workers]
    return subprocess.Popen(
        [str(part) for part in command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )


def wait_for(process: subprocess.Popen, line: str) -> None:
    """Reads what the process prints up to `line`. A process that hangs is killed, which ends the reading."""
    timer = threading.Timer(300, process.kill)
    timer.start()
    assert process.stdout is not None
    for printed in process.stdout:
        if printed.strip() == line:
            timer.cancel()
            return
    timer.cancel()
    assert process.stderr is not None
    raise AssertionError(f"{line!r} was never printed:\n{process.stderr.read()}")


@pytest.mark.slow
@pytest.mark.parametrize("whole_group", [False, True], ids=["process", "group_with_workers"])
def test_sigterm_saves_and_ends(tmp_path, whole_group):
    process = start(tmp_path, 1000, workers=2 if whole_group else 0)
    wait_for(process, "step 3")
    (os.killpg if whole_group else os.kill)(process.pid, signal.SIGTERM)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 143, errors
    assert "complete" not in output
    assert "SIGTERM: saving at step" in errors
    assert "Traceback" not in errors
    checkpoint = last_checkpoint(tmp_path)
    assert checkpoint is not None
    step = int(checkpoint.rpartition("-")[2])
    assert 3 <= step <= 5
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"checkpoint-{step}"]
    run = trainer(tmp_path, data=Rows(length=4000), max_steps=step + 1)
    run.train(resume_from_checkpoint=True)
    assert run.state.global_step == step + 1


@pytest.mark.slow
def test_all_processes_stop_at_the_step_in_which_one_was_told(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = [
        start(tmp_path, 1000, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        for rank in ("0", "1")
    ]
    try:
        wait_for(ranks[1], "step 2")
        ranks[1].send_signal(signal.SIGTERM)
        outputs = [process.communicate(timeout=300) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [143, 143], outputs[0][1] + outputs[1][1]
    checkpoint = last_checkpoint(tmp_path)
    assert checkpoint is not None
    step = checkpoint.rpartition("-")[2]
    for output, _ in outputs:
        assert [line for line in output.splitlines() if line.startswith("step")][-1] == f"step {step}"
    assert {f"rng_state_{rank}.pth" for rank in (0, 1)} <= set(os.listdir(checkpoint))


class SignalAt(KeepGradients):
    """Sends this process SIGTERM at a step, before its optimizer step."""

    def __init__(self, step: int):
        self.step = step

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if state.global_step + 1 == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
def test_a_stopped_run_goes_on_as_if_never_stopped(tmp_path):
    """The save is at the end of a step, so that the random state is that of the run without a stop."""
    options: dict[str, Any] = {"max_steps": 3, "gradient_accumulation_steps": 2, "lr_scheduler_type": "cosine"}
    whole = trainer(tmp_path / "whole", data=Rows(length=6), **options)
    whole.train()
    stopped = trainer(tmp_path / "stopped", data=Rows(length=6), **options)
    stopped.add_callback(SignalAt(2))
    with pytest.raises(TrainingTerminated):
        stopped.train()
    assert stopped.state.global_step == 2
    resumed = trainer(tmp_path / "stopped", data=Rows(length=6), **options)
    resumed.train(resume_from_checkpoint=True)
    assert logged(resumed, "loss") == logged(whole, "loss")
