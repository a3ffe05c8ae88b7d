"""`compare`: answers files of `stts-hf eval` beside each other, against figures reckoned by hand."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from stts_hf.evaluation.compare import clip_of, main, read_right
from tests.training_files import write_rows

NAMES = "abcdef"
ROWS: list[dict[str, Any]] = [
    {"id": "a", "group": "motion", "question": "?", "answer": "x", "videos": ["1.mp4"]},
    {"id": "b", "group": "motion", "question": "?", "answer": "x", "videos": ["1.mp4"]},
    {"id": "c", "group": "motion", "question": "?", "answer": "x", "videos": ["2.mp4"]},
    {"id": "d", "group": "long", "question": "?", "answer": "x", "videos": ["3.mp4"]},
    {"id": "e", "group": "image", "question": "?", "answer": "x", "images": ["1.png"]},
    {"id": "f", "question": "?", "answer": "x"},
]


def answers(folder: Path, name: str, right: str, names: str = NAMES) -> Path:
    lines = [{"id": one, "right": mark == "1", "error": None} for one, mark in zip(names, right, strict=True)]
    path = folder / name
    path.write_text("".join(json.dumps(line) + "\n" for line in reversed(lines)))
    return path


def cells(table: str) -> dict[str, list[str]]:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {name: rest for name, *rest in lines}


def test_means_and_differences(tmp_path, capsys):
    rows = write_rows(tmp_path, ROWS, "rows.jsonl")
    first = [answers(tmp_path, "1.jsonl", "110110"), answers(tmp_path, "2.jsonl", "111110")]
    other = answers(tmp_path, "0.jsonl", "010010")
    main([str(rows), "--answers", *map(str, first), "--against", str(other)])
    found = cells(capsys.readouterr().out)
    assert list(found) == ["motion", "long", "image", "**average**", "**all**"]
    assert [found[name][0] for name in found] == ["3", "1", "1", "4", "6"]
    means = {name: [float(cell.split(" ")[0]) for cell in cells[1:]] for name, cells in found.items()}
    assert means["motion"] == [83.3, 33.3, 50.0]
    assert means["long"] == [100, 0, 100]
    assert means["**average**"] == [91.7, 16.7, 75.0]  # images are none of it
    assert means["**all**"] == [75.0, 33.3, 41.7]
    assert found["image"][1:] == ["100.0 [100.0, 100.0]", "100.0 [100.0, 100.0]", "+0.0 [+0.0, +0.0]"]


def test_rows_with_one_video_in_a_column_of_that_name(tmp_path, capsys):
    single = [{("video" if name == "videos" else name): value for name, value in row.items()} for row in ROWS]
    for row in single:
        row |= {"video": row["video"][0]} if "video" in row else {}
    tables = []
    for name, rows in (("one", single), ("several", ROWS)):
        (tmp_path / name).mkdir()
        path = write_rows(tmp_path / name, rows, "rows.jsonl")
        main([str(path), "--answers", str(answers(tmp_path / name, "1.jsonl", "110110"))])
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1]


def test_what_questions_share():
    assert clip_of(ROWS[0]) == clip_of(ROWS[1]) != clip_of(ROWS[2])
    assert clip_of({"id": "x", "video": "1.mp4"}) == clip_of(ROWS[0])
    assert clip_of({"id": "x", "image": "1.png"}) == clip_of(ROWS[4])
    assert clip_of({"id": "x", "videos": None, "video": None}) == "x"
    assert clip_of({"id": "x", "videos": [{"bytes": b"1", "path": None}]}) != clip_of({"id": "x", "videos": ["1"]})


@pytest.mark.parametrize(
    ("right", "names", "message"),
    [
        ("11111", "abcde", "answers 5 of these 6 questions and 0 others: .* let stts-hf eval end"),
        ("111111", "abcdex", "answers 5 of these 6 questions and 1 others"),
    ],
)
def test_answers_to_other_rows_are_refused(tmp_path, right, names, message):
    with pytest.raises(ValueError, match=rf"1\.jsonl {message}"):
        read_right(answers(tmp_path, "1.jsonl", right, names), NAMES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--answers", "1.jsonl", "--against", "1.jsonl", "1.jsonl"], "--against names 2 files; name one, or 1"),
        (["--answers", "nowhere.jsonl"], "No such file .*nowhere.jsonl"),
        (["--answers", "torn.jsonl"], "torn.jsonl:1 is not JSON"),
        (["--answers", "others.jsonl"], "others.jsonl:1 has no id and right"),
        (["--answers", "1.jsonl", "--against", "open.jsonl"], "the answers are to other questions"),
    ],
)
def test_a_mistake_is_one_clear_line(tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path, ROWS, "rows.jsonl")
    answers(tmp_path, "1.jsonl", "111111")
    answers(tmp_path, "open.jsonl", "111111")
    for name, openly in (("1", None), ("open", True)):
        settings = {"settings": {"rows": {"digest": "1"}, "without_options": openly}}
        (tmp_path / f"{name}.summary.json").write_text(json.dumps(settings))
    (tmp_path / "others.jsonl").write_text('{"id": "a", "answer": "x"}\n')
    (tmp_path / "torn.jsonl").write_text('{"id": \n{}\n')
    with pytest.raises(SystemExit) as error:
        main(["rows.jsonl", *options])
    assert error.value.code == 2
    assert re.search(message, capsys.readouterr().err)
