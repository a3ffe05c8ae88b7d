"""The destination of a conversion: whole or not at all, whatever stops it; and nothing else is touched."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stts_hf.checkpoints import tensors
from stts_hf.checkpoints.convert import convert_checkpoint
from tests.conftest import REPOSITORY
from tests.stts_hf.checkpoints.convert_files import contents, write_molmo2


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_molmo2(tmp_path_factory.mktemp("publish") / "source", "native")


def old_checkpoint(folder: Path) -> dict[str, bytes]:
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "stts"}')
    return contents(folder)


@pytest.mark.slow
def test_kills_at_10_moments_leave_whole_folders_and_the_source():
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "tests.stts_hf.checkpoints.kill_conversions", "10"]
    result = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) >= 8, "runs ended before they were killed, so little was shown"


def test_an_existing_folder_is_refused(source, tmp_path):
    before = old_checkpoint(tmp_path / "new")
    with pytest.raises(ValueError, match="--overwrite"):
        convert_checkpoint(source, tmp_path / "new")
    assert contents(tmp_path / "new") == before


def test_overwriting_replaces_the_whole_folder(source, tmp_path):
    old_checkpoint(tmp_path / "new")
    (tmp_path / "new" / "old.safetensors").write_bytes(b"")
    convert_checkpoint(source, tmp_path / "new", overwrite=True)
    assert not (tmp_path / "new" / "old.safetensors").exists()
    assert os.listdir(tmp_path) == ["new"]


@pytest.mark.parametrize("config", ['{"model_type": "llama"}', "{"], ids=["llama", "cut"])
def test_a_folder_with_another_config_json_is_never_overwritten(source, tmp_path, config):
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "config.json").write_text(config)
    with pytest.raises(ValueError, match="files of no STTS or stock checkpoint"):
        convert_checkpoint(source, tmp_path / "app", overwrite=True)
    assert (tmp_path / "app" / "config.json").read_text() == config


@pytest.mark.parametrize("name", ["train.py", "results.json"])
def test_a_checkpoint_with_files_of_someone_s_own_is_not_overwritten(source, tmp_path, name):
    old_checkpoint(tmp_path / "new")
    (tmp_path / "new" / name).write_text("mine")
    before = contents(tmp_path / "new")
    with pytest.raises(ValueError, match=f"{name}.*move that elsewhere"):
        convert_checkpoint(source, tmp_path / "new", overwrite=True)
    assert contents(tmp_path / "new") == before


def test_a_link_in_the_place_is_followed(source, tmp_path):
    (tmp_path / "new").symlink_to("other")
    convert_checkpoint(source, tmp_path / "new")
    assert os.readlink(tmp_path / "new") == "other"
    assert (tmp_path / "other" / "config.json").is_file()


@pytest.mark.parametrize("place", ["", ".."], ids=["same", "around"])
def test_destination_and_source_must_lie_apart(source, tmp_path, place):
    folder = tmp_path / "outer" / "source"
    folder.mkdir(parents=True)
    for name, content in contents(source).items():
        (folder / name).write_bytes(content)
    (tmp_path / "outer" / "config.json").write_text("{}")
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=r"and the source .* must lie apart"):
        convert_checkpoint(folder, folder / place if place != ".." else tmp_path / "outer", overwrite=True)
    assert contents(tmp_path) == before


def test_a_disk_that_fills_up_keeps_the_old_checkpoint(source, tmp_path, monkeypatch):
    def write(part, path, metadata):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    before = old_checkpoint(tmp_path / "new")
    monkeypatch.setattr(tensors, "save_file", write)
    with pytest.raises(OSError, match="No space left"):
        convert_checkpoint(source, tmp_path / "new", overwrite=True)
    assert contents(tmp_path / "new") == before
    assert os.listdir(tmp_path) == ["new"]
