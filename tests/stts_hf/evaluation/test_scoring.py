"""Which option was chosen, what counts as the same words, and the sums."""

import pytest

from stts_hf.evaluation.scoring import find_choice, is_right, summarize

OPTIONS = ["left", "up", "the right", "a red ball"]


@pytest.mark.parametrize(
    ("written", "chosen"),
    [
        ("B", 1),
        (" (C) ", 2),
        ("B. up", 1),
        ("A: it goes there", 0),
        ("C\nBecause it moves.", 2),
        ("**B**", 1),
        ("Answer: B", 1),
        ("The answer is (C).", 2),
        ("up", 1),
        ("Up.", 1),
        ("right", 2),
        ("The answer is left", 0),
        ("red ball", 3),
        ("", None),
        ("E", None),
        ("A ball moves up", None),
        ("I cannot tell", None),
        ("left or up", None),
        ("A, B", None),
        ("(A), (C)", None),
        ("The answer is A, B and C.", None),
        ("B. B", 1),
        ("B\u3002", 1),
        ("A. a ball", 0),
    ],
)
def test_option_that_was_chosen(written, chosen):
    assert find_choice(written, OPTIONS) == chosen


def test_a_letter_is_that_of_the_option_even_where_options_are_letters():
    """The prompt asks for the option's letter."""
    assert find_choice("A", ["K", "A", "X"]) == 0
    assert find_choice("X", ["K", "A", "X"]) == 2
    assert find_choice("B. A", ["K", "A", "X"]) == 1
    assert find_choice("B. K", ["K", "A", "X"]) is None


def test_options_of_the_same_words_are_not_told_apart_by_them():
    assert find_choice("the ball", ["ball", "a ball"]) is None


@pytest.mark.parametrize("answer", ["up", "B", 1])
def test_answer_of_a_row_is_text_letter_or_number(answer):
    row = {"options": OPTIONS, "answer": answer}
    assert is_right("B", row)
    assert not is_right("A", row)
    assert not is_right("nothing of it", row)


@pytest.mark.parametrize(
    ("written", "right"),
    [
        ("Red", True),
        ("red.", True),
        ("The red", True),
        ("red ball", False),
        ("", False),
        ("RED!", True),
        ("\u201cred\u201d", True),
        ("red\u3002", True),
    ],
)
def test_open_answers_are_the_same_words(written, right):
    assert is_right(written, {"answer": "red"}) == right


def test_an_open_answer_of_an_article_or_a_mark_is_compared_as_it_is():
    assert is_right("A", {"answer": "a"})
    assert not is_right("the", {"answer": "a"})
    assert not is_right("-", {"answer": "+"})


def record(name, kind, group, right, **more):
    tokens = {"prompt_tokens": 10, "video_tokens": 8, "video_tokens_kept": 4, "seconds": 0.5}
    return {"id": name, "type": kind, "group": group, "right": right, "no_option": False, "error": None} | tokens | more


def test_sums_by_type_and_group():
    failed = {
        "prompt_tokens": None,
        "video_tokens": None,
        "video_tokens_kept": None,
        "seconds": 0.0,
        "error": "damaged",
    }
    summary = summarize(
        [
            record("1", "colour", "detail", True),
            record("2", "direction", "motion", False, no_option=True, prompt_tokens=20),
            record("3", "direction", "motion", True),
            record("4", "direction", "motion", False, **failed),
        ]
    )
    assert summary["types"]["direction"] == {
        "questions": 3,
        "right": 1,
        "accuracy": 1 / 3,
        "no_option": 1,
        "errors": 1,
        "prompt_tokens": 15,
        "video_tokens": 8,
        "video_tokens_kept": 4,
        "seconds": 1.0,
    }
    assert list(summary["types"]) == ["colour", "direction"]
    assert summary["groups"]["detail"]["accuracy"] == 1.0
    assert summary["all"]["accuracy"] == 0.5
