"""A folder that appears whole or not at all: written beside its place, flushed to the disk, then renamed.

Whatever stops the writing (an error, a full disk, a kill, a power cut), the place holds what it held before. What a
killed run leaves is a hidden sibling, which the next run towards the same place removes.
"""

import contextlib
import ctypes
import glob
import os
import re
import secrets
import shutil
import socket
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from .json_files import read_json

_NEW, _OLD = ".stts-new", ".stts-old"
_EXCHANGE = 2  # RENAME_EXCHANGE of Linux' renameat2, RENAME_SWAP of macOS' renamex_np
_AT_FDCWD = -100
# What saving, downloading or converting a checkpoint leaves in a folder; anything else is someone's own.
_CHECKPOINT_FILES = (
    "config.json",
    "generation_config.json",
    "*processor_config.json",
    "chat_template.*",
    "additional_chat_templates",
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "*.safetensors",
    "*.safetensors.index.json",
    "*_stts.py",
    "*_molmo2.py",
    "README.md",
    "LICENSE*",
    ".gitattributes",
    ".cache",
    "__pycache__",
    "_saving-*",
)


@contextlib.contextmanager
def published_folder(destination: Path, overwrite: bool = False) -> Iterator[Path]:
    """Gives a new, empty folder, which becomes `destination` when the `with` block ends without an error.

    Raises `ValueError` where `destination` exists without `overwrite`, or is not a checkpoint folder.
    """
    check_destination(destination, overwrite)
    destination.parent.mkdir(parents=True, exist_ok=True)
    recover(destination)
    token = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    folder = destination.with_name(f".{destination.name}{_NEW}-{token}")
    folder.mkdir()
    try:
        yield folder
        flush(folder)
        _place(folder, destination, token, overwrite)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_destination(destination: Path, overwrite: bool) -> None:
    """Raises `ValueError`, with a remedy, where `destination` cannot or must not be written."""
    if destination.is_symlink():
        raise ValueError(
            f"`destination` {destination} is a link: name the folder it leads to, {destination.resolve()}."
        )
    if not destination.exists():
        return
    if not destination.is_dir():
        raise ValueError(f"`destination` {destination} is a file: name a folder that does not exist yet.")
    if not overwrite:
        raise ValueError(f"`destination` {destination} exists: pass --overwrite to replace it, or name another folder.")
    names = sorted(entry.name for entry in destination.iterdir())
    if names and not _holds_checkpoint(destination):
        raise ValueError(
            f"`destination` {destination} holds files but no config.json of a Molmo2 or STTS model, so it is not a "
            "checkpoint, and --overwrite would delete them: name another folder."
        )
    foreign = [name for name in names if not any(fnmatch(name, pattern) for pattern in _CHECKPOINT_FILES)]
    if foreign:
        more = f" and {len(foreign) - 4} more" if len(foreign) > 4 else ""
        raise ValueError(
            f"`destination` {destination} holds more than a checkpoint ({', '.join(foreign[:4])}{more}), which "
            "--overwrite would delete: move that elsewhere, or name another folder."
        )


def _holds_checkpoint(folder: Path) -> bool:
    try:
        config = read_json(folder / "config.json")
    except (OSError, ValueError):
        return False
    return config.get("model_type") in ("stts", "molmo2")


def check_apart(destination: Path, other: Path, what: str) -> None:
    """Raises `ValueError` where `destination` is, holds, or lies in the folder `other`, which must not change."""
    destination, other = destination.resolve(), other.resolve()
    if destination == other:
        raise ValueError(f"`destination` {destination} is the {what} itself: name another folder.")
    if other in destination.parents:
        raise ValueError(f"`destination` {destination} lies inside the {what} {other}: name a folder outside it.")
    if destination in other.parents:
        raise ValueError(f"`destination` {destination} holds the {what} {other}: name a folder outside it.")


def recover(destination: Path) -> None:
    """Removes what killed runs towards `destination` left beside it, and puts back a folder one was replacing."""
    name = glob.escape(destination.name)
    for left in sorted(destination.parent.glob(f".{name}{_NEW}-*")):
        if not _is_running(left):
            shutil.rmtree(left, ignore_errors=True)
    for old in sorted(destination.parent.glob(f".{name}{_OLD}-*")):
        if _is_running(old):
            continue
        if destination.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(destination)


def flush(folder: Path) -> None:
    """Waits until every file of `folder`, and the list of its files, is on the disk."""
    for path in sorted(folder.rglob("*")):
        _sync(path)
    _sync(folder)


def stale_weights(present: list[str], saved: list[str]) -> list[str]:
    """
    Weights among the files `present` that are no part of those just `saved`. transformers would read an old
    `model.safetensors` before a new index of shards.
    """
    weights = re.compile(r"model(\.[\w-]+?)??(-\d{5}-of-\d{5})?\.safetensors(\.index(\.[\w-]+)?\.json)?")

    def variant(name: str) -> str | None:
        found = weights.fullmatch(name)
        return (found[1] or found[4] or "") if found else None

    variants = {variant(name) for name in saved} - {None}
    return sorted(name for name in present if name not in saved and variant(name) in variants)


def _place(folder: Path, destination: Path, token: str, overwrite: bool) -> None:
    check_destination(destination, overwrite)  # another process may have come first
    if destination.exists() and not _exchange(folder, destination):
        # Without an atomic exchange the old folder steps aside; `recover` puts it back if nothing follows.
        old = destination.with_name(f".{destination.name}{_OLD}-{token}")
        destination.rename(old)
        folder.rename(destination)
        shutil.rmtree(old, ignore_errors=True)
    elif folder.exists() and not destination.exists():
        folder.rename(destination)
    _sync(destination.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two folders in one step. Returns False where system or file system cannot."""
    try:
        library = ctypes.CDLL(None, use_errno=True)
        names = os.fsencode(one), os.fsencode(other)
        if sys.platform == "darwin":
            return library.renamex_np(*names, _EXCHANGE) == 0
        return library.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _EXCHANGE) == 0
    except (OSError, AttributeError, TypeError):
        return False


def _sync(path: Path) -> None:
    if os.name != "posix":  # folders cannot be opened elsewhere
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_running(left: Path) -> bool:
    """Whether the process that made a leftover still runs. One of another machine may."""
    host, process, _ = left.name.rsplit("-", 2)
    if not host.endswith(f"-{socket.gethostname()}") or os.name != "posix":
        return True
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError):
        pass
    return True
