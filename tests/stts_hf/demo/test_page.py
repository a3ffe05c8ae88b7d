"""What the page shows in Gradio's components."""

import ast
import dataclasses
import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest
import torch

from stts_hf.demo import page
from stts_hf.demo.held_clips import Progress
from stts_hf.inference.requests import Answer
from stts_hf.modeling.budget_stts import KeepRule

# Two frames to a tubelet; the last stands alone.
SEEN = Answer(
    "clip.mp4",
    "",
    timestamps=(0.0, 1.0, 2.0, 3.0, 6.0),
    duration=8.0,
    grid=(1, 4),
    keep_mask=torch.tensor([[True] * 4, [True, True, False, False], [False] * 4]),
)
FIRST = Progress(SEEN, "cosine", KeepRule(0.5), held=False, watching=1.5, first_word=2.0, text="A <b>ring</b>")
AGAIN = dataclasses.replace(FIRST, held=True, watching=0.0, first_word=0.1)
UNPRUNED = dataclasses.replace(FIRST, rule=KeepRule(0.0), watching=2.5, first_word=3.0)


def test_bars_stand_where_their_frames_are_on_screen_as_high_as_the_share_they_keep():
    (svg,) = re.findall("<svg.*</svg>", page.timeline(SEEN), re.S)
    bars: list[Any] = [bar for bar in ElementTree.fromstring(svg).iter("rect") if "class" not in bar.attrib]
    # Of 8 s in 1000: they begin with the first of their two frames, at 0, 2 and 6 s.
    assert [float(bar.get("x")) for bar in bars] == [0, 250, 750]
    assert [float(bar.get("height")) / page.HEIGHT for bar in bars] == [1, 0.5, 0]
    assert [bar.find("title").text for bar in bars][1] == "2.0 s: 2 of 4 tokens kept"


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        (FIRST, "5 frames read in 1.50 s · first word after 2.00 s · 50% dropped, cosine to the previous frame"),
        (AGAIN, "Answered from cache (video not read again) · first word after 0.10 s · 50% dropped, cosine"),
        (UNPRUNED, "5 frames read in 2.50 s · first word after 3.00 s · nothing dropped"),
    ],
    ids=["first", "held", "unpruned"],
)
def test_an_answer_says_where_it_comes_from(progress, words):
    assert words in page.origin(progress)


def rows_of(table: str) -> dict[str, list[str]]:
    body: Any = ElementTree.fromstring(table).find("tbody")
    return {row.find("th").text: [cell.text for cell in row.findall("td")] for row in body}


def test_the_table_has_a_row_for_each_way_of_watching_and_says_what_was_not_measured():
    assert rows_of(page.table([FIRST])) == {
        "nothing dropped": ["not measured yet"],
        "50% dropped, cosine to the previous frame": ["6", "1.50\u00a0s", "2.00\u00a0s", "-"],
    }
    later = dataclasses.replace(AGAIN, first_word=0.3)
    assert rows_of(page.table([FIRST, AGAIN, UNPRUNED, later])) == {
        "nothing dropped": ["6", "2.50\u00a0s", "3.00\u00a0s", "-"],
        "50% dropped, cosine to the previous frame": ["6", "1.50\u00a0s", "2.00\u00a0s", "0.20 (0.10-0.30)\u00a0s"],
    }
    assert next(iter(rows_of(page.table([FIRST, UNPRUNED])))) == "nothing dropped"
    assert page.table([]) == ""


def test_a_turn_shows_how_far_it_is():
    waiting, stopped = page.Turn("What?"), page.Turn("What?", finished=True)
    shown = [page.messages([turn])[-1]["content"] for turn in (waiting, stopped, page.Turn("What?", FIRST))]
    assert "Reading" in shown[0]
    assert "Stopped" in shown[1]
    assert shown[2].startswith("A <b>ring</b>\n\n")


def test_a_turn_that_was_stopped_says_so_with_what_was_written():
    silent = dataclasses.replace(FIRST, text="")
    shown = [page.messages([page.Turn("What?", progress, True, True)])[-1]["content"] for progress in (FIRST, silent)]
    assert shown[0].startswith(f"A <b>ring</b>\n\n{page.STOPPED}")
    assert shown[1].strip().startswith(page.STOPPED)
    assert "empty" not in shown[1]


def test_the_last_question_in_python_is_what_the_page_did():
    seen = dataclasses.replace(SEEN, video="/tmp/a 'clip'.mp4")
    run = dataclasses.replace(FIRST, seen=seen, rule=KeepRule(0.25))
    said = page.as_python("user/name", 'Say "a"', run, {"num_frames": 32}, 64)
    calls = {getattr(node.func, "attr", ""): node for node in ast.walk(ast.parse(said)) if isinstance(node, ast.Call)}
    given = {name: [ast.literal_eval(argument) for argument in calls[name].args] for name in ("load", "watch", "ask")}
    assert given == {"load": ["user/name"], "watch": ["a 'clip'.mp4"], "ask": ['Say "a"']}
    found = {name: {word.arg: ast.literal_eval(word.value) for word in calls[name].keywords} for name in given}
    assert found["load"] == {"selector": "cosine"}
    assert found["watch"] == {"pruning_ratio": 0.25, "processing": {"num_frames": 32}}
    assert found["ask"] == {"max_new_tokens": 64}


def test_python_names_bounds_and_a_budget_where_they_are_set():
    (_, bound), (_, free) = (
        page.as_python("user/name", "What?", dataclasses.replace(FIRST, rule=rule), {}, 64).split("watch(")
        for rule in (KeepRule(threshold=0.05, bounds=(0.2, 0.9), budget=512), KeepRule(threshold=0.05))
    )
    named = "score_threshold=0.05, min_pruning_ratio=0.2, max_pruning_ratio=0.9, video_token_budget=512"
    assert bound.startswith(f"'clip.mp4', {named})")
    assert free.startswith("'clip.mp4', score_threshold=0.05)")


def test_the_head_names_and_links_the_checkpoint_as_text():
    said = page.introduction("<b>name</b>", 'https://huggingface.co/a"b')
    assert "&lt;b&gt;name" in said
    assert 'href="https://huggingface.co/a&quot;b"' in said
