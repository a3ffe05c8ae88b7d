"""What tests of several commands share."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from stts_hf.cli.main import main


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch) -> Path:
    """A copy of the files that a module has made, the current folder."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def captured(capsys) -> Callable[[Sequence[str]], tuple[int, str, str]]:
    """Runs a command; returns exit status, stdout and stderr, without a traceback in them."""

    def captured(words: Sequence[str]) -> tuple[int, str, str]:
        status = main([*words])
        printed = capsys.readouterr()
        assert "Traceback" not in printed.out + printed.err
        return status, printed.out, printed.err

    return captured
