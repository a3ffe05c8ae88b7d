"""A data set on the disk: rows that training and evaluation read, files that decode, whole or not at all."""

import filecmp
import json
from dataclasses import asdict

import av
import numpy as np
import pytest

from examples.study.__main__ import main
from examples.study.backgrounds import draw_film, read_film, read_photograph
from examples.study.data import fingerprint_dataset
from examples.study.distraction import KINDS, Look
from examples.study.make_dataset import FORMAT, compose_split, make_dataset, read_about
from examples.study.questions import compose_short
from stts_hf.data.rows import check_files, read_row

CLIPS, FEW = {"train": 6, "test": 6}, {"test": 2}
PLAIN, OTHER = [103.24, 69.62, 88.76], [131.85, 123.59, 107.83]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "set"
    assert list(make_dataset(folder, CLIPS))[-1] == (12, 12)
    return folder


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """A small data set, to compare others with: encoding noise is what takes time."""
    folder = tmp_path_factory.mktemp("data") / "few"
    list(make_dataset(folder, FEW))
    return folder


def rows_of(file):
    return [json.loads(line) | {"media_root": str(file.parent)} for line in file.read_text().splitlines()]


def test_a_share_of_the_training_clips_is_calm():
    look = Look(strength=1.0, calm=0.5)
    calm = {}
    for split in ("train", "test"):
        scenes = [scene for _, kind, _, scene, _ in compose_split({split: 40}, split, 0, look) if kind != "image"]
        calm[split] = sum(not (scene.effects or any(scene.drift + scene.slide) or scene.shake) for scene in scenes)
    assert 10 < calm["train"] < 24
    assert calm["test"] == 0


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
    asked = [row["messages"][0]["content"] for row in rows_of(folder / "train_conversations.jsonl")[:2]]
    first = ["Where does the white mark flash up?", "What colour is the mark at the top left?"]
    assert (FORMAT, asked) == (3, first)
    assert fingerprint_dataset(folder) == "ed72e832b1f76b52"  # as of efcdc68, whose studies go on
    for seed, style, expected in ((7, "plain", PLAIN), (7, "other", OTHER)):
        scene, questions = compose_short(seed, look=Look(1.0, KINDS[style], style, photographs=0.5))
        assert questions[0].text == "Which way does the red cross move?"
        brightness = scene.draw([1.25], 48)[0].astype(float).reshape(3, 16, -1).mean((1, 2))
        assert brightness == pytest.approx(expected, abs=0.5)


@pytest.mark.parametrize(
    "look",
    [Look(), Look(0.5, ("rain",)), Look(1.0, style="other"), Look(films=1.0), Look(sizes=(72, 288))],
    ids=["calm", "rain", "other", "films", "sizes"],
)
def test_of_another_look_the_clips_differ_and_the_questions_do_not(few, tmp_path, look):
    other = tmp_path / "other"
    list(make_dataset(other, FEW, look=look))
    about, before = read_about(other), read_about(few)
    written = json.loads(json.dumps(asdict(look) | {"kinds": look.kinds or KINDS[look.style]}))
    unused = {name: written.pop(name) for name in ("films", "sizes") if not getattr(look, name)}
    assert (about.pop("look"), any(unused.values())) == (written, False)
    assert before.pop("look")["kinds"] == list(KINDS["plain"])
    assert about == before
    names = [f"{split}.jsonl" for split in FEW]
    assert filecmp.cmpfiles(other, few, names, shallow=False) == (names, [], [])
    assert (other / "videos/test-00000.mp4").read_bytes() != (few / "videos/test-00000.mp4").read_bytes()


def test_a_film_moves_behind_things_and_is_the_same_in_whatever_company():
    scene, _ = compose_short(7, look=Look(films=1.0))
    together, alone = scene.draw([0.5, 3.5], 96), scene.draw([3.5], 96)
    assert np.array_equal(together[1], alone[0])
    behind = [draw_film(7, "plain", time, 96, 96) for time in (0.5, 0.5, 3.5)]
    assert np.array_equal(behind[0], behind[1])
    assert np.abs(behind[2] - behind[0]).mean() > 3


