"""Subtitles and multiple choice as text."""

import pytest

from stts_hf.data.prompts import choice_messages, subtitle_text

SRT = (
    "1\n00:00:01,000 --> 00:00:02,500\n{\\an8}Hello <i>there</i>,\nyou &amp; me\n\n"
    "2\n00:01:05,000 --> 01:00:07,040\nBye\n"
)
VTT = (
    "WEBVTT\n\nNOTE a comment\n\n00:01.000 --> 00:02.500 align:start\n<v Bob>Hello there,\nyou &amp; me\n\n"
    "00:01:05.000 --> 01:00:07.040\nBye\n"
)
CUES = [{"start": 1, "end": "2.5", "text": "Hello there,\nyou & me"}, {"start": 65.0, "end": 3607.04, "text": " Bye"}]
OPTIONS = ["to the left", "to the right", "B"]


@pytest.mark.parametrize("form", ["srt", "vtt", "text", "cues"])
def test_subtitles_of_all_forms(tmp_path, form):
    given = {"srt": "subs.srt", "vtt": "subs.vtt", "text": SRT, "cues": CUES}[form]
    (tmp_path / "subs.srt").write_text("\ufeff" + SRT, encoding="utf-8")
    (tmp_path / "subs.vtt").write_text(VTT)
    assert subtitle_text(given, tmp_path) == "1.0 - 2.5 Hello there, you & me\n65.0 - 3607.0 Bye"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("gone.srt", "no subtitle file 'gone.srt'"),
        ("1\nnow --> later\nHello", "neither SRT nor WebVTT"),
        ([{"start": 0, "text": "x"}], r"subtitles\[0\]"),
        ([{"start": 0, "end": "soon", "text": "x"}], r"subtitles\[0\] must start and end"),
        ([{"start": 0, "end": 1, "text": " "}], "hold no text"),
        (3, "got int"),
    ],
)
def test_bad_subtitles_are_refused(given, said):
    with pytest.raises((ValueError, TypeError), match=said):
        subtitle_text(given)


@pytest.mark.parametrize("answer", [1, "1", "b", "(B)", "to the right"], ids=repr)
def test_choice_prompt_and_answer(answer):
    options = ["to the left", "to the right", "up"]
    prompt = (
        "Where does it go?\nA. to the left\nB. to the right\nC. up\n"
        "Answer with the option's letter from the given choices directly."
    )
    expected = [{"role": "user", "content": prompt}, {"role": "assistant", "content": "B"}]
    assert choice_messages("Where does it go?", options, answer) == expected


@pytest.mark.parametrize(
    ("question", "options", "answer", "said"),
    [
        ("Q?", OPTIONS, 3, "answer 3 is none of"),
        ("Q?", OPTIONS, "D", "answer 'D' is none of"),
        ("Q?", OPTIONS, True, "answer True is none of"),
        ("Q?", OPTIONS, "B", "answer 'B' fits several of"),
        ("Q?", ["x", "x"], "x", "fits several of"),
        ("Q?", ["x"], 0, "options must be a list of 2 to 26"),
        ("", OPTIONS, 0, "question must be a text"),
    ],
)
def test_bad_choices_are_refused(question, options, answer, said):
    with pytest.raises(ValueError, match=said):
        choice_messages(question, options, answer)


def test_an_open_question_keeps_its_answer():
    assert choice_messages("Why?", None, 12)[1] == {"role": "assistant", "content": "12"}
