"""Errors that a command prints as one line: user errors, and lack of disk space, permissions or memory."""

import contextlib
import errno
from collections.abc import Iterator

from stts_hf.versions import check_versions


class CommandError(Exception):
    """A user error. `main` prints its message as one line and exits with status 2, without a traceback."""


def one_line(error: BaseException, limit: int = 300) -> str:
    """Returns an exception's message on one line, cut after `limit` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 4] + " ..."


def shortage(error: BaseException, less_memory: str | None) -> str | None:
    """Describes a lack of resources and its remedy; None for other errors. less_memory: settings that need less."""
    from stts_hf.errors import is_disk_full, is_forbidden, is_out_of_memory

    what = one_line(error, 200)
    if isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
        return f"a path cannot be used ({what}): name another"
    if isinstance(error, BrokenPipeError):
        return "what reads the output has ended: write to a file, where the command has --output"
    if is_out_of_memory(error):
        remedy = f"try {less_memory}" if less_memory else "give the same command again where more is free"
        return f"out of memory ({what}): {remedy}"
    if is_disk_full(error):
        return f"no space is left on the disk, or a file may not grow ({what}): make room, and give the command again"
    if is_forbidden(error):
        return f"a file or folder is forbidden ({what}): allow it, or name another, and give the command again"
    return None


def need_extras(what: str, *extras: str, module: str | None = None) -> None:
    """Raises `CommandError` if packages of the extras, or `module`, are missing; `what` comes before the remedy."""
    import importlib.util

    try:
        for extra in extras:
            check_versions(extra)
        if module is not None and importlib.util.find_spec(module) is None:
            raise ImportError(f"{module} is not installed.")
    except ImportError as error:
        raise CommandError(f"{one_line(error)} {what}: pip install 'stts-hf[{','.join(extras)}]'") from None


@contextlib.contextmanager
def refused(prefix: str = "", *kinds: type[Exception]) -> Iterator[None]:
    """Turns errors of these kinds (default: `ValueError`) into a `CommandError`. prefix: put before the message."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, kinds or ValueError):
            raise
        text = one_line(error, limit=1000)
        raise CommandError(text if prefix == "--" and text.startswith("`") else prefix + text) from error
