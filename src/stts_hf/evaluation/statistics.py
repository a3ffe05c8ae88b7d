"""Accuracies with intervals: a bootstrap over clips and seeds that is paired by question.

Questions about one clip stand or fall together, and so do the answers of one training run. So clips and seeds are what
is drawn anew, not single answers; and methods are compared on the same draws, question by question and seed by seed,
because what makes a question hard, or an order of the training data lucky, is the same for both.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

RESAMPLES = 10_000
LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean, and between `low` and `high` 95 % of what resampling gives."""

    mean: float
    low: float
    high: float


class Bootstrap:
    """
    Draws of clips and seeds, with replacement, that all figures of a report share.

    Every resample draws as many of the `C` clips as there are, each with all of its questions, and independently as
    many of the `S` seeds. A figure's interval is the middle 95 % of its resamples. The variance among seeds comes out
    as `(S - 1) / S` of what it is. Where seeds differ more than clips do, the interval of three goes from the lowest to
    the highest, and so holds the truth in only 3 of 4 studies. With one seed, what seeds decide is in no interval.

    clips: (Q,) the clip of each question, any hashable. Raises `ValueError` where there is no question.
    """

    def __init__(self, clips: Sequence[Any], resamples: int = RESAMPLES, seed: int = 0) -> None:
        if not len(clips):
            raise ValueError("clips is empty: there is no question to resample.")
        places = {clip: place for place, clip in enumerate(dict.fromkeys(clips))}
        self.clip_of = np.array([places[clip] for clip in clips])  # (Q,)
        self.num_clips, self.resamples, self.seed = len(places), resamples, seed
        self.clip_draws = self._draws(0, self.num_clips)  # (B, C) how often each clip is drawn

    def _draws(self, stream: int, number: int) -> np.ndarray:
        generator = np.random.default_rng([self.seed, stream])
        return generator.multinomial(number, np.full(number, 1 / number), size=self.resamples)

    def mean(self, values: np.ndarray, groups: Sequence[np.ndarray]) -> Interval:
        """
        The mean over `groups` of the mean of `values` in each.

        values: (S, Q), such as right or wrong, or how much more right one method is than another. groups: (Q,) bool
        each; one for an accuracy, several for an average that weighs them alike, however many questions each has.
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
            # A resample may hold no question of a small group; it then says nothing.
            resampled += np.divide(totals, counts, out=np.full(self.resamples, np.nan), where=counts > 0)
            mean += float(values[:, chosen].mean())
        low, high = np.nanquantile(resampled / len(groups), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return Interval(mean / len(groups), float(low), float(high))

    def _per_clip(self, chosen: np.ndarray, values: np.ndarray) -> np.ndarray:
        return np.bincount(self.clip_of[chosen], weights=values, minlength=self.num_clips)
