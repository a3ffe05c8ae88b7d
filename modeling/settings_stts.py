"""The pruning settings that every backbone has, and their checks."""

import numbers

SELECTORS = ("scorer", "cosine", "random")
SCORE_RESCALINGS = ("row", "frame", "none")
PACKINGS = ("varlen", "first_fit_descending")
POSITION_RULES = ("original", "compact")


def check_choice(name: str, value, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"`{name}` is {value!r}, but must be one of {', '.join(repr(choice) for choice in choices)}.")


def check_pruning_ratio(value, name: str = "pruning_ratio") -> float:
    """Returns `value` as a float in [0, 1]; raises `ValueError` for anything else (NaN and bools included)."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0.0 <= float(value) <= 1.0:
        raise ValueError(
            f"`{name}` is {value!r}, but must be a number in [0, 1]: the share of a video's blocks to drop, "
            "0 to keep all of them, 1 to drop every video token."
        )
    return float(value)
