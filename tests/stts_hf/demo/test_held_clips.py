"""Answers for visitors: which clips are held, and what may be asked about."""

import dataclasses
import gc
import weakref
from typing import Any

import pytest

from stts_hf.demo.held_clips import Answerer, HeldClips, Limits, check_video
from stts_hf.modeling.budget_stts import KeepRule


class Held:
    """Stands in for a clip."""


def held() -> Any:
    return Held()


def test_the_clip_asked_about_longest_ago_goes_first():
    none = HeldClips(0)
    none.hold("a", 1, held())
    assert len(none) == 0
    clips, (first, second, third) = HeldClips(2), (held(), held(), held())
    clips.hold("a", 1, first)
    clips.hold("b", 1, second)
    assert clips.find("a", 1) is first
    clips.hold("c", 1, third)
    assert [clips.find(owner, 1) for owner in "abc"] == [first, None, third]


def test_what_an_owner_has_goes_with_it_and_nothing_else():
    clips = HeldClips(3)
    for key in ("a", 1), ("a", 2), ("b", 1):
        clips.hold(*key, held())
    gone = weakref.ref(clips.find("a", 1))
    clips.let_go("a")
    gc.collect()
    assert gone() is None
    assert len(clips) == 1
    assert clips.find("b", 1) is not None


@pytest.mark.parametrize(
    ("question", "words"),
    [("What is <|video|>?", "holds '<|video|>'"), (" ", "asks nothing"), ("x" * 30, "at most 20")],
)
def test_a_question_that_cannot_be_asked_is_refused_before_the_video_is_watched(assistant, question, words):
    answerer = Answerer({"scorer": assistant}, Limits(question=20))
    with pytest.raises(ValueError, match=words):
        answerer.check("me", "there is no such file", question, KeepRule(0.5), "scorer")


@pytest.mark.parametrize(
    ("limits", "words"),
    [({"seconds": 1.9}, r"lasts 2\.0 s, but at most 1\.9 s"), ({"pixels": 96 * 128 - 1}, "frames of 128 x 96")],
)
def test_a_video_beyond_the_limits_is_refused(video, limits, words):
    check_video(video, dataclasses.replace(Limits(), seconds=2.0, pixels=96 * 128))
    with pytest.raises(ValueError, match=words):
        check_video(video, dataclasses.replace(Limits(), **limits))
