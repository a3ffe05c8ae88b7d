"""What the user got wrong, as opposed to what the program got wrong."""

import contextlib
from collections.abc import Iterator


class CommandError(Exception):
    """A mistake of the user's. `main` prints its message as one line and exits with status 2, without a traceback."""


def one_line(error: BaseException, limit: int = 300) -> str:
    """Returns an exception's message on one line, cut after `limit` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 4] + " ..."


@contextlib.contextmanager
def of_option() -> Iterator[None]:
    """Makes a `ValueError` of a deeper room, such as "device x cannot be used", a mistake in the option `--device`."""
    try:
        yield
    except ValueError as error:
        raise CommandError(f"--{one_line(error, limit=500)}") from error
