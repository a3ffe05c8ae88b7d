"""`evaluate`: what is asked, in which words, and what a record says of it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stts_hf.evaluation.evaluate import ask_openly, evaluate, read_question, record_of
from stts_hf.evaluation.scoring import summarize
from stts_hf.inference import predictor as module
from stts_hf.inference.requests import Answer
from stts_hf.modeling.budget_stts import KeepRule

VISION = SimpleNamespace(pruning_ratio=0.5)
MODEL = SimpleNamespace(config=SimpleNamespace(vision_config=VISION, keep_rule=KeepRule(0.5).replaced))
CHOICE = {
    "id": "c",
    "question": "Where?",
    "options": ["left", "up"],
    "answer": "up",
    "type": "where",
    "group": "motion",
}
OPEN = {"id": "o", "question": "Which colour?", "answer": "red", "type": "colour"}


@pytest.fixture
def says(monkeypatch, processor):
    """`evaluate` with a model that writes these texts; returns the records, and the prompts it was asked with."""

    def says(rows: list[dict[str, Any]], *texts: str):
        asked = []

        def answer_requests(model, processor, prompts, **options):
            asked.extend(prompts)
            facts: dict[str, Any] = {
                "new_tokens": 2,
                "prompt_tokens": 100,
                "keep_mask": torch.arange(81)[None] < 40,
                "seconds": 0.5,
            }
            answers = [Answer("clip.mp4", "?", text, **facts) for text in texts]
            return (pair for pair in enumerate(answers))  # a generator, which can be closed

        monkeypatch.setattr(module, "answer_requests", answer_requests)
        return list(evaluate(MODEL, processor, rows)), asked

    return says


def test_a_record_of_a_choice(says):
    [record], _ = says([CHOICE], "B")
    assert record == {
        "id": "c",
        "type": "where",
        "group": "motion",
        "written": "B",
        "right": True,
        "no_option": False,
        "error": None,
        "prompt_tokens": 100,
        "video_tokens": 81,
        "video_tokens_kept": 40,
        "seconds": 0.5,
    }


@pytest.mark.parametrize("answer", ["up", "B", 1])
def test_a_choice_can_be_asked_openly(says, answer):
    rows = ask_openly([{**CHOICE, "answer": answer}, OPEN])
    assert rows == [{name: value for name, value in CHOICE.items() if name != "options"}, OPEN]
    [right, _], [prompt, _] = says(rows, "Up.", "red")
    assert (right["right"], right["no_option"]) == (True, False)
    assert prompt.tail == "<|im_start|>user\nWhere?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("wrong", [{"answer": "down"}, {"answer": None}, {"options": 3}, {"options": "left"}])
def test_what_is_wrong_with_a_choice_is_said_of_it_openly_too(says, wrong):
    row = {**CHOICE, **wrong}
    assert ask_openly([row]) == [row]
    [record], _ = says(ask_openly([row]))
    assert "Row 'c': " in record["error"]


def test_the_answer_is_not_in_the_prompt_and_the_options_are(says):
    _, [prompt] = says([CHOICE], "B")
    assert prompt.tail == (
        "<|im_start|>user\nWhere?\nA. left\nB. up\nAnswer with the option's letter from the given choices directly."
        "<|im_end|>\n<|im_start|>assistant\n"
    )


def test_subtitles_stand_before_the_question(any_processor, media):
    row = OPEN | {"videos": [str(media / "two.mp4")], "subtitles": str(media / "speech.srt")}
    prompt = read_question(any_processor, row)
    if "subtitle" in any_processor.chat_template:
        assert prompt.head.endswith(any_processor.video_token)
        assert prompt.tail.startswith("0.0 - 1.2 Hello there<|im_start|>user\nWhich colour?")
    else:
        closing = "<|vision_end|>" if "<|vision_end|>" in any_processor.chat_template else ""
        assert prompt.head.endswith(f"{any_processor.video_token}{closing}")
        assert prompt.tail.lstrip().startswith("0.0 - 1.2 Hello there\nWhich colour?")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**OPEN, "videos": ["gone.mp4"]}, r"^Row 'o': videos: the file 'gone\.mp4' does not exist"),
        ({**CHOICE, "answer": "down"}, r"Row 'c': answer 'down' is none of the options \['left', 'up'\]"),
        ({"id": "n", "question": "Why?"}, "Row 'n': answer is empty"),
        (
            {"id": "m", "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
            "Row 'm': question is empty: a conversation in messages is for training",
        ),
        ({**OPEN, "question": "What is <|video|>?"}, "Row 'o': .* holds '<|video|>'"),
        (OPEN | {"type": ["a", "b"]}, r"Row 'o': type is \['a', 'b'\]"),
        (OPEN | {"group": "\udc00"}, r"Row 'o': group is '\\udc00'"),
        ({**OPEN, "videos": ["https://a.b/c.mp4"]}, "is a URL, and nothing is fetched unasked"),
    ],
    ids=["missing file", "answer no option", "no answer", "conversation", "control token", "list", "surrogate", "URL"],
)
def test_a_row_that_cannot_be_asked_is_a_record_with_its_error(says, row, message):
    records, _ = says([row, OPEN | {"id": "good"}], "red")
    assert summarize(records)["all"]["errors"] == 1
    bad, good = records
    assert good["right"]
    assert (bad["id"], bad["right"], bad["written"], bad["video_tokens"]) == (row["id"], False, None, None)
    with pytest.raises(ValueError, match=message):
        raise ValueError(bad["error"])


def test_an_error_that_is_not_the_rows_names_its_kind():
    assert record_of(OPEN, Answer(error=torch.OutOfMemoryError("No room.")))["error"] == "OutOfMemoryError: No room."
