"""Kills training runs with SIGKILL at random moments of their saves, and goes on from what each leaves.

    python -m tests.stts_hf.training.kill_trainings --unfinished 4

Prints a JSON line: how many runs were killed, and how many of them amid a save. Exits with an error where the last
checkpoint is not what the next run takes, or that run does not go on from it.

A process of its own: after a test with stand-ins for CUDA, autograd refuses to run in forked children.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import transformers

from stts_hf.training.checkpointing import last_checkpoint
from tests.forked import let_go_of_shared_locks
from tests.stts_hf.training.runs import Rows, trainer

SAVES: dict[str, Any] = {
    "max_steps": 10_000,
    "save_strategy": "steps",
    "save_steps": 1,
    "save_total_limit": 2,
    "logging_steps": 10_000,
}


def save_until_killed(folder: Path, seconds: float) -> None:
    """Forks a run that does little but save, and kills it `seconds` after its first checkpoint."""
    child = os.fork()
    if child == 0:
        try:
            let_go_of_shared_locks()
            trainer(folder, data=Rows([[4]]), **SAVES).train()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    while not list(folder.glob("checkpoint-*/trainer_state.json")):
        assert os.waitpid(child, os.WNOHANG)[0] == 0, "the run ended before it was killed"
        time.sleep(0.005)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "the run ended before it was killed"


def kill_and_go_on(folder: Path, generator: random.Random) -> bool:
    """Returns whether the kill came amid a save. Raises `AssertionError` where the run cannot go on."""
    save_until_killed(folder, 0.3 * generator.random())
    started = max(int(path.name.rpartition("-")[2]) for path in folder.glob("checkpoint-*"))
    whole = last_checkpoint(folder)
    assert whole is not None, "no checkpoint is whole"
    last = int(whole.rpartition("-")[2])
    assert started - last <= 1, "more than the last checkpoint was cut off"
    run = trainer(folder, data=Rows([[4]]), max_steps=last + 1)
    run.train(resume_from_checkpoint=True)
    assert run.state.global_step == last + 1
    return last < started


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill training runs amid their saves.")
    parser.add_argument("--unfinished", type=int, default=4, help="kills amid a save until it ends (at most 50 kills)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # threads do not survive a fork
    generator = random.Random(arguments.seed)
    found = {"killed": 0, "unfinished": 0}
    while found["unfinished"] < arguments.unfinished and found["killed"] < 50:
        with tempfile.TemporaryDirectory() as folder:
            found["unfinished"] += kill_and_go_on(Path(folder), generator)
        found["killed"] += 1
    json.dump(found, sys.stdout)
    print()


if __name__ == "__main__":
    main()
