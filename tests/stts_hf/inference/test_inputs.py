"""What inputs stand for: videos of folders and patterns, rows of files and data sets, and what is refused."""

import json
import os
from pathlib import Path
from typing import Any

import datasets
import pytest

from stts_hf.data.rows import RowError
from stts_hf.inference.inputs import read_inputs
from stts_hf.inference.predictor import read_asked


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """The current folder, with files whose content nobody looks at."""
    for name in ("videos/b.mp4", "videos/a.MKV", "videos/more/c.webm", "videos/.d.mp4", "videos/.e/f.mp4", "notes.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    (tmp_path / "videos" / "words.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rows_file(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path.name)


def ids(*inputs: str, **options) -> list[str]:
    return [row["id"] for row in read_inputs(inputs, prompt="What?", **options)]


def test_a_folder_is_its_videos_and_those_below(here):
    assert ids("videos") == ["videos/a.MKV", "videos/b.mp4", "videos/more/c.webm"]
    assert read_inputs(["videos"], prompt="What?")[1] == {
        "id": "videos/b.mp4",
        "video": "videos/b.mp4",
        "prompt": "What?",
    }


def test_patterns_and_paths_and_addresses(here):
    assert ids("videos/**/*.[mw]*", "notes.txt", "https://a.b/c.mp4") == [
        "videos/b.mp4",
        "videos/more/c.webm",
        "notes.txt",
        "https://a.b/c.mp4",
    ]


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(here):
    (here / "a[1].mp4").write_text("x")
    assert ids("a[1].mp4") == ["a[1].mp4"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "saved", "folder"])
def test_rows(here, kind):
    rows = [{"id": name, "video": f"{name}.mp4", "prompt": f"{name}?"} for name in "yx"]
    if kind == "jsonl":
        source, root = rows_file(here / "rows.jsonl", *rows), here
    else:
        table, root = datasets.Dataset.from_list(rows), here if kind == "parquet" else here / "set"
        source = "rows.parquet" if kind == "parquet" else "set"
        if kind == "saved":
            table.save_to_disk(source)
        else:
            table.to_parquet("rows.parquet" if kind == "parquet" else "set/train.parquet")
    assert read_inputs([source]) == [row | {"media_root": str(root)} for row in rows]


def test_rows_without_a_prompt_get_the_one_given(here):
    source = rows_file(here / "rows.JSONL", {"video": "a.mp4"}, {"video": "a.mp4", "prompt": "Why?"})
    assert [(row["id"], row["prompt"]) for row in read_inputs([source, "videos/b.mp4"], prompt="What?")] == [
        ("rows.JSONL:1", "What?"),
        ("rows.JSONL:2", "Why?"),
        ("videos/b.mp4", "What?"),
    ]


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        (["empty"], {}, "The folder empty holds no videos, and 0 other files"),
        (["gone.mp4"], {}, r"gone\.mp4 does not exist"),
        (["./gone"], {}, r"\./gone does not exist"),
        (["videos/*.avi"], {}, r"videos/\*.avi matches no file"),
        (["videos", "videos/b.mp4"], {}, "ids must differ, but several rows have the id videos/b.mp4"),
        (["videos"], {"prompt": None}, "prompt is missing for 3 of 3 rows"),
        (["bad.jsonl"], {}, "bad.jsonl:1 is not JSON"),
        (["bad.parquet"], {}, "'bad.parquet' cannot be read as Parquet"),
        (["other.jsonl"], {}, "other.jsonl has no column 'video', but path, id, media_root"),
        (["nobody/nothing"], {}, "nobody/nothing does not exist here, and cannot be loaded as a data set"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_refused(here, inputs, options, message):
    rows_file(here / "other.jsonl", {"path": "a.mp4"})
    for name in ("bad.jsonl", "bad.parquet"):
        (here / name).write_text("x")
    with pytest.raises(ValueError, match=message):
        read_inputs(inputs, **{"prompt": "What?"} | options)


def test_a_folder_that_cannot_be_read_is_named(here, monkeypatch):
    """Tests run as root, who can read all."""
    real = os.scandir

    def scandir(path):
        if str(path).endswith("more"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(ValueError, match=r"videos/more cannot be read: Permission denied"):
        ids("videos")


@pytest.mark.parametrize("stored", [False, True], ids=["path", "stored"])
def test_a_data_set_of_the_hub_leads_to_no_file_of_the_users(here, monkeypatch, stored):
    video = str(here / "videos" / "b.mp4")
    table = datasets.Dataset.from_list(
        [{"prompt": "What?", "video": {"path": video, "bytes": None} if stored else video}]
    )
    monkeypatch.setattr(datasets, "load_dataset", lambda path, **options: table)
    (row,) = read_inputs(["user/name"])
    no_processor: Any = None
    with pytest.raises(RowError, match="is no file of the data set"):
        row["video"].load() if stored else read_asked(no_processor, row)
