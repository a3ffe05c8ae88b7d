"""Intervals against closed forms and simulated studies."""

import math

import numpy as np
import pytest

from stts_hf.evaluation.statistics import Bootstrap


def everything(values):
    return [np.ones(values.shape[-1], dtype=bool)]


def test_independent_questions_have_the_interval_of_a_proportion():
    values = (np.arange(400) < 120).astype(float)[None]
    found = Bootstrap(range(400)).mean(values, everything(values))
    half = 1.96 * math.sqrt(0.3 * 0.7 / 400)
    assert found.mean == pytest.approx(0.3)
    # 10000 draws know a quantile to about 2 % of the half width, and answers come in steps of 1 / 400.
    assert (found.low, found.high) == pytest.approx((0.3 - half, 0.3 + half), abs=0.05 * half + 1 / 400)


def test_questions_of_a_clip_are_drawn_together():
    values = (np.arange(60) % 3 == 0).astype(float)[None]
    once = Bootstrap(range(60)).mean(values, everything(values))
    four_times = np.repeat(values, 4, axis=1)
    assert Bootstrap(np.repeat(range(60), 4).tolist()).mean(four_times, everything(four_times)) == once


def test_seeds_are_drawn_too():
    values = np.repeat([[0.0], [1.0]], 50, axis=1)
    found = Bootstrap(range(50)).mean(values, everything(values))
    assert (found.mean, found.low, found.high) == (0.5, 0.0, 1.0)


@pytest.mark.parametrize(
    ("seeds", "among_seeds", "least", "most"),
    [
        (1, 0.0, 0.91, 0.98),
        (3, 0.05, 0.87, 0.95),  # three seeds 5 points apart come out a bit short beside 80 clips
        (3, 2.0, 0.70, 0.80),  # the interval goes from the lowest to the highest: 1 - 2 / 2**3
    ],
)
def test_intervals_hold_the_truth_as_often_as_they_say(seeds, among_seeds, least, most):
    """Clips of 4 questions that mostly stand or fall together: counted singly, 95 % would come out as about 76 %."""
    generator = np.random.default_rng(0)
    clips = np.repeat(range(80), 4)
    held = 0
    for _ in range(400):
        level = generator.beta(0.6, 0.4, size=80)  # mean 0.6
        values = (generator.random((seeds, 320)) < level[clips]) + generator.normal(0, among_seeds, size=(seeds, 1))
        found = Bootstrap(clips.tolist(), resamples=400).mean(values, everything(values))
        held += found.low <= 0.6 <= found.high
    # Two standard errors of 400 studies are 0.02, of the last 0.04; percentile intervals are a bit short.
    assert least < held / 400 < most


def test_no_question_is_refused():
    with pytest.raises(ValueError, match="no question"):
        Bootstrap([])
