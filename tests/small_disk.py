"""A disk that is full early, for tests of what is written."""

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def small_disk(size: int) -> Iterator[None]:
    """No file of this process grows beyond `size` bytes, pytest's own log included; a write gets as far as that."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
