"""Folders that appear whole or not at all."""

import os
from pathlib import Path

import pytest

from stts_hf.checkpoints.atomic_folder import atomic_file, atomic_folder, move_files

OLD = {"config.json": "old", "model.safetensors": "old", "notes.txt": "mine"}
NEW = {"config.json": "new", "model.safetensors.index.json": "new", "model-00001-of-00001.safetensors": "new"}


def fill(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def found(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_a_new_folder_takes_the_place_of_the_old_one(tmp_path):
    fill(tmp_path / "out", OLD)
    with atomic_folder(tmp_path / "out", overwrite=True) as folder:
        fill(folder, NEW)
        assert found(tmp_path / "out") == OLD
    assert found(tmp_path / "out") == NEW
    assert os.listdir(tmp_path) == ["out"]


def test_a_folder_that_is_there_is_not_replaced_unasked(tmp_path):
    fill(tmp_path / "out", OLD)
    with pytest.raises(FileExistsError, match="out exists"), atomic_folder(tmp_path / "out") as folder:
        fill(folder, NEW)
    assert found(tmp_path / "out") == OLD
    assert os.listdir(tmp_path) == ["out"]


def test_an_error_changes_nothing(tmp_path):
    fill(tmp_path / "out", OLD)
    with pytest.raises(UnicodeEncodeError), atomic_folder(tmp_path / "out", overwrite=True) as folder:
        fill(folder, NEW | {"z.txt": "\ud800"})
    assert found(tmp_path / "out") == OLD
    assert os.listdir(tmp_path) == ["out"]


def test_where_files_move_others_stay_and_weights_that_would_be_read_first_go(tmp_path):
    fill(tmp_path / "out", OLD)
    fill(tmp_path / "new", NEW)
    move_files(tmp_path / "new", tmp_path / "out", commit_marker="config.json")
    assert found(tmp_path / "out") == NEW | {"notes.txt": "mine"}


@pytest.mark.parametrize("moved", [0, 2])
def test_a_stop_while_files_move_leaves_no_commit_marker(tmp_path, monkeypatch, moved):
    fill(tmp_path / "out", OLD)
    fill(tmp_path / "new", NEW)
    replace, names = os.replace, []

    def stop(source: Path, place: Path) -> None:
        names.append(place)
        if len(names) > moved:
            raise KeyboardInterrupt
        replace(source, place)

    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        move_files(tmp_path / "new", tmp_path / "out", commit_marker="config.json")
    assert not (tmp_path / "out" / "config.json").exists()
    assert found(tmp_path / "out")["notes.txt"] == "mine"


def test_a_rename_that_fails_puts_the_old_folder_back(tmp_path, monkeypatch):
    fill(tmp_path / "out", OLD)
    rename = Path.rename

    def refuse(self: Path, place: Path) -> Path:
        if self.name == ".out.stts-new":
            raise OSError("no")
        return rename(self, place)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="no"), atomic_folder(tmp_path / "out", overwrite=True) as folder:
        fill(folder, NEW)
    assert found(tmp_path / "out") == OLD


def test_a_folder_that_stepped_aside_before_a_kill_is_put_back(tmp_path):
    fill(tmp_path / ".out.stts-old", OLD)
    (tmp_path / ".out.stts-new").mkdir()
    with pytest.raises(FileExistsError, match="out exists"), atomic_folder(tmp_path / "out"):
        pass
    assert found(tmp_path / "out") == OLD
    assert os.listdir(tmp_path) == ["out"]


def test_two_at_once_do_not_write_one_folder(tmp_path):
    with atomic_folder(tmp_path / "out") as folder:
        with pytest.raises(FileExistsError, match="another process"), atomic_folder(tmp_path / "out"):
            pass
        fill(folder, NEW)
    assert found(tmp_path / "out") == NEW


@pytest.mark.parametrize("name", ["n" * 250 + ".png", "\u00fc" * 125 + ".png"], ids=["ascii", "two bytes"])
def test_a_name_as_long_as_names_may_be(tmp_path, name):
    with atomic_file(tmp_path / name) as new:
        new.write_text("new")
    assert found(tmp_path) == {name: "new"}


def test_a_link_s_target_is_written_and_the_link_stays(tmp_path):
    """In the format that the link's name says."""
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "picture").write_bytes(b"old")
    (tmp_path / "link.png").symlink_to("store/picture")
    with atomic_file(tmp_path / "link.png") as new:
        assert new.suffix == ".png"
        new.write_bytes(b"new")
    assert os.readlink(tmp_path / "link.png") == "store/picture"
    assert found(tmp_path / "store") == {"picture": "new"}
