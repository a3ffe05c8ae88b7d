"""What the runs of a study found, by what was asked: accuracies, differences and correlations, with their intervals."""

import math
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from stts_hf.evaluation.statistics import Bootstrap, Interval

from .data import read_object
from .methods import FROZEN, METHODS
from .runs import RIGHT
from .study import MAIN, MAIN_RATIO, QUESTIONS, Run, read_records, read_settings

VIDEO_GROUPS = ("motion", "detail", "long")
AVERAGE = "average"  # of the groups about videos, each of which weighs the same
# 97.5 % quantiles of Student's t with 1, 2, ... degrees of freedom; more have the last one, which is a little too wide.
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
Answers = Mapping[int, Mapping[str, Any]]  # to one set of questions, by the run's seed, as `ask` records them


def t_interval(values: np.ndarray) -> Interval:
    """The mean of values (S,), one for each seed, and its 95 % interval by Student's t. One value has none: NaN."""
    mean = float(values.mean())
    if len(values) == 1:
        return Interval(mean, math.nan, math.nan)
    quantile = T_QUANTILES[min(len(values) - 1, len(T_QUANTILES)) - 1]
    half = float(quantile * values.std(ddof=1) / math.sqrt(len(values)))
    return Interval(mean, mean - half, mean + half)


class Results:
    """All records of the study in `folder`. Raises `StudyError` for those that cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.settings = read_settings(folder)
        self.about = read_object(folder / QUESTIONS)
        self.records = read_records(folder, self.settings)
        questions = [
            question | {"look": look} for look in self.settings.looks for question in self.about[look]["questions"]
        ]
        self.types, self.groups, self.looks = (
            np.array([question[name] for question in questions]) for name in ("type", "group", "look")
        )
        self.bootstrap = Bootstrap([(question["look"], question["clip"]) for question in questions])
        self._answers: dict[tuple[Any, ...], dict[int, Any]] = {}
        for record in self.records.values():
            run = record["run"]
            for asked in record["evaluations"].values():
                key = (run["method"], asked["method"], asked["pruning_ratio"], run["pruning_layer"], asked["scaling"])
                self._answers.setdefault(key, {})[run["seed"]] = asked
        seeds = [record["run"]["seed"] for record in self.records.values() if record["run"]["method"] == FROZEN]
        for (run_method, method, *_), answers in self._answers.items():
            if run_method == FROZEN and METHODS[method].ignores_seeds:
                asked = next(iter(answers.values()))
                answers |= dict.fromkeys(seeds, asked)

    def _of_seeds(self, method: str, layer: int | None = None) -> list[dict[str, Any]]:
        layer = self.settings.base_layer if layer is None else layer
        names = (Run(method, layer, seed).name for seed in self.settings.seeds)
        return [self.records[name] for name in names if name in self.records]

    def find(
        self,
        method: str,
        ratio: float = MAIN_RATIO,
        layer: int | None = None,
        scaling: float = 0.0,
        weights: str | None = None,
    ) -> Answers:
        """
        What was answered; empty where it was not run. ratio: of no effect for methods that have their own. weights:
        the method whose runs trained them, by default its own or the frozen base's.
        """
        weights = weights or (method if METHODS[method].has_runs else FROZEN)
        layer = self.settings.base_layer if layer is None else layer
        return self._answers.get((weights, method, METHODS[method].ratio(ratio), layer, scaling), {})

    def subsets(self, column: str, look: str = MAIN) -> list[np.ndarray]:
        """The questions (Q,) of a group, or for the average of each group about videos; groups without any left out."""
        of_look = self.looks == look
        masks = [of_look & (self.groups == name) for name in (VIDEO_GROUPS if column == AVERAGE else (column,))]
        return [mask for mask in masks if mask.any()]

    def accuracy(self, answers: Answers, column: str = AVERAGE, look: str = MAIN) -> Interval | None:
        """Right answers in percent; None if there are none."""
        return self.combine([(1, answers)], column, look)

    def difference(self, first: Answers, second: Answers, column: str = AVERAGE, look: str = MAIN) -> Interval | None:
        """By how many points `first` is above `second`, over the seeds that both have; None if there are none."""
        return self.combine([(1, first), (-1, second)], column, look)

    def combine(self, terms: Iterable[tuple[int, Answers]], column: str, look: str = MAIN) -> Interval | None:
        """A sum of accuracies times factors, with its interval over the seeds that all have."""
        values, subsets = self._values(list(terms)), self.subsets(column, look)
        if values is None or not subsets:
            return None
        return t_interval(np.mean([values[:, subset].mean(1) for subset in subsets], axis=0))

    def over_clips(self, terms: Iterable[tuple[int, Answers]], column: str, look: str = MAIN) -> Interval | None:
        """The same with its interval over clips: of the mean over the seeds, question by question."""
        values, subsets = self._values(list(terms)), self.subsets(column, look)
        return None if values is None or not subsets else self.bootstrap.mean(values.mean(0, keepdims=True), subsets)

    def _values(self, terms: list[tuple[int, Answers]]) -> np.ndarray | None:
        """(seeds, Q) in percent."""
        seeds = sorted(set.intersection(*(set(answers) for _, answers in terms)))
        values = [sum(100 * factor * is_right(answers[seed]) for factor, answers in terms) for seed in seeds]
        return np.stack(values) if values else None

    def accuracy_of_type(self, answers: Answers, kind: str, look: str = MAIN) -> float | None:
        """Right answers to a type of question in percent."""
        chosen = (self.types == kind) & (self.looks == look)
        return 100 * statistics.mean(is_right(asked)[chosen].mean() for asked in answers.values()) if answers else None

    def level(self, name: str, column: str, look: str = MAIN) -> float | None:
        """`chance` or `text_only`, in percent, from what the data set says of each type; None where it does not."""
        by_type, subsets = self.about[look].get(name) or {}, self.subsets(column, look)
        if not subsets or not by_type.keys() >= {str(kind) for subset in subsets for kind in self.types[subset]}:
            return None
        return 100 * statistics.mean(np.mean([by_type[kind] for kind in self.types[subset]]) for subset in subsets)

    def motion(self, method: str) -> Interval | None:
        """Mean correlation of a method's scores with what moves, over the clips that all seeds have."""
        found = [it["motion"] for it in self._of_seeds(method) if "motion" in it]
        clips = sorted(set.intersection(*map(set, found))) if found else []
        return t_interval(np.array([np.mean([one[clip] for clip in clips]) for one in found])) if clips else None

    def seconds(self, name: str, method: str) -> float | None:
        """Median over the seeds of what training records under a name: `seconds_per_step`, `scorer_seconds`."""
        found = [record["training"].get(name) for record in self._of_seeds(method)]
        return statistics.median(found) if found and None not in found else None


def is_right(asked: Mapping[str, Any]) -> np.ndarray:
    """(Q,) 1.0 for right answers, 0.0 for all others."""
    return (np.array(list(asked["marks"])) == RIGHT).astype(float)


def mean_tokens(answers: Answers, column: str = AVERAGE, kind: str = "llm_tokens") -> float | None:
    """Tokens, or "video_tokens", of a prompt that reach the language model; for the average, of groups about videos."""
    names = VIDEO_GROUPS if column == AVERAGE else (column,)
    found = [asked[kind][name] for asked in answers.values() for name in names if name in asked[kind]]
    return statistics.mean(found) if found else None
