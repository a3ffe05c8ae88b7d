"""What befalls a command in the middle of its work: a kill, a full disk, lost permissions, memory that is used up.

The command runs in a process of its own, without root's rights over files, and each fault is the system's own.
"""

import contextlib
import ctypes
import functools
import multiprocessing
import os
import pkgutil
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from stts_hf.data.isolated import start_early

Fault = Callable[[], None]
_COMES = "[here comes the fault]\n"
_BALLAST = ".ballast"


@dataclass(frozen=True)
class Ended:
    """How a command ended. status: minus its number where a signal killed it."""

    status: int
    out: str
    err: str


def start(
    command: Sequence[object],
    here: Path,
    fault: Fault | None = None,
    at: str = "",
    call: int = 1,
) -> Ended:
    """
    Runs `stts-hf command` in the folder `here`. fault: comes before call number `call` of the
    function `at`, named as for `mock.patch`. Raises `AssertionError` where the command hangs or no fault came.
    """
    start_early("stts_hf.inference.requests")  # imports PyTorch once, for all
    context: Any = multiprocessing.get_context("forkserver")
    # Not files: a limit on the sizes of files would be theirs, too.
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    arguments = (list(map(str, command)), here, [writer for _, writer in pipes], fault, at, call)
    process = context.Process(target=_run, args=arguments)
    process.start()
    for _, writer in pipes:
        writer.close()
    process.join(120)
    hangs = process.exitcode is None
    process.kill()
    ended = Ended(process.exitcode, *(_read(reader) for reader, _ in pipes))
    assert not hangs, f"it hangs: {ended}"
    assert (fault is None) == (_COMES not in ended.err), f"no fault came: {ended}"
    return ended


def _read(pipe: Any) -> str:
    text = b""
    while part := os.read(pipe.fileno(), 1 << 16):
        text += part
    return text.decode()


def _run(
    command: list[str],
    here: Path,
    pipes: Sequence[Any],
    fault: Fault | None,
    at: str,
    call: int,
) -> None:
    for number, pipe in enumerate(pipes, 1):
        os.dup2(pipe.fileno(), number)
        pipe.close()
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    os.chdir(here)
    _give_up_rights()
    from stts_hf.cli.main import main

    with nullcontext() if fault is None else _before(at, call, fault):
        status = main(command)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _give_up_rights() -> None:
    """The modes of files hold for root, too, where it has none of its capabilities(7) left."""
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()  # version 3, this thread
    if ctypes.CDLL(None, use_errno=True).capset(header, none):
        raise OSError(ctypes.get_errno(), "capset")


@contextlib.contextmanager
def _before(at: str, call: int, fault: Fault) -> Iterator[None]:
    owner, name = at.rpartition(".")[::2]
    place = pkgutil.resolve_name(owner)
    function = getattr(place, name)
    calls: list[None] = []

    @functools.wraps(function)
    def struck(*arguments: Any, **options: Any) -> Any:
        calls.append(None)
        if len(calls) == call:
            print(_COMES, end="", file=sys.stderr, flush=True)
            fault()
        return function(*arguments, **options)

    with mock.patch.object(place, name, struck):
        yield


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def forbid(path: Path, mode: int = 0o500) -> None:
    """Takes away the right to write into a folder, or with `mode` 0 all rights."""
    path.chmod(mode)
    assert not os.access(path, os.W_OK), "modes do not hold here, so nothing would be shown"


def exhaust() -> None:
    """Leaves no memory beyond what this process has, nor blocks of 128 KiB and more of that."""
    used = psutil.Process().memory_info().data
    resource.setrlimit(resource.RLIMIT_DATA, (used, resource.RLIM_INFINITY))
    malloc = ctypes.CDLL(None).malloc
    malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    while malloc(1 << 17):  # what was freed before
        pass


def fill(disk: Path, room: int) -> None:
    """Leaves `room` bytes on a `mounted_disk`; where none could be mounted, that many for each file."""
    if not disk.is_mount():
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        return
    with open(disk / _BALLAST, "wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        file.truncate(max(0, file.tell() - room))


def mend(here: Path) -> None:
    """Makes room in `here` again, and gives back the rights to it and what it holds."""
    (here / _BALLAST).unlink(missing_ok=True)
    for path in [here, *here.rglob("*")]:
        path.chmod(0o700 if path.is_dir() else 0o600)
