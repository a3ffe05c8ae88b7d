"""`stts-hf explain` on the tiny checkpoint: what it prints and shows, and how it says no."""

import shlex

import pytest

from examples.clips.sample_clip import draw_sample_clip
from tests.checkpoints import TINY
from tests.stts_hf.visualize.test_html_report import Page

LOST = ("Which letter flashes up?", "--expected", "H", "--pruning-ratio", "0.9", "--selector", "random")


@pytest.fixture
def explain(tmp_path, captured, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw_sample_clip("clip.mp4", size=(96, 96))
    return lambda *words: captured(["explain", *words, "--checkpoint", str(TINY), "--max-new-tokens", "4"])


def test_it_names_the_moment_and_its_first_command_gives_the_expected_answer(explain, captured, tmp_path):
    status, out, _ = explain("clip.mp4", *LOST, "--dtype", "float32")
    assert status == 0
    assert "dropped: 1 block at 1.00 s" in out
    page = Page(tmp_path / "explanation.html")
    assert str(TINY.parent) not in page.source
    assert "script" not in {tag for tag, _ in page.elements}
    assert all(item["src"].startswith("data:image/jpeg;base64,") and item["alt"] for item in page.all("img"))
    assert [item["alt"] for item in page.all("img") if "1 marked" in item["alt"]] == [
        "Frame at 1.00 s, 1 of 16 kept; 1 marked"
    ]
    (first, *_) = (shlex.split(line) for line in out.splitlines() if line.strip().startswith("stts-hf run"))
    assert {"--max-new-tokens", "4", "--dtype", "float32"} <= {*first}
    status, answered, _ = captured([*first[1:], "--output", "sheet.png"])
    assert (status, "answer:       H\n" in answered) == (0, True)


def test_with_test_time_scaling_no_other_ratio_is_advised(explain):
    """It would show other frames than those on which the answer turned."""
    status, out, _ = explain("clip.mp4", *LOST, "--num-frames", "2", "--test-time-scaling")
    assert status == 0
    lines = [shlex.split(line) for line in out.splitlines() if line.strip().startswith("stts-hf run")]
    assert lines
    assert {words[words.index("--pruning-ratio") + 1] for words in lines} == {"0.9"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["What moves?"], "VIDEO"),
        (["clip.mp4", "clip.mp4", "What moves?"], "got 2"),
        (["clip.mp4", "What moves?", "--pruning-ratio", "0"], "0% dropped"),
        (["clip.mp4", "What moves?", "--at", "60"], "60 s"),
        (["clip.mp4", "What moves?", "--output", "clip.mp4"], "clip.mp4"),
    ],
    ids=["text alone", "two videos", "nothing dropped", "behind the end", "output"],
)
def test_bad_input_is_one_line(explain, words, said):
    status, out, err = explain(*words)
    assert (status, out) == (2, "")
    assert said in err.splitlines()[-1]
