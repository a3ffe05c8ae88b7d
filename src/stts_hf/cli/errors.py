"""What the user got wrong, as opposed to what the program got wrong."""


class CommandError(Exception):
    """A mistake of the user's. `main` prints its message as one line and exits with status 2, without a traceback."""


def one_line(error: BaseException, limit: int = 300) -> str:
    """Returns an exception's message on one line, cut after `limit` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 4] + " ..."
