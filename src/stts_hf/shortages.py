"""What a machine may lack in the middle of work, whichever library says so: room on the disk, rights, memory."""

import errno

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


def is_disk_full(error: BaseException) -> bool:
    """
    Also where a limit on the size of files is reached, and where PyTorch and safetensors wrap the system's error in one
    of their own.
    """
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return True
    inner = error.__cause__ or error.__context__
    return any(word in str(error) for word in _FULL) or (inner is not None and is_disk_full(inner))


def is_forbidden(error: BaseException) -> bool:
    """Whether a file or folder may not be read or written, also where PyTorch and safetensors say so."""
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return True
    return any(word in str(error) for word in _FORBIDDEN)


def is_out_of_memory(error: BaseException) -> bool:
    """Of the machine or of a device, of which PyTorch raises a `RuntimeError`; also what a thread wraps in one."""
    if isinstance(error, RuntimeError) and error.__cause__ is not None:
        return is_out_of_memory(error.__cause__)
    if isinstance(error, RuntimeError | OSError | ImportError):
        return any(sign in str(error) for sign in _NO_MEMORY)
    return isinstance(error, MemoryError)
