"""A ranking that is told what matters puts it first: where things are, where they come and go, in turn."""

import numpy as np
import pytest

from examples.study.questions import compose_short
from examples.study.told import rank_things, together

TIMES = [0.25 * frame for frame in range(16)]
GRID = (16, 4, 4)


def test_every_block_that_a_thing_covers_is_above_every_other_block():
    scene, questions = compose_short(3)
    covers = scene.covers(TIMES, 12)
    for question in questions:
        scores = rank_things(covers, question.things, GRID)
        assert scores.shape == (16, 16)
        seen = covers[list(question.things)].reshape(-1, 16, 4, 3, 4, 3).any((0, 3, 5)).reshape(16, 16)
        assert np.array_equal(scores > 0, seen)


def test_the_first_and_the_last_look_come_before_the_others_and_things_take_turns():
    covers = np.zeros((2, 16, 12, 12), np.uint8)
    covers[0, 2:6, 0:3, 0:3] = 50  # one block, in four frames
    covers[1, 9, 9:12, 9:12] = 10  # another, once
    first = rank_things(covers, [0, 1], GRID).ravel().argsort(kind="stable")[::-1][:3].tolist()
    assert set(first) == {2 * 16, 5 * 16, 9 * 16 + 15}
    assert not rank_things(covers, [], GRID).any()


def test_masks_of_other_frames_than_the_model_sees_are_refused():
    with pytest.raises(ValueError, match=r"are not of the frames and blocks \(8, 4, 4\)"):
        rank_things(np.zeros((1, 16, 12, 12), np.uint8), [0], (8, 4, 4))


def test_questions_are_told_by_themselves_or_with_all_about_their_clip():
    rows = [{"id": f"{clip}{thing}", "clip": clip, "things": [thing]} for clip, thing in (("a", 0), ("a", 2), ("b", 1))]
    assert [things for things, _ in together(rows, by_clip=False)] == [[0], [2], [1]]
    assert [things for things, _ in together(rows, by_clip=True)] == [[0, 2], [1]]
