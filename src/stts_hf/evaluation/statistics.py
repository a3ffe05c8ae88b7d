"""
Accuracies with intervals, and tables of them: a bootstrap over clips and seeds, since neither questions about one clip
nor answers of one training run are independent. Methods are compared question by question, on the same resamples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

RESAMPLES = 10_000
LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean, and the bounds of the middle 95 % of its resamples."""

    mean: float
    low: float
    high: float


class Bootstrap:
    """
    Resamples of clips and seeds that all figures of a report share.

    Each resample draws as many of the `C` clips as there are, with replacement and with all of their questions, and
    independently as many of the `S` seeds. The variance among seeds comes out as `(S - 1) / S` of what it is: where
    seeds differ more than clips do, the interval of three seeds holds the truth in only 3 of 4 studies. With one seed,
    no interval reflects what seeds decide. (`scipy.stats.bootstrap` refuses a single seed.)

    clips: (Q,) the clip of each question, any hashable. Raises `ValueError` where there is no question.
    """

    def __init__(self, clips: Sequence[Any], resamples: int = RESAMPLES) -> None:
        if not len(clips):
            raise ValueError("clips is empty: there is no question to resample.")
        places = {clip: place for place, clip in enumerate(dict.fromkeys(clips))}
        self.clip_of = np.array([places[clip] for clip in clips])  # (Q,)
        self.num_clips, self.resamples = len(places), resamples
        self.clip_draws = self._draws(0, self.num_clips)  # (B, C) how often each clip is drawn

    def _draws(self, stream: int, number: int) -> np.ndarray:
        generator = np.random.default_rng([0, stream])
        return generator.multinomial(number, np.full(number, 1 / number), size=self.resamples)

    def mean(self, values: np.ndarray, groups: Sequence[np.ndarray]) -> Interval:
        """
        The mean over `groups` of the mean of `values` in each, with its interval.

        values: (S, Q), such as right or wrong, or the difference of two methods. groups: (Q,) bool each. Groups weigh
        alike, however many questions each has.
        """
        values = np.asarray(values, dtype=float)
        seed_draws = self._draws(1, len(values))  # (B, S), the same for every figure of as many seeds
        mean, resampled = 0.0, np.zeros(self.resamples)
        for group in groups:
            chosen = np.flatnonzero(group)
            if not len(chosen):
                raise ValueError("groups holds a group without a question.")
            sums = np.stack([self._per_clip(chosen, row[chosen]) for row in values])  # (S, C)
            counts = self.clip_draws @ self._per_clip(chosen, np.ones(len(chosen)))  # (B,)
            totals = ((self.clip_draws @ sums.T) * seed_draws).sum(1) / len(values)  # (B,)
            # A resample without a question of a small group is left out.
            resampled += np.divide(totals, counts, out=np.full(self.resamples, np.nan), where=counts > 0)
            mean += float(values[:, chosen].mean())
        low, high = np.nanquantile(resampled / len(groups), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return Interval(mean / len(groups), float(low), float(high))

    def _per_clip(self, chosen: np.ndarray, values: np.ndarray) -> np.ndarray:
        return np.bincount(self.clip_of[chosen], weights=values, minlength=self.num_clips)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def interval(found: Interval | None, signed: bool = False, digits: int = 1) -> str:
    if found is None:
        return ""
    mean, low, high = (f"{value:{'+' if signed else ''}.{digits}f}" for value in (found.mean, found.low, found.high))
    return f"{mean} [{low}, {high}]"
