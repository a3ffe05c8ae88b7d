"""What the runs of a study found, by what was asked: accuracies, differences and correlations, with their intervals."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stts_hf.evaluation.statistics import Bootstrap, Interval

from .data import read_object
from .methods import METHODS
from .runs import RIGHT
from .study import MAIN_RATIO, QUESTIONS, Run, read_records, read_settings

VIDEO_GROUPS = ("motion", "detail", "long")
AVERAGE = "average"  # of the groups about videos, each of which weighs the same
Answers = Mapping[int, Mapping[str, Any]]  # to one set of questions, by the run's seed, as `ask` records them


class Results:
    """All records of the study in `folder`. Raises `StudyError` for those that cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.settings = read_settings(folder)
        self.about = read_object(folder / QUESTIONS)
        self.records = read_records(folder, self.settings)
        questions = self.about["questions"]
        self.types = np.array([question["type"] for question in questions])
        self.groups = np.array([question["group"] for question in questions])
        self.clips = [question["clip"] for question in questions]
        self.bootstrap = Bootstrap(self.clips)
        self._answers: dict[tuple[Any, ...], dict[int, Any]] = {}
        for record in self.records.values():
            run = record["run"]
            for asked in record["evaluations"].values():
                key = (asked["method"], asked["pruning_ratio"], run["pruning_layer"], asked["scaling"])
                self._answers.setdefault(key, {})[run["seed"]] = asked

    def _place(self, method: str, ratio: float, layer: int | None) -> tuple[str, float, int]:
        return method, METHODS[method].ratio(ratio), self.settings.base_layer if layer is None else layer

    def _of_seeds(self, method: str, ratio: float, layer: int | None) -> list[dict[str, Any]]:
        names = (Run(*self._place(method, ratio, layer), seed).name for seed in self.settings.seeds)
        return [self.records[name] for name in names if name in self.records]

    def find(self, method: str, ratio: float = MAIN_RATIO, layer: int | None = None, scaling: float = 0.0) -> Answers:
        """What was answered; empty where it was not run. ratio: of no effect for methods that have their own."""
        return self._answers.get((*self._place(method, ratio, layer), scaling), {})

    def subsets(self, column: str) -> list[np.ndarray]:
        """The questions (Q,) of a group, or for the average of each group about videos; groups without any left out."""
        masks = [self.groups == name for name in (VIDEO_GROUPS if column == AVERAGE else (column,))]
        return [mask for mask in masks if mask.any()]

    def accuracy(self, answers: Answers, column: str) -> Interval | None:
        """Right answers in percent; None where there are none."""
        return self.combine([(1, answers)], column)

    def difference(self, first: Answers, second: Answers, column: str) -> Interval | None:
        """By how many points `first` is above `second`, over the seeds that both have; None where there are none."""
        return self.combine([(1, first), (-1, second)], column)

    def combine(self, terms: Iterable[tuple[int, Answers]], column: str) -> Interval | None:
        """A sum of accuracies times factors, over the seeds that all have, taken question by question."""
        return self.combine_over(terms, self.subsets(column))

    def combine_over(self, terms: Iterable[tuple[int, Answers]], subsets: Sequence[np.ndarray]) -> Interval | None:
        """The same of other questions: `subsets` (Q,) bool each, which weigh alike."""
        terms = list(terms)
        seeds = sorted(set.intersection(*(set(answers) for _, answers in terms)))
        if not seeds or not subsets:
            return None
        values = [sum(100 * factor * is_right(answers[seed]) for factor, answers in terms) for seed in seeds]
        return self.bootstrap.mean(np.stack(values), subsets)

    def accuracy_of_type(self, answers: Answers, kind: str) -> float | None:
        """Right answers to a type of question in percent."""
        chosen = self.types == kind
        return 100 * statistics.mean(is_right(asked)[chosen].mean() for asked in answers.values()) if answers else None

    def level(self, name: str, column: str) -> float | None:
        """`chance` or `text_only`, in percent, from what the data set says of each type; None where it does not."""
        by_type, subsets = self.about.get(name) or {}, self.subsets(column)
        if not subsets or not by_type.keys() >= {str(kind) for subset in subsets for kind in self.types[subset]}:
            return None
        return 100 * statistics.mean(np.mean([by_type[kind] for kind in self.types[subset]]) for subset in subsets)

    def motion(self, method: str) -> Interval | None:
        """Mean correlation of a method's scores with what moves, clips and seeds resampled."""
        found = [it["motion"] for it in self._of_seeds(method, MAIN_RATIO, None) if "motion" in it]
        clips = sorted(set.intersection(*map(set, found))) if found else []
        if not clips:
            return None
        values = np.array([[one[clip] for clip in clips] for one in found])
        return Bootstrap(clips).mean(values, [np.ones(len(clips), dtype=bool)])

    def step_seconds(self, method: str, ratio: float = MAIN_RATIO, layer: int | None = None) -> float | None:
        """Median seconds of a training step, of the seeds' runs the median."""
        found = [record["training"]["seconds_per_step"] for record in self._of_seeds(method, ratio, layer)]
        return statistics.median(found) if found and None not in found else None


def is_right(asked: Mapping[str, Any]) -> np.ndarray:
    """(Q,) 1.0 for right answers, 0.0 for all others."""
    return (np.array(list(asked["marks"])) == RIGHT).astype(float)


def mean_tokens(answers: Answers, column: str = AVERAGE, kind: str = "llm_tokens") -> float | None:
    """Tokens, or "video_tokens", of a prompt that reach the language model; for the average, of groups about videos."""
    names = VIDEO_GROUPS if column == AVERAGE else (column,)
    found = [asked[kind][name] for asked in answers.values() for name in names if name in asked[kind]]
    return statistics.mean(found) if found else None
