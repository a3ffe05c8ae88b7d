"""Tables of Markdown, and how figures stand in them."""

from collections.abc import Sequence

from stts_hf.evaluation.statistics import Interval

EMPTY = ""


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def interval(found: Interval | None, signed: bool = False, digits: int = 1) -> str:
    if found is None:
        return EMPTY
    mean, low, high = (f"{value:{'+' if signed else ''}.{digits}f}" for value in (found.mean, found.low, found.high))
    return f"{mean} [{low}, {high}]"


def number(value: float | None, digits: int = 1) -> str:
    return EMPTY if value is None else f"{value:.{digits}f}"
