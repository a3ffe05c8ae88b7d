"""What is asked about a scene is true of its pixels, and everything in it follows from its seed."""

import collections
import re
from dataclasses import replace

import numpy as np
import pytest

from examples.study.questions import ANSWERS, compose_image, compose_long, compose_short, conversation
from examples.study.scenes import COLOURS, DIRECTIONS, PLACES, Scene, Thing

SIZE = 96
STILL = Scene(3, 4.0, (Thing("circle", "red", 0.1, (0.5, 0.5)),))


def colour_at(frame, place):
    x, y = (int(share * SIZE) for share in place)
    patch = frame[y - 1 : y + 2, x - 1 : x + 2].reshape(-1, 3).mean(0)
    distances = {name: np.abs(patch - np.array(colour)).max() for name, colour in COLOURS.items()}
    nearest = min(distances, key=lambda name: distances[name])
    return nearest if distances[nearest] < 30 else None


def test_colours_of_marks_are_seen_where_and_only_while_they_flash_up():
    checked = 0
    for seed in range(30):
        scene, questions = compose_short(seed)
        scene = replace(scene, drift=(0.0, 0.0), flicker=())
        asked = {q.text: q.answer for q in questions if q.kind == "mark"}
        marks = [thing for thing in scene.things if thing.shape == "diamond"]
        assert len(asked) == len(marks)
        for mark in marks:
            [(start, end)] = mark.shown
            during, after = scene.draw([(start + end) / 2, end + 0.01], SIZE)
            place = min(PLACES, key=lambda name: np.hypot(*np.subtract(PLACES[name], mark.start)))
            answer = next(
                answer for text, answer in asked.items() if f"at the {place}?" in text or f"at the {place}." in text
            )
            alone = replace(scene, things=(mark,))
            assert colour_at(alone.draw([(start + end) / 2], SIZE)[0], mark.start) == answer
            assert colour_at(alone.draw([end + 0.01], SIZE)[0], mark.start) is None
            checked += colour_at(during, mark.start) == answer and not np.array_equal(during, after)
    assert checked > 60  # nothing is drawn over a mark but what stands at another place and what comes after it


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_direction_is_that_of_the_pixels(direction):
    for seed in range(200):
        scene, questions = compose_short(seed, level=1)
        if {q.kind: q.answer for q in questions}["direction"] == direction:
            break
    mover = scene.things[0]
    first, last = replace(scene, things=(mover,), drift=(0.0, 0.0), flicker=()).draw([0.0, scene.duration], SIZE)
    moved = np.abs(first.astype(int) - last).max(-1) > 30
    looks = [np.abs(frame.astype(int) - np.array(COLOURS[mover.colour])).max(-1) < 40 for frame in (first, last)]
    centres = [np.argwhere(look & moved).mean(0)[::-1] for look in looks]
    step = centres[1] - centres[0]
    assert np.dot(step, DIRECTIONS[direction]) > 0.3 * SIZE
    assert abs(np.dot(step, DIRECTIONS[direction][::-1])) < 0.05 * SIZE


def test_blinks_are_as_many_as_the_answer_in_frames_a_quarter_of_a_second_apart():
    counted = 0
    for seed in range(40):
        scene, questions = compose_short(seed)
        answers = [q.answer for q in questions if q.kind == "count"]
        light = [thing for thing in scene.things if thing.shape == "bar"]
        assert len(answers) == len(light)
        if light:
            seen = [
                colour_at(frame, light[0].start) == "white"
                for frame in replace(scene, things=(light[0],), flicker=(), drift=(0, 0)).draw(
                    [0.25 * i for i in range(16)], SIZE
                )
            ]
            rises = sum(now and not before for before, now in zip([False, *seen], seen, strict=False))
            assert str(rises) == answers[0]
            counted += 1
    assert counted > 15


def test_snow_is_another_in_every_frame_within_its_region_and_under_the_things():
    snowing = replace(STILL, snow=((0.25, 0.5, 0.25, 0.25),), things=(Thing("square", "blue", 0.05, (0.375, 0.625)),))
    frames, without = (scene.draw([0.0, 0.25, 0.5], SIZE).astype(int) for scene in (snowing, replace(snowing, snow=())))
    region = np.zeros((SIZE, SIZE), bool)
    region[SIZE // 2 : SIZE * 3 // 4, SIZE // 4 : SIZE // 2] = True
    assert np.array_equal(frames[:, ~region], without[:, ~region])
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert np.abs(frames[one] - frames[other])[region].mean() > 30
    assert all(colour_at(frame, (0.375, 0.625)) == "blue" for frame in frames)


def test_motion_is_where_the_camera_shows_it():
    flash = Thing("square", "blue", 0.06, (0.5, 0.5), shown=((0.9, 1.1),))
    drifting = replace(STILL, duration=1.0, drift=(0.25, -0.25), things=(flash,))
    frames = drifting.draw([0.0, 1.0], 144).astype(int)
    blue = (frames[..., 2] - frames[..., :2].max(-1) > 60).reshape(2, 12, 12, 12, 12).any((2, 4))
    assert not blue[0].any()
    assert np.array_equal(drifting.motion([0.0, 1.0], 12)[1], blue[1])


@pytest.mark.parametrize("compose", [compose_short, compose_long, compose_image])
def test_no_question_of_a_conversation_tells_the_answer_of_a_later_one(compose):
    """Of a thing, what was said before names neither what is asked, nor both ends of the way it goes."""
    for seed in range(200):
        questions = compose(seed)[1]
        asked = conversation(questions, np.random.default_rng(seed))
        assert {question.about for question in asked} == {question.about for question in questions}
        for index, question in enumerate(asked):
            before = [one for one in asked[:index] if one.about == question.about]
            text = " ".join(f"{one.text} {one.answer}" for one in before)
            told = re.search(rf"\b{question.answer.removeprefix('a ')}\b", text)
            assert told is None or question.kind in ("order", "long-order", "start", "end", "direction", "count"), text
            assert len(before) <= 1


@pytest.mark.parametrize("compose", [compose_short, compose_long, compose_image])
def test_answers_are_possible_and_even(compose):
    counts: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for seed in range(500):
        for question in compose(seed)[1]:
            assert question.answer in question.answers
            counts[question.kind][question.answer] += 1
    for kind, seen in counts.items():
        if kind in ANSWERS:
            expected = sum(seen.values()) / len(ANSWERS[kind])
            # Five standard deviations: one in a million that an even draw lies further out.
            assert all(abs(seen[answer] - expected) < 5 * expected**0.5 for answer in ANSWERS[kind]), kind
