"""A data set on the disk: rows that training and evaluation read, files that decode, whole or not at all."""

import filecmp
import json
from dataclasses import replace

import numpy as np
import pytest

from examples.study.__main__ import main
from examples.study.make_dataset import FORMAT, compose_split, make_dataset, read_about
from examples.study.questions import compose_short
from stts_hf.data.rows import check_files, read_row

CLIPS = {"train": 20, "test": 7}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "set"
    assert list(make_dataset(folder, CLIPS))[-1] == (27, 27)
    return folder


def rows_of(file):
    return [json.loads(line) | {"media_root": str(file.parent)} for line in file.read_text().splitlines()]


@pytest.mark.parametrize("name", ["train", "test", "train_conversations", "test_conversations"])
def test_rows_are_what_training_reads(folder, name):
    rows = rows_of(folder / f"{name}.jsonl")
    assert len({row["id"] for row in rows}) == len(rows)
    for row in rows:
        sample = read_row(row)
        check_files(sample)
        assert len(sample.videos) + len(sample.images) == 1


def test_whatever_changes_what_is_drawn_or_asked_raises_the_format(folder):
    """Data sets of one format must not differ: the study takes them for the same by their questions and format."""
    scene, questions = compose_short(7, busy=True)
    brightness = scene.draw([1.25], 48)[0].astype(float).reshape(3, 16, -1).mean((1, 2))
    asked = [row["messages"][0]["content"] for row in rows_of(folder / "train_conversations.jsonl")[:2]]
    first = ["Where does the white mark flash up?", "What colour is the mark at the top left?"]
    assert (FORMAT, questions[0].text, asked) == (2, "Which way does the red cross move?", first)
    assert brightness == pytest.approx([104.49, 102.50, 98.52], abs=0.5)


def test_without_snow_all_else_is_the_same(folder, tmp_path):
    calm = tmp_path / "calm"
    list(make_dataset(calm, CLIPS, snow=False))
    assert read_about(calm) == read_about(folder) | {"snow": False}
    assert filecmp.cmpfiles(calm, folder, [f"{split}.jsonl" for split in CLIPS])[1:] == ([], [])
    (snowy,), (bare,) = (
        [scene for clip, *_, scene, _ in compose_split(CLIPS, "test", 0, snow) if clip == "test-00000"]
        for snow in (True, False)
    )
    assert snowy.snow
    assert snowy == replace(bare, snow=snowy.snow)
    assert (calm / "videos/test-00000.mp4").read_bytes() != (folder / "videos/test-00000.mp4").read_bytes()


def test_motion_masks_are_of_the_frames_looked_at(folder):
    masks = np.load(folder / "motion" / "test.npz")
    clips = {row["clip"] for row in rows_of(folder / "test.jsonl") if "videos" in row}
    assert set(masks.files) == clips
    assert all(masks[clip].shape == (16, 12, 12) and masks[clip].any() for clip in clips)


def test_the_same_arguments_give_the_same_files(folder, tmp_path):
    list(make_dataset(tmp_path / "again", CLIPS))
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix != ".npz" and path.is_file()]
    assert filecmp.cmpfiles(folder, tmp_path / "again", names, shallow=False) == (names, [], [])
    list(make_dataset(tmp_path / "other", {"train": 2, "test": 2}, seed=1))
    assert rows_of(folder / "train.jsonl")[0]["question"] != rows_of(tmp_path / "other" / "train.jsonl")[0]["question"]


def test_a_folder_that_is_there_is_not_touched(folder, capsys):
    before = sorted(folder.rglob("*"))
    assert main(["make-dataset", str(folder)]) == 2
    assert "name another folder" in capsys.readouterr().err
    assert sorted(folder.rglob("*")) == before


def test_a_data_set_of_another_version_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no data set of make-dataset"):
        read_about(tmp_path)
    (tmp_path / "dataset.json").write_text('{"format": 0}')
    with pytest.raises(ValueError, match=r"format 0, but this version reads format 2"):
        read_about(tmp_path)
