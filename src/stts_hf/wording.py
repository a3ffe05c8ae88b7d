"""Words that several rooms use: shares as percentages, and what a misspelt name may have meant."""

from collections.abc import Iterable


def percent(share: float) -> str:
    """Such as "50%" of 0.5, and "0.4%" of 0.004, which is not "0%"."""
    return f"{100 * share:g}%"


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """`Did you mean 'x'?` with the nearest of the known names, or `otherwise` where none is near."""
    import difflib  # commands that are right do not need it

    close = difflib.get_close_matches(name, list(known), n=1)
    return f"Did you mean {close[0]!r}?" if close else otherwise
