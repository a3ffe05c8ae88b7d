"""Visits of tabs: whose turn it is, and which video is looked at."""

import threading

import pytest

from stts_hf.demo.held_clips import HeldClips
from stts_hf.demo.visits import Visits
from tests.stts_hf.demo.conftest import PATIENCE


@pytest.fixture
def visits() -> Visits:
    return Visits(HeldClips(1))


def test_a_tab_has_one_answer_at_a_time_and_does_not_keep_others_waiting(visits):
    entered = threading.Event()

    def ask_again() -> None:
        with visits.turn("me", "b"):
            entered.set()

    again = threading.Thread(target=ask_again, daemon=True)
    with visits.turn("me", "a") as visit:
        again.start()
        with visits.turn("other", "a"):
            assert not entered.wait(0.1)
        visits.choose("me", "b")  # of the same tab, so that its next answer waits too
        assert visit.left
        assert not entered.wait(0.1)
    assert entered.wait(PATIENCE)


def test_a_program_asks_about_one_video_and_then_another(visits):
    for video in "a", "b":
        with visits.turn("me", video) as visit:
            assert visit.video == video
            assert visit.turns == []
            visit.turns.append(video)


def test_a_question_about_another_video_than_the_chosen_one_has_no_turn(visits):
    visits.choose("me", "a")
    with visits.turn("me", "b") as visit:
        assert visit is None
    with visits.turn("me", "a") as visit:
        assert visit.video == "a"


def test_what_was_stopped_is_not_the_next_answer(visits):
    with visits.turn("me", "a") as visit:
        visit.stopped = True
    with visits.turn("me", "a") as visit:
        assert not visit.stopped


def test_a_video_chosen_again_after_another_begins_anew_and_chosen_twice_goes_on(visits):
    assert [visits.choose("me", video) for video in ("a", "a", None, "a", "b")] == [True, False, True, True, True]
