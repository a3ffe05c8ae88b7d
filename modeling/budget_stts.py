"""How many blocks of each video stay: by a share of them, by the level of their scores, or by a number of tokens.

Plain numbers. A block is one token of the language model. Which blocks stay, `select_blocks` says.
"""

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from .scoring_stts import num_kept_blocks
from .selectors_stts import SELECTORS

Grids = list[tuple[int, int, int]]


def check_pruning_ratio(value: object, name: str = "pruning_ratio") -> float:
    """Returns `value` as a float in [0, 1]; raises `ValueError` for anything else (NaN and bools included)."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0.0 <= float(value) <= 1.0:
        raise ValueError(
            f"`{name}` is {value!r}, but must be a number in [0, 1]: the share of a video's blocks to drop, "
            "0 to keep all of them, 1 to drop every video token."
        )
    return float(value)


def check_score_threshold(value: object) -> None:
    """Raises `ValueError` for what is neither None nor a finite number."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    if value is not None and not is_number:
        raise ValueError(
            f"`score_threshold` is {value!r}, but must be a number: the lowest score of a block that stays; or None."
        )


def check_token_budget(value: object) -> None:
    """Raises `ValueError` for what is neither None nor a positive int."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1):
        raise ValueError(
            f"`video_token_budget` is {value!r}, but must be a positive int: the most tokens that a video keeps; "
            "or None."
        )


KEEP_CHECKS: dict[str, Callable[[Any], Any]] = {
    "pruning_ratio": check_pruning_ratio,
    "score_threshold": check_score_threshold,
    "min_pruning_ratio": partial(check_pruning_ratio, name="min_pruning_ratio"),
    "max_pruning_ratio": partial(check_pruning_ratio, name="max_pruning_ratio"),
    "video_token_budget": check_token_budget,
}
KEEP_ARGUMENTS = tuple(KEEP_CHECKS)


def check_one_rule(given: Mapping[str, Any], others: Sequence[str] = KEEP_ARGUMENTS[1:]) -> None:
    """Raises `ValueError` for a ratio beside one of `others`, which say how many blocks stay in its place."""
    name = next((name for name in others if given.get(name) is not None), None)
    if given.get("pruning_ratio") is not None and name is not None:
        raise ValueError(
            f"`pruning_ratio` is {given['pruning_ratio']!r} and `{name}` is {given[name]!r}, but only one of them can "
            "say how many blocks stay. Leave out the other."
        )


@dataclass
class KeepRule:
    """
    ratio: share `k` of a video's blocks that goes, or one for each video; None with another rule in its place.
    threshold: lowest score of a block of a later frame that stays. bounds: lowest and highest share that a threshold
    drops. budget: most blocks of a video that stay, or one number for each video. Frame 0 always stays, but at ratio 1.
    """

    ratio: float | Sequence[float] | None = None
    threshold: float | None = None
    bounds: tuple[float, float] = (0.0, 1.0)
    budget: int | Sequence[int] | None = None

    @classmethod
    def of(cls, config: Any, *given: Mapping[str, Any]) -> "KeepRule":
        """
        By a vision config and by what is given in its place, the last first, under the names `KEEP_ARGUMENTS`. Raises
        `ValueError` for values that are none, or do not fit each other or the config's selector.
        """
        rule = cls(None, config.score_threshold, (config.min_pruning_ratio, config.max_pruning_ratio))
        rule.budget = config.video_token_budget
        if rule.threshold is None and rule.budget is None:
            rule.ratio = config.pruning_ratio
        for some in given:
            rule = rule.replaced(some)
        rule.check(config.selector)
        return rule

    def replaced(self, given: Mapping[str, Any]) -> "KeepRule":
        """The rule where some of `KEEP_ARGUMENTS` are given; a ratio takes the place of all others, and they its."""
        check_one_rule(given)
        for name, check in KEEP_CHECKS.items():
            value = given.get(name)
            for some in value if isinstance(value, list | tuple) and name.startswith(("pruning", "video")) else [value]:
                if some is not None:
                    check(some)
        ratio, threshold, low, high, budget = (given.get(name) for name in KEEP_ARGUMENTS)
        low, high = (own if new is None else new for own, new in zip(self.bounds, (low, high), strict=True))
        rule = replace(self, bounds=(low, high))
        if ratio is not None:
            return replace(rule, ratio=ratio, threshold=None, budget=None)
        if threshold is not None or budget is not None:
            rule.ratio, rule.threshold = None, self.threshold if threshold is None else threshold
            rule.budget = self.budget if budget is None else budget
        if rule.threshold is None and any(given.get(name) is not None for name in KEEP_ARGUMENTS[2:4]):
            raise ValueError(
                f"`min_pruning_ratio` = {low} and `max_pruning_ratio` = {high} bound what `score_threshold` drops, but "
                "there is none. Pass one, or leave them out."
            )
        return rule

    def check(self, selector: str) -> None:
        """Raises `ValueError` for bounds in the wrong order, and for a threshold that the selector's scores lack."""
        low, high = self.bounds
        if low > high:
            raise ValueError(f"`min_pruning_ratio` is {low}, but must be at most `max_pruning_ratio`, which is {high}.")
        levels = SELECTORS[selector].levels
        if self.threshold is not None and (levels is None or not levels[0] <= self.threshold <= levels[1]):
            scores = "have no level that all videos share" if levels is None else f"lie in [{levels[0]}, {levels[1]}]"
            raise ValueError(
                f"`score_threshold` is {self.threshold}, but the scores of `selector` = {selector!r} {scores}. Take a "
                "threshold in its range, a selector that has one ('scorer', 'cosine'), or `pruning_ratio` instead."
            )

    def check_videos(self, grids: Grids) -> None:
        """Raises `ValueError` for lists of another length than videos, and for less than a frame's blocks."""
        for name, kind, values in (
            ("pruning_ratio", "ratios", self.ratio),
            ("video_token_budget", "budgets", self.budget),
        ):
            if isinstance(values, Sequence) and len(values) != len(grids):
                raise ValueError(
                    f"`{name}` holds {len(values)} {kind}, but the call has {len(grids)} videos: pass one number, or "
                    "one for each video."
                )
        for video, ((_, rows, cols), budget) in enumerate(zip(grids, each(self.budget, grids), strict=True)):
            if budget is not None and budget < rows * cols:
                raise ValueError(
                    f"`video_token_budget` is {budget}, but the first frame of video {video}, which always stays, has "
                    f"{rows * cols} tokens. Raise it to at least that, or make frames smaller."
                )

    def num_kept(self, grids: Grids, above: Sequence[int] | None = None) -> list[int]:
        """`K` of each video. above: with a threshold, how many blocks of each video's later frames reach it."""
        sizes = [(frames, rows * cols) for frames, rows, cols in grids]
        if self.ratio is not None:
            ratios = zip(sizes, each(self.ratio, grids), strict=True)
            return [num_kept_blocks(*size, ratio) for size, ratio in ratios]
        kept = [frames * first for frames, first in sizes]
        if self.threshold is not None:
            assert above is not None  # counted by the tower
            most, least = ([max(num_kept_blocks(*size, k), size[1]) for size in sizes] for k in self.bounds)
            wanted = [first + number for (_, first), number in zip(sizes, above, strict=True)]
            kept = [max(low, min(n, high)) for low, n, high in zip(least, wanted, most, strict=True)]
        budgets = zip(kept, each(self.budget, grids), strict=True)
        return [number if budget is None else min(number, budget) for number, budget in budgets]


def each(value: Any, grids: Grids) -> Sequence[Any]:
    """The entry of each video, of a list or of one number for all."""
    return value if isinstance(value, Sequence) else [value] * len(grids)
