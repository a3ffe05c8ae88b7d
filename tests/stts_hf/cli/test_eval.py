"""`stts-hf eval` on a tiny checkpoint that says one sentence, whatever it is asked."""

import json
import re
from pathlib import Path
from typing import Any

import datasets
import pytest

from stts_hf.cli.main import main
from stts_hf.evaluation import compare
from tests.checkpoints import ALL_TINIES, ANSWER, OTHERS, QWENS
from tests.clips import write_clip
from tests.training_files import write_rows

FIELDS = ["id", "type", "group", "written", "right", "no_option", "error"]
TOKENS = ["prompt_tokens", "video_tokens", "video_tokens_kept", "seconds"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    """Two questions about a clip of 2 frames, one about a clip of 3, one of text."""
    folder = tmp_path_factory.mktemp("rows")
    write_clip(folder / "two.mp4", 5, fps=20)
    write_clip(folder / "three.mp4", 10, fps=20)
    choice = {"options": ["left", "right"], "answer": "left"}
    return write_rows(
        folder,
        [
            {"id": "a", "type": "what", "group": "g", "question": "What?", "answer": ANSWER, "videos": ["two.mp4"]},
            {"id": "b", "type": "where", "group": "g", "question": "Where?", "videos": ["three.mp4"], **choice},
            {"id": "c", "type": "where", "group": "h", "question": "Where then?", "videos": ["two.mp4"], **choice},
            {"id": "d", "type": "what", "question": "Who?", "answer": "nobody"},
        ],
        "rows.jsonl",
    )


@pytest.fixture
def run(rows, checkpoint, tmp_path, capsys):
    """Runs the command; returns exit status, stdout, stderr and the lines of the answers file."""

    def run(*arguments: str, rows: Path = rows) -> tuple[int, str, str, list[dict[str, Any]]]:
        output = tmp_path / "answers.jsonl"
        command = ["eval", str(rows), "--checkpoint", str(checkpoint), "--output", str(output)]
        status = main([*command, "--max-new-tokens", "40", "--workers", "0", *arguments])
        printed = capsys.readouterr()
        lines = [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []
        return status, printed.out, printed.err, lines

    return run


def summary(tmp_path: Path) -> dict[str, Any]:
    return json.loads((tmp_path / "answers.summary.json").read_text())


def test_it_scores_by_type_and_writes_a_line_for_each_question(run, tmp_path):
    status, out, _, lines = run("--pruning-ratio", "0.3")
    assert status == 0
    assert sorted(line["id"] for line in lines) == ["a", "b", "c", "d"]
    assert list(lines[0]) == FIELDS + TOKENS
    by_id = {line["id"]: line for line in lines}
    assert [by_id[name]["right"] for name in "abcd"] == [True, False, False, False]
    assert [by_id[name]["no_option"] for name in "abcd"] == [False, True, True, False]
    # floor(0.3 * 32) = 9 of 2 frames are dropped, floor(0.3 * 48) = 14 of 3.
    assert [by_id[name]["video_tokens_kept"] for name in "abcd"] == [32 - 9, 48 - 14, 32 - 9, 0]
    table = {line.split("  ")[0]: line.split()[-8:] for line in out.splitlines()[1:]}
    assert table["type what"][:5] == ["2", "1", "50.0%", "0", "0"]
    assert table["type where"][:5] == ["2", "0", "0.0%", "2", "0"]
    assert table["group h"][:3] == ["1", "0", "0.0%"]
    assert table["all"][:3] == ["4", "1", "25.0%"]
    assert summary(tmp_path)["finished"]
    assert summary(tmp_path)["types"]["what"]["accuracy"] == 0.5


def test_ids_may_be_numbers(run, tmp_path):
    rows = [{"id": 1, "question": "Who?", "answer": ANSWER}, {"id": 2, "question": "Who?", "answer": "nobody"}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    status, _, _, lines = run(rows=tmp_path / "rows.parquet")
    assert (status, {line["id"]: line["right"] for line in lines}) == (0, {"1": True, "2": False})
    compare.main([str(tmp_path / "rows.parquet"), "--answers", str(tmp_path / "answers.jsonl")])
    assert "2 of 2 rows are answered" in run(rows=tmp_path / "rows.parquet")[2]


def test_without_options_questions_are_open(run, tmp_path):
    choice = {line["id"]: line for line in run("--max-new-tokens", "1")[3]}
    (tmp_path / "answers.jsonl").unlink()
    openly = {line["id"]: line for line in run("--max-new-tokens", "1", "--without-options")[3]}
    assert [openly[name]["no_option"] for name in "abcd"] == [False] * 4
    fewer = [choice[name]["prompt_tokens"] - openly[name]["prompt_tokens"] for name in "abcd"]
    assert fewer[1] == fewer[2] > fewer[0] == fewer[3] == 0


@pytest.mark.parametrize("other", [*QWENS, *OTHERS])
def test_another_backbone_takes_the_same_command(run, other):
    options = ["--checkpoint", str(ALL_TINIES[other]), "--max-new-tokens", "1"]
    status, out, _, lines = run(*options, "--pruning-ratio", "0.3", "--num-frames", "4")
    assert status == 0
    assert re.search(r"^all +4 ", out, re.M)
    if other == "smolvlm":  # frames of 4 x 4 blocks, as many as its fps asks for
        for total, kept in {(line["video_tokens"], line["video_tokens_kept"]) for line in lines}:
            assert kept == max(total - int(0.3 * total), min(total, 16))
        return
    # Two tubelets of 6 x 8 blocks, of which floor(0.3 * 96) = 28 are dropped.
    assert {line["id"]: line["video_tokens_kept"] for line in lines} == dict.fromkeys("abc", 96 - 28) | {"d": 0}
    assert {line["video_tokens"] for line in lines} == {96, 0}


def test_rows_that_cannot_be_read_count_as_wrong_and_are_asked_again(run, rows, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "two.mp4").write_bytes(b"no video")
    (folder / "three.mp4").write_bytes(rows.with_name("three.mp4").read_bytes())
    (folder / "rows.jsonl").write_bytes(rows.read_bytes())
    status, out, err, lines = run(rows=folder / "rows.jsonl")
    assert status == 1
    assert re.search(r"^all +4 +0 +0\.0% +1 +2 ", out, re.M)
    assert "a: Cannot read video file" in err
    assert "2 rows could not be answered" in err
    assert sorted(line["id"] for line in lines if line["error"]) == ["a", "c"]
    (folder / "two.mp4").write_bytes(rows.with_name("two.mp4").read_bytes())
    status, out, err, lines = run(rows=folder / "rows.jsonl")
    assert status == 0
    assert "2 of 4 rows are answered" in err
    assert sorted(line["id"] for line in lines) == ["a", "b", "c", "d"]
    assert re.search(r"^all +4 +1 ", out, re.M)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (None, [], r"ROWS\.jsonl .*gone\.jsonl does not exist"),
        ('{"question": "a", "answer": "b"}\nx\n', [], r"rows\.jsonl:2 is not JSON"),
        (
            '{"id": "x", "question": "a", "answer": "b"}\n' * 2,
            [],
            r"rows\.jsonl: .*several rows have the id x\. Give each its own",
        ),
        ('{"question": "a", "answer": "b"}\n', ["--output", "answers.csv"], "must be a file that ends in .jsonl"),
    ],
    ids=["no file", "damaged", "same id", "ending"],
)
def test_what_cannot_be_asked_is_refused_before_weights_are_loaded(run, tmp_path, monkeypatch, rows, options, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("stts_hf.inference.predictor.load_model", None)
    path = tmp_path / ("gone.jsonl" if rows is None else "rows.jsonl")
    if rows is not None:
        path.write_text(rows)
    status, _, err, _ = run(*options, rows=path)
    assert status == 2
    assert re.search(message, err)
    assert "Traceback" not in err
