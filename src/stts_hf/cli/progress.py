"""What a command says on stderr while it works: what it is doing, and how many tokens an answer has so far."""

import contextlib
import math
import sys
import time
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """Says on stderr what is being done, and how long it took."""
    note(f"{name} ...")
    started = time.perf_counter()
    yield
    seconds = time.perf_counter() - started
    if math.floor(seconds):
        note(f"  done in {seconds:.1f} s")


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class TokenBar:
    """
    Counts the tokens of each answer; a streamer for `generate`, for one answer after the other. A context manager, so
    that no bar is left on the screen when an answer breaks off.
    """

    def __init__(self, max_new_tokens: int):
        self._total = max_new_tokens
        self._bar: Any = None

    def __enter__(self) -> "TokenBar":
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    def put(self, value: Any) -> None:
        from tqdm import tqdm

        if self._bar is None:  # the first call brings the prompt
            self._bar = tqdm(total=self._total, unit="token", leave=False, file=sys.stderr)
        else:
            self._bar.update(1)

    def end(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
