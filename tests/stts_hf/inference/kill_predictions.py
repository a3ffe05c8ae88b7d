"""Kills `stts-hf predict` with SIGKILL at random moments, and starts it again until it is done.

    python -m tests.stts_hf.inference.kill_predictions FOLDER CHECKPOINT --kills 20

FOLDER holds clips; the answers go to `FOLDER/answers.parquet` and the lines beside it. Every fourth run decodes in a
process of its own. Prints a JSON line: how many runs were killed, after how many of them there were more answers than
before, and the exit status of the last, which is not.

A process of its own, which imports PyTorch once: runs are forked.
"""

import argparse
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from stts_hf.cli.main import main as stts_hf
from tests.forked import let_go_of_shared_locks


def start(arguments: argparse.Namespace, workers: int) -> int:
    """The process id of a run."""
    child = os.fork()
    if child:
        return child
    folder, status = arguments.folder, 3
    try:
        let_go_of_shared_locks()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        command = ["predict", str(folder), "--prompt", "What moves?", "--batch-size", "2"]
        command += ["--checkpoint", str(arguments.checkpoint), "--max-new-tokens", "16", "--workers", str(workers)]
        command += ["--output", str(folder / "answers.parquet")]
        status = stts_hf(command)
    finally:
        os._exit(status)


def lines(folder: Path) -> int:
    path = folder / "answers.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill predictions at random moments.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # threads do not survive a fork
    generator = random.Random(arguments.seed)
    found = {"killed": 0, "went_on": 0}
    while found["killed"] < arguments.kills:
        before = lines(arguments.folder)
        child = start(arguments, workers=int(found["killed"] % 4 == 3))
        if generator.random() < 0.2:
            time.sleep(generator.random())  # while it starts
        else:
            while lines(arguments.folder) == before:
                if os.waitpid(child, os.WNOHANG)[0]:
                    sys.exit("a run ended before it was killed")
                time.sleep(0.002)
            time.sleep(0.05 * generator.random())
        os.kill(child, signal.SIGKILL)
        if not os.WIFSIGNALED(os.waitpid(child, 0)[1]):
            sys.exit("a run ended before it was killed")
        found["killed"] += 1
        found["went_on"] += lines(arguments.folder) > before
    status = os.waitpid(start(arguments, workers=1), 0)[1]
    json.dump(found | {"status": os.waitstatus_to_exitcode(status)}, sys.stdout)
    print()


if __name__ == "__main__":
    main()