def test_files_have_the_sizes_that_were_asked_for(tmp_path):
    list(make_dataset(tmp_path / "set", {"test": 8}, look=Look(sizes=(72, 288))))
    sides = set()
    for path in (tmp_path / "set" / "videos").iterdir():
        with av.open(str(path)) as container:
            sides.add((container.streams.video[0].height, container.streams.video[0].width))
    assert sides == {(72, 72), (288, 288)}


def test_photographs_that_are_not_installed_are_named_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    read_photograph.cache_clear()
    read_film.cache_clear()
    with pytest.raises(ValueError, match=r"lion\.jpg of the package gradio is missing: pip install .*--photographs 0"):
        list(make_dataset(tmp_path / "set", CLIPS))
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"world\.mp4 of the package gradio is missing: pip install .*--films 0"):
        list(make_dataset(tmp_path / "set", CLIPS, look=Look(films=0.1)))
    list(make_dataset(tmp_path / "set", {"train": 1, "test": 1}, look=Look(1.0)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--distraction", "1.5"], "strength is 1.5, but must lie between 0 and 1"),
        (["--kinds", "snow", "hail"], "kinds names 'hail', but may name snow, "),
        (["--style", "cubist"], "style is 'cubist', but must be one of plain, other"),
        (["--photographs", "-1"], "photographs is -1.0, but must lie between 0 and 1"),
        (["--films", "2"], "films is 2.0, but must lie between 0 and 1"),
        (["--sizes", "144", "73"], "sizes names 73, but may name even numbers from 32 on"),
    ],
)
def test_a_look_that_cannot_be_is_refused(tmp_path, capsys, options, message):
    assert main(["make-dataset", str(tmp_path / "set"), *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("name", "shape"), [("motion", (16, 12, 12)), ("things", (16, 12, 12))])
def test_masks_are_of_the_frames_looked_at(folder, name, shape):
    masks = np.load(folder / name / "test.npz")
    clips = {row["clip"] for row in rows_of(folder / "test.jsonl") if "videos" in row}
    assert set(masks.files) == clips
    assert all(masks[clip].shape[-3:] == shape and masks[clip].any() for clip in clips)


def test_each_question_names_the_things_that_must_be_seen(folder):
    masks = np.load(folder / "things" / "test.npz")
    for row in rows_of(folder / "test.jsonl"):
        if "videos" in row and not row["type"].startswith("long"):  # of a long clip 16 frames miss some
            assert all(masks[row["clip"]][thing].any() for thing in row["things"]), row
        assert len(row["things"]) == (2 if row["type"].endswith("order") else 1)


def test_the_same_arguments_give_the_same_files(few, tmp_path):
    list(make_dataset(tmp_path / "again", FEW))
    names = [str(path.relative_to(few)) for path in few.rglob("*") if path.suffix != ".npz" and path.is_file()]
    assert filecmp.cmpfiles(few, tmp_path / "again", names, shallow=False) == (names, [], [])
    list(make_dataset(tmp_path / "other", {"test": 1}, seed=1))
    assert rows_of(few / "test.jsonl")[0]["question"] != rows_of(tmp_path / "other" / "test.jsonl")[0]["question"]


def test_a_folder_that_is_there_is_not_touched(folder, capsys):
    before = sorted(folder.rglob("*"))
    assert main(["make-dataset", str(folder)]) == 2
    assert "name another folder" in capsys.readouterr().err
    assert sorted(folder.rglob("*")) == before


def test_a_data_set_of_another_version_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no data set of make-dataset"):
        read_about(tmp_path)
    (tmp_path / "dataset.json").write_text('{"format": 0}')
    with pytest.raises(ValueError, match=r"format 0, but this version reads format 3"):
        read_about(tmp_path)
