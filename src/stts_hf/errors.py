"""Errors about what the machine lacks, whichever library raises them: disk space, rights, memory."""

import errno
import os
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
_NO_MEMORY = ("can't allocate memory", "out of memory", "bad_alloc", "ALLOC_FAILED", "zero-fill pages", "failed to map")


def is_disk_full(error: BaseException) -> bool:
    """Whether a write failed for lack of space, also of a quota or a limit on the size of files."""
    words = ("iostream error", "PytorchStreamWriter failed", "unexpected pos")
    return _is(error, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG), words)


def is_forbidden(error: BaseException) -> bool:
    """Whether a file or folder may not be read or written."""
    return _is(error, (errno.EACCES, errno.EPERM, errno.EROFS))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory of the machine or of a device ran out."""
    return _is(error, (errno.ENOMEM,), _NO_MEMORY)


def _is(error: BaseException | None, numbers: Sequence[int], words: Sequence[str] = (), depth: int = 8) -> bool:
    """Whether an error or a cause of it has one of the system's numbers, or, where a library gives none, its words."""
    if error is None or not depth:  # an error may be its own cause
        return False
    text, number = str(error), errno.ENOMEM if isinstance(error, MemoryError) else getattr(error, "errno", None)
    if number is None and (found := re.search(r"\(os error (\d+)\)", text)):  # libraries in Rust
        number = int(found[1])
    if number is None and isinstance(error, RuntimeError | OSError | ImportError):
        fits = any(word in text for word in (*words, *map(os.strerror, numbers)))
    else:
        fits = number in numbers
    return fits or _is(error.__cause__, numbers, words, depth - 1)


def in_halves(call: Callable[[Sequence[Item]], Sequence[Result]], items: Sequence[Item]) -> list[Result | MemoryError]:
    """`call(items)`, a result for each; halved while memory runs out. An item that does not fit alone has its error."""
    try:
        return [*call(items)] if items else []
    except (MemoryError, RuntimeError) as error:  # of a CPU and of a device
        if not is_out_of_memory(error):
            raise
        if len(items) == 1:
            return [too_large(error)]
    middle = len(items) // 2  # outside of `except`, which keeps alive what was allocated
    return in_halves(call, items[:middle]) + in_halves(call, items[middle:])


def too_large(error: Exception) -> MemoryError:
    """The error of a row that does not fit into memory alone."""
    said = " ".join(str(error).split())[:200] or type(error).__name__
    return MemoryError(
        f"This row alone does not fit into memory ({said}): fewer frames, a higher pruning ratio or bfloat16 take less"
    )
