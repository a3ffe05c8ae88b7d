"""Kills a conversion with SIGKILL at random moments, and looks at what is left after each.

    python -m tests.stts_hf.checkpoints.kill_conversions 20

Prints how many runs were killed before their end. Exits with an error where the destination was neither the old nor the
new checkpoint nor absent, byte for byte, or where the source had changed.
"""

import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import transformers

from stts_hf.checkpoints.convert import convert_checkpoint
from tests.forked import let_go_of_shared_locks
from tests.stts_hf.checkpoints.convert_files import contents, write_molmo2


def run_and_kill(source: Path, destination: Path, seconds: float) -> bool:
    """Converts in a process of its own, killed after `seconds`. Returns whether it had not ended by then."""
    child = os.fork()
    if child == 0:
        try:
            let_go_of_shared_locks()
            convert_checkpoint(source, destination, overwrite=True, max_shard_size="40KB", seed=1)
        finally:
            os._exit(0)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def kill_at_random_moments(folder: Path, moments: int) -> int:
    """Half of the runs write a new folder, half replace an old one. Raises `AssertionError` for anything but that."""
    source, destination = write_molmo2(folder / "source", "native"), folder / "place" / "destination"
    before = contents(source)
    old = contents(convert_checkpoint(source, folder / "old", seed=0).folder)
    started = time.perf_counter()
    new = contents(convert_checkpoint(source, folder / "new", max_shard_size="40KB", seed=1).folder)
    duration = time.perf_counter() - started
    generator, found = random.Random(0), 0
    for moment in range(moments):
        replacing = moment % 2 == 1
        # The first part only reads; stratified, so that few runs still cover the writing.
        share = 0.2 + 0.9 * (moment + generator.random()) / moments
        killed = False
        while not killed and duration > 0.01:
            if replacing:
                convert_checkpoint(source, destination, overwrite=True, seed=0)
            killed = run_and_kill(source, destination, duration * share)
            assert contents(source) == before, "the source has changed"
            state = contents(destination) if destination.exists() else None
            aside = (destination.parent / ".destination.stts-old").exists()  # killed between the two renames
            allowed = (old, new, *([None] if aside else [])) if replacing else (None, new)
            assert state in allowed, f"run {moment} left a folder that is not whole"
            # The next run clears away what the killed one left.
            convert_checkpoint(source, destination, overwrite=True, seed=0)
            assert os.listdir(destination.parent) == [destination.name], "leftovers of a killed run are still there"
            assert contents(destination) == old
            for path in destination.iterdir():
                path.unlink()
            destination.rmdir()
            if share > 1:  # about when a run ends: either is right
                break
            if not killed:  # the machine has become faster than when the duration was measured
                duration *= 0.8
        found += killed
    return found


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        print(kill_at_random_moments(Path(folder), int(sys.argv[1])))
