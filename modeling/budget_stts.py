"""How many blocks of each video stay: by a share of them, by the level of their scores, or by a number of tokens.

Plain numbers. A block is one token of the language model. Which blocks stay, `select_blocks` says.
"""

import numbers
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .scoring_stts import num_kept_blocks
from .selectors_stts import SELECTORS

# Of settings of a call: kind, range, and what it must be.
SHARE = (numbers.Real, 0, 1, "a number in [0, 1]: the share of a video's blocks to drop, 0 for none, 1 for all")
SETTINGS: dict[str, tuple[type, float, float, str]] = {
    "pruning_ratio": SHARE,
    "score_threshold": (numbers.Real, -sys.float_info.max, sys.float_info.max, "a number: the lowest score that stays"),
    "min_pruning_ratio": SHARE,
    "max_pruning_ratio": SHARE,
    "video_token_budget": (numbers.Integral, 1, sys.maxsize, "a positive int: the most tokens that a video keeps"),
    "pruned_length": (numbers.Integral, 1, sys.maxsize, "a positive int: tokens of a row after dropping"),
}
KEEP_ARGUMENTS = ("pruning_ratio", "score_threshold", "min_pruning_ratio", "max_pruning_ratio", "video_token_budget")
REPLACED = ("score_threshold", "video_token_budget")  # in a config, by a ratio that is given


def check_setting(name: str, value: Any) -> None:
    """Raises `ValueError` for a value that this one of `SETTINGS` cannot have (NaN and bools included)."""
    kind, low, high, meaning = SETTINGS[name]
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:  # type: ignore[operator]
        raise ValueError(f"`{name}` is {value!r}, but must be {meaning}.")


def check_pruning_ratio(value: Any) -> float:
    """Returns `value` as a float in [0, 1]; raises `ValueError` for anything else."""
    check_setting("pruning_ratio", value)
    return float(value)


def check_one_rule(given: Mapping[str, Any], others: Sequence[str] = KEEP_ARGUMENTS[1:]) -> None:
    """Raises `ValueError` for a ratio beside one of `others`, which say how many blocks stay in its place."""
    name = next((name for name in others if given.get(name) is not None), None)
    if given.get("pruning_ratio") is not None and name is not None:
        raise ValueError(
            f"`pruning_ratio` is {given['pruning_ratio']!r} and `{name}` is {given[name]!r}: leave out one."
        )


@dataclass(frozen=True)
class KeepRule:
    """
    ratio: share `k` of a video's blocks that goes, or one for each video; None with another rule in its place.
    threshold: lowest score of a block of a later frame that stays. bounds: lowest and highest share that a threshold
    drops. budget: most blocks of a video that stay, or one number for each video. Frame 0 stays, but at ratio 1.
    """

    ratio: float | Sequence[float] | None = None
    threshold: float | None = None
    bounds: tuple[float, float] = (0.0, 1.0)
    budget: int | Sequence[int] | None = None

    @classmethod
    def of(cls, config: Any, *given: Mapping[str, Any]) -> "KeepRule":
        """
        By a vision config and by what is given in its place, the last first, under the names `KEEP_ARGUMENTS`. Raises
        `ValueError` for values that are out of range, or do not fit each other or the config's selector.
        """
        own, threshold, low, high, budget = (getattr(config, name) for name in KEEP_ARGUMENTS)
        rule = cls(own if threshold is None and budget is None else None, threshold, (low, high), budget)
        for some in given:
            rule = rule.replaced(some)
        rule.check(config.selector)
        return rule

    def replaced(self, given: Mapping[str, Any]) -> "KeepRule":
        """The rule where some of `KEEP_ARGUMENTS` are given; a ratio takes the place of all others, and they its."""
        check_one_rule(given)
        for name, value in given.items():
            if name in KEEP_ARGUMENTS and value is not None:
                is_list = isinstance(value, list | tuple) and name in ("pruning_ratio", "video_token_budget")
                for some in value if is_list else [value]:
                    check_setting(name, some)
        ratio, threshold, low, high, budget = (given.get(name) for name in KEEP_ARGUMENTS)
        if ratio is not None:
            return KeepRule(ratio, bounds=self.bounds)
        threshold, budget = either(threshold, self.threshold), either(budget, self.budget)
        if threshold is None and (low, high) != (None, None):
            raise ValueError(f"`min_pruning_ratio` is {low}, `max_pruning_ratio` {high}: pass a `score_threshold` too.")
        ratio = self.ratio if threshold is None and budget is None else None
        return KeepRule(ratio, threshold, (either(low, self.bounds[0]), either(high, self.bounds[1])), budget)

    def check(self, selector: str) -> None:
        """Raises `ValueError` for bounds in the wrong order, and for a threshold that the selector's scores lack."""
        low, high = self.bounds
        if low > high:
            raise ValueError(f"`min_pruning_ratio` is {low}, but must be at most `max_pruning_ratio`, which is {high}.")
        levels = SELECTORS[selector].levels
        if self.threshold is not None and (levels is None or not levels[0] <= self.threshold <= levels[1]):
            scores = "are not comparable between videos" if levels is None else f"lie in [{levels[0]}, {levels[1]}]"
            raise ValueError(
                f"`score_threshold` is {self.threshold}, but the scores of `selector` = {selector!r} {scores}. Take a "
                "threshold in its range, a selector that has one ('scorer', 'cosine'), or `pruning_ratio` instead."
            )

    def check_videos(self, grids: list[tuple[int, int, int]]) -> None:
        """Raises `ValueError` for lists of another length than videos, and for less than a frame's blocks."""
        for name, kind, values in (
            (KEEP_ARGUMENTS[0], "ratios", self.ratio),
            (KEEP_ARGUMENTS[4], "budgets", self.budget),
        ):
            if isinstance(values, Sequence) and len(values) != len(grids):
                raise ValueError(
                    f"`{name}` holds {len(values)} {kind}, but the call has {len(grids)} videos: pass one number, or "
                    "one for each video."
                )
        for video, (_, rows, cols) in enumerate(grids):
            if (budget := entry(self.budget, video)) is not None and budget < rows * cols:
                raise ValueError(
                    f"`video_token_budget` is {budget}, but the first frame of video {video}, which always stays, has "
                    f"{rows * cols} tokens. Raise it to at least that, or make frames smaller."
                )

    def num_kept(self, grids: list[tuple[int, int, int]], above: Sequence[int] | None = None) -> list[int]:
        """`K` of each video. above: with a threshold, how many blocks of each video's later frames reach it."""
        kept = []
        for video, (frames, rows, cols) in enumerate(grids):
            first, number = rows * cols, num_kept_blocks(frames, rows * cols, entry(self.ratio, video) or 0)
            if self.threshold is not None:
                assert above is not None  # counted by the tower
                most, least = (max(num_kept_blocks(frames, first, share), first) for share in self.bounds)
                number = max(least, min(first + above[video], most))
            kept.append(min(number, either(entry(self.budget, video), number)))
        return kept


def entry(value: Any, video: int) -> Any:
    """What a list says of a video, or one value for all."""
    return value[video] if isinstance(value, Sequence) else value


def either(new: Any, old: Any) -> Any:
    return old if new is None else new
