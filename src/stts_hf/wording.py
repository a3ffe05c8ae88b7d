"""Words that several rooms use: shares, which people write in three ways, and what a misspelt name may have meant."""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path


def percent(share: float) -> str:
    """Such as "50%" of 0.5, and "0.4%" of 0.004, which is not "0%"."""
    return f"{100 * share:g}%"


def share(text: str) -> float:
    """A share as people write it: 0.5, 0,5 or 50%. Raises `argparse.ArgumentTypeError`."""
    number = text.strip().replace(",", ".")
    try:
        value = float(number[:-1]) / 100 if number.endswith("%") else float(number)
    except ValueError:
        raise argparse.ArgumentTypeError(f"is {text!r}, but must be a share such as 0.5 or 50%") from None
    if not 0 <= value <= 1:  # NaN is not either
        raise argparse.ArgumentTypeError(
            f"is {text}, but must be a share from 0 (drop nothing) to 1 (drop all), as 0.5 or 50%"
        )
    return value


def listed(names: Sequence[str], most: int = 4) -> str:
    """Such as "a, b, c, d and 3 more"."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def spread(rounds: Sequence[float], digits: int = 1) -> str:
    """Median of rounds, with the lowest and the highest of several: "12.3 (11.9-13.0)"."""
    import statistics  # help does not need it

    low, median, high = (f"{of(rounds):.{digits}f}" for of in (min, statistics.median, max))
    return median if len(rounds) < 2 else f"{median} ({low}-{high})"


def gigaflop(flops: float) -> str:
    """Three digits: "0.915", "12.3", "1,235"; without a power of ten from 1e5 FLOPs on."""
    return f"{flops / 1e9:,.0f}" if flops >= 99.95e9 else f"{flops / 1e9:#.3g}"


def saved(base: float, ours: float) -> str:
    """How much more or less than `base`: "-63%"; empty beside nothing."""
    return f"{ours / base - 1:+.0%}" if base else ""


def speed(base: Sequence[float], ours: Sequence[float]) -> str:
    """How many times as fast as `base`, by medians: "1.52x"; "rounds disagree" where not every round says which is."""
    import statistics  # help does not need it

    if not all(ours):
        return ""
    ratios = [one / other for one, other in zip(base, ours, strict=True)]
    agree = min(ratios) > 1 or max(ratios) < 1
    return f"{statistics.median(base) / statistics.median(ours):.2f}x" if agree else "rounds disagree"


def shown_name(checkpoint: str) -> str:
    """What pages call a checkpoint: as it was given, without the folders of this machine."""
    return Path(checkpoint).name if Path(checkpoint).is_absolute() else checkpoint


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """`Did you mean 'x'?` with the nearest of the known names, or `otherwise` where none is near."""
    import difflib  # commands that are right do not need it

    close = difflib.get_close_matches(name, list(known), n=1)
    return f"Did you mean {close[0]!r}?" if close else otherwise
