"""What a machine may lack in the middle of work, whichever library says so: room on the disk, rights, memory."""

import errno
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeVar

from safetensors import SafetensorError

Item = TypeVar("Item")
Result = TypeVar("Result")
_FULL = (
    "No space left on device",
    "Disk quota exceeded",
    "File too large",
    "iostream error",
    "PytorchStreamWriter failed writing",
)
_FORBIDDEN = ("Permission denied", "Operation not permitted", "Read-only file system")
_NO_MEMORY = (
    "can't allocate memory",
    "Cannot allocate memory",
    "out of memory",
    "bad_alloc",
    "STATUS_ALLOC_FAILED",
    "cannot map zero-fill pages",  # of a library that is imported then
    "failed to map segment from shared object",
)
_RUST_NUMBER = re.compile(r"\(os error (\d+)\)")


def is_disk_full(error: BaseException) -> bool:
    """Also where a limit on the size of files is reached."""
    return any(_is(one, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG), _FULL) for one in _chain(error))


def is_forbidden(error: BaseException) -> bool:
    """Whether a file or folder may not be read or written."""
    return any(_is(one, (errno.EACCES, errno.EPERM, errno.EROFS), _FORBIDDEN) for one in _chain(error))


def is_out_of_memory(error: BaseException) -> bool:
    """Of the machine or of a device."""
    return any(
        isinstance(one, MemoryError)
        or _is(one, (errno.ENOMEM,), _NO_MEMORY)
        or (isinstance(one, ImportError) and any(word in str(one) for word in _NO_MEMORY))
        for one in _chain(error)
    )


def in_halves(call: Callable[[Sequence[Item]], Sequence[Result]], items: Sequence[Item]) -> list[Result | MemoryError]:
    """
    `call(items)`, a result for each; where memory runs short, of each half of them. An item that does not fit alone has
    a `MemoryError` as its result.
    """
    try:
        return [*call(items)] if items else []
    except (MemoryError, RuntimeError) as error:  # of a CPU and of a device
        if not is_out_of_memory(error):
            raise
        if len(items) == 1:
            return [too_large(error)]
    middle = len(items) // 2  # behind the `except`, which holds on to what was allocated
    return in_halves(call, items[:middle]) + in_halves(call, items[middle:])


def too_large(error: Exception) -> MemoryError:
    """What to say of a row that does not fit into memory alone."""
    said = " ".join(str(error).split())[:200] or type(error).__name__
    return MemoryError(
        f"This row alone does not fit into memory ({said}): fewer frames, a higher pruning ratio or bfloat16 take less"
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """
    An error and its causes. What it was raised amid is none, but where PyTorch fails to close a file that it could not
    write: that error says nothing of the reason.
    """
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        closing = isinstance(following, RuntimeError) and "unexpected pos" in str(following)
        amid = following.__context__ if closing and not following.__suppress_context__ else None
        following = following.__cause__ or amid


def _is(error: BaseException, numbers: Collection[int], words: Collection[str]) -> bool:
    """Whether an error has one of the system's numbers, or, where its library gives none, says one of the words."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in numbers
    if type(error) is Exception or isinstance(error, SafetensorError):  # tokenizers and safetensors, which are in Rust
        found = _RUST_NUMBER.search(str(error))
        return found is not None and int(found[1]) in numbers
    return isinstance(error, OSError | RuntimeError) and any(word in str(error) for word in words)
