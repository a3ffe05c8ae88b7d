"""What commands print: results on stdout, progress on stderr, as a bar on a terminal and as lines in a log."""

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tqdm import tqdm


def print_lines(**lines: str) -> None:
    for label, value in lines.items():
        print(f"{label.replace('_', ' ') + ':':<14}{value}", flush=True)


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """Prints the name of a step and, if it took a second or more, its duration."""
    note(f"{name} ...")
    started = time.perf_counter()
    yield
    seconds = time.perf_counter() - started
    if seconds >= 1:
        note(f"  done in {seconds:.1f} s")


def progress_bar(total: int, unit: str, done: int = 0) -> "tqdm | ProgressLines":
    """A bar that disappears when it is closed. done: items of an earlier run, which do not count for the rate."""
    if not sys.stderr.isatty():
        return ProgressLines(total, unit, done)
    from tqdm import tqdm

    return tqdm(total=total, initial=done, unit=unit, leave=False, file=sys.stderr)


class ProgressLines(contextlib.AbstractContextManager):
    """In place of a bar, for a log: a line after 10 seconds, and then one every 60, with rate and time left."""

    FIRST, EVERY = 10.0, 60.0

    def __init__(self, total: int, unit: str, done: int = 0):
        self.total, self.unit, self.done, self.before = total, unit, done, done
        self.started = time.perf_counter()
        self.next = self.started + self.FIRST

    def update(self, number: int = 1) -> None:
        self.done += number
        if (now := time.perf_counter()) < self.next or self.done >= self.total:
            return
        import datetime

        self.next = now + self.EVERY
        seconds = (now - self.started) / max(self.done - self.before, 1)  # of each
        left = datetime.timedelta(seconds=round(seconds * (self.total - self.done)))
        note(f"  {self.done} of {self.total} {self.unit}s, {1 / seconds:.3g} per second, {left} left")

    def __exit__(self, *exception: object) -> None:
        pass


def import_libraries() -> None:
    """Imports PyTorch and transformers, which takes seconds."""
    with stage("Loading PyTorch and transformers"):
        from transformers import AutoModelForMultimodalLM, AutoProcessor  # noqa: F401 - importing is the point
    keep_bars_out_of_logs()


def keep_bars_out_of_logs() -> None:
    """Switches off the libraries' progress bars if stderr is not a terminal."""
    from huggingface_hub.utils import disable_progress_bars
    from transformers.utils import logging

    if not sys.stderr.isatty():
        disable_progress_bars()
        logging.disable_progress_bar()
