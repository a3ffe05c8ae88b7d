"""A disk that is full early, for tests of what is written."""

import contextlib
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def small_disk(size: int) -> Iterator[None]:
    """No file of this process grows beyond `size` bytes, pytest's own log included; a write gets as far as that."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def mounted_disk(place: Path, size: int) -> Iterator[None]:
    """A disk of `size` bytes at the new folder `place`, where this user may mount one; else a folder like others."""
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        yield
    finally:
        if mounted:
            # A process that was killed just now may still hold on to it.
            subprocess.run(["umount", "--lazy", str(place)], check=True)
