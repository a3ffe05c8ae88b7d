"""What is asked about a scene is true of its pixels, and everything in it follows from its seed."""

import collections
import re
from dataclasses import replace

import numpy as np
import pytest

from examples.study.distraction import BEHIND, OVER, Effect, Look
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
    first, last = replace(scene, things=(mover,)).draw([0.0, scene.duration], SIZE)
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
                for frame in replace(scene, things=(light[0],)).draw([0.25 * i for i in range(16)], SIZE)
            ]
            rises = sum(now and not before for before, now in zip([False, *seen], seen, strict=False))
            assert str(rises) == answers[0]
            counted += 1
    assert counted > 15


@pytest.mark.parametrize("kind", [*BEHIND, *OVER])
def test_an_effect_changes_every_frame_within_its_region_and_leaves_things_to_be_seen(kind):
    effect = Effect(kind, 1.0, (0.25, 0.5, 0.25, 0.25))
    plain = replace(STILL, things=(Thing("square", "blue", 0.05, (0.375, 0.625)),))
    frames, without = (
        scene.draw([0.0, 0.25, 0.5], SIZE).astype(int) for scene in (replace(plain, effects=(effect,)), plain)
    )
    region = np.zeros((SIZE, SIZE), bool)
    region[SIZE // 2 : SIZE * 3 // 4, SIZE // 4 : SIZE // 2] = True
    assert np.array_equal(frames[:, ~region], without[:, ~region])
    changed = [np.abs(frames[one] - frames[other])[region].mean() for one, other in ((0, 1), (0, 2), (1, 2))]
    unchanged = np.abs(without[0] - without[1])[region].mean()
    assert min(changed) > unchanged + 1
    if kind in BEHIND:
        assert all(colour_at(frame, (0.375, 0.625)) == "blue" for frame in frames)


def test_the_camera_moves_everything_and_a_sliding_background_what_lies_behind():
    plain = replace(STILL, duration=1.0)
    panned, slid = replace(plain, drift=(0.25, 0.0)), replace(plain, slide=(0.25, 0.0))
    for scene, first, last in ((panned, 0.625, 0.375), (slid, 0.5, 0.5)):
        frames = scene.draw([0.0, 1.0], SIZE)
        assert [colour_at(frame, (x, 0.5)) for frame, x in zip(frames, (first, last), strict=True)] == ["red", "red"]
        moved = np.abs(frames[0][:, SIZE // 4 :].astype(int) - frames[1][:, : -SIZE // 4])
        assert np.median(moved) < 6  # what lay there lies here, but for noise
    shaken = replace(plain, shake=0.02)
    assert len({tuple(shaken.camera(time)) for time in (0.0, 0.25, 0.5)}) == 3


def test_motion_is_where_the_camera_shows_it():
    flash = Thing("square", "blue", 0.06, (0.5, 0.5), shown=((0.9, 1.1),))
    drifting = replace(STILL, duration=1.0, drift=(0.5, -0.5), things=(flash,))
    frames = drifting.draw([0.0, 1.0], 144).astype(int)
    blue = (frames[..., 2] - frames[..., :2].max(-1) > 60).reshape(2, 12, 12, 12, 12).any((2, 4))
    assert not blue[0].any()
    assert np.array_equal(drifting.motion([0.0, 1.0], 12)[1], blue[1])


def test_things_cover_the_cells_in_which_their_pixels_lie():
    scene = replace(STILL, drift=(0.25, -0.25), things=(STILL.things[0], Thing("square", "blue", 0.06, (0.2, 0.5))))
    frames = scene.draw([0.0, 4.0], 144).astype(int)
    red = (frames[..., 0] - frames[..., 1:].max(-1) > 60).reshape(2, 12, 12, 12, 12).mean((2, 4))
    assert scene.covers([0.0, 4.0], 12)[0] / 100 == pytest.approx(red, abs=0.1)


def test_in_the_other_style_things_have_other_sizes_and_speeds_and_the_same_ends():
    for seed in range(20):
        (plain, asked), (other, same) = (compose_short(seed, look=Look(style=style)) for style in ("plain", "other"))
        assert asked == same
        for one, changed in zip(plain.things, other.things, strict=True):
            assert 0.79 < changed.radius / one.radius < 0.89 or 1.14 < changed.radius / one.radius < 1.31
            for time in (0.0, plain.duration):
                assert changed.place_at(time) == pytest.approx(one.place_at(time))
            assert (changed.velocity == one.velocity) == (one.velocity == (0.0, 0.0))


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
