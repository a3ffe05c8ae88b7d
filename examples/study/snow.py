"""
What a study lost to regions of snow, which change all the time and which nothing is asked about: for each ratio, by how
many points STTS is above others, by the number of regions of snow in a clip. What the clips show is composed anew from
the data set's seed, so neither videos nor weights are needed.
"""

import numpy as np

from stts_hf.evaluation.tables import interval, table
from stts_hf.shares import percent

from .data import StudyError
from .make_dataset import compose_split
from .methods import UNPRUNED
from .results import Results


def snow_of(results: Results, seed: int) -> np.ndarray:
    """
    (Q,) regions of snow in the clip of each test question; -1 for pictures. seed: of the data set. Raises `StudyError`
    where clips of that seed could not have been asked so.
    """
    clips = {name: split["clips"] for name, split in results.about["splits"].items()}
    counts, asked = {}, {}
    for clip, kind, _, scene, questions in compose_split(clips, "test", seed, results.about.get("snow", True)):
        counts[clip] = -1 if kind == "image" else len(scene.snow)
        asked[clip] = {question.kind for question in questions}
    if not all(kind in asked[clip] for clip, kind in zip(results.clips, results.types.tolist(), strict=True)):
        raise StudyError(f"--seed {seed} is not the data set's, whose questions are others: name that of the data set")
    return np.array([counts[clip] for clip in results.clips])


def snow_table(results: Results, snow: np.ndarray) -> str:
    """A row for each ratio and method beside STTS that were run."""
    numbers = sorted(set(snow.tolist()) - {-1})
    rows = []
    for ratio in sorted(results.settings.ratios):
        for label, name in (("no pruning", UNPRUNED), ("random", "random"), ("heuristic", "cosine"), ("ToMe", "tome")):
            first, second = results.find("stts", ratio), results.find(name, ratio)
            if first.keys() & second.keys():
                terms = ((1, first), (-1, second))
                found = (interval(results.combine_over(terms, [snow == number]), signed=True) for number in numbers)
                rows.append([f"{percent(ratio)}, over {label}", *found])
    return table(["", *map(str, numbers)], rows)
