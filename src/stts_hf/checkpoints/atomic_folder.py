"""A folder or file that appears whole or not at all: written beside its place, flushed to the disk, then renamed.

Whatever stops the writing (an error, a full disk, a kill, a power cut), the place holds what it held before, or nothing
until the next run towards it puts that back. What a killed run leaves is hidden beside it.
"""

import contextlib
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout


@contextlib.contextmanager
def atomic_folder(destination: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Gives a new, empty folder, which becomes `destination` when the `with` block ends without an error.

    With `overwrite`, an existing folder stays until the new one is complete. Raises `FileExistsError` where one exists
    without `overwrite`, or another process is writing it.
    """
    with _beside(destination, timeout=0) as (new, old):
        yield new
        flush(new)
        if destination.exists():
            if not overwrite:
                raise FileExistsError(f"{destination} exists: name another folder.")
            destination.rename(old)
        try:
            new.rename(destination)
        except OSError:
            if old.exists():
                old.rename(destination)
            raise
        _sync(destination.parent)
        shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def atomic_file(destination: Path) -> Iterator[Path]:
    """Gives a path, which takes the place at the end; follows a link there, and keeps mode and owner."""
    name, destination = destination.name, Path(os.path.realpath(destination))
    with _beside(destination) as (folder, _):
        new = folder / name  # libraries choose a format by the ending
        yield new
        with contextlib.suppress(FileNotFoundError):
            before = destination.stat()
            new.chmod(stat.S_IMODE(before.st_mode))
            with contextlib.suppress(PermissionError):  # only root may give files away
                os.chown(new, before.st_uid, before.st_gid)
        _sync(new)
        new.replace(destination)
        _sync(destination.parent)


@contextlib.contextmanager
def _beside(destination: Path, timeout: float = -1) -> Iterator[tuple[Path, Path]]:
    """Locks `destination`; gives two hidden paths beside it, for what is new and old. Mends what a kill left."""
    parent, name = destination.parent, destination.name
    if len(os.fsencode(name)) > 200:  # names have at most 255 bytes
        name = hashlib.sha256(os.fsencode(name)).hexdigest()
    parent.mkdir(parents=True, exist_ok=True)
    new, old = parent / f".{name}.stts-new", parent / f".{name}.stts-old"
    lock = FileLock(parent / f".{name}.stts-lock", timeout=timeout)
    try:
        lock.acquire()
    except Timeout as error:
        raise FileExistsError(f"another process is writing {destination}: wait for it, or name another.") from error
    try:
        if old.exists() and not destination.exists():
            old.rename(destination)
        for left in (new, old):
            shutil.rmtree(left, ignore_errors=True)
        new.mkdir()
        yield new, old
    finally:
        shutil.rmtree(new, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.unlink(lock.lock_file)
        lock.release()


def move_files(folder: Path, destination: Path, commit_marker: str) -> None:
    """Moves everything in `folder` into `destination`, which may hold other files, over what has the same names.

    `commit_marker` is the file that makes a folder valid, such as `config.json`: the old one is deleted first, the new
    one is moved last. Weights of an earlier save are deleted, since they could be read in place of the new ones.
    """
    destination.mkdir(exist_ok=True)
    names = sorted(os.listdir(folder), key=lambda name: (name == commit_marker, name))
    if commit_marker in names:
        (destination / commit_marker).unlink(missing_ok=True)
    for name in stale_weights(os.listdir(destination), names):
        (destination / name).unlink()
    for name in names:
        if (folder / name).is_dir() and (destination / name).exists():
            shutil.rmtree(destination / name)
        if name == commit_marker:
            _sync(destination)
        os.replace(folder / name, destination / name)
    _sync(destination)


def flush(folder: Path) -> None:
    """Waits until every file of `folder`, and the list of its files, is on the disk."""
    for path in [*sorted(folder.rglob("*")), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    if os.name != "posix":  # folders cannot be opened elsewhere
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def stale_weights(present: list[str], saved: list[str]) -> list[str]:
    """Returns the weight files among `present` that a save left over, which transformers could read before `saved`."""
    weights = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
    if not any(map(weights.fullmatch, saved)):
        return []
    return sorted(name for name in present if weights.fullmatch(name) and name not in saved)
