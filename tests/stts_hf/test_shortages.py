"""Errors that say that the machine lacks something are told from others, as the libraries raise them; and said."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from stts_hf.cli import main as command_line
from stts_hf.shortages import is_disk_full, is_forbidden, is_out_of_memory
from tests.small_disk import small_disk

KINDS = {"disk": is_disk_full, "rights": is_forbidden, "memory": is_out_of_memory}


def raised_by(action: Callable[[], object]) -> Exception:
    try:
        action()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def kinds_of(error: Exception) -> list[str]:
    return [name for name, is_kind in KINDS.items() if is_kind(error)]


WRITERS = {
    "python": lambda path: Path(path).write_bytes(bytes(100_000)),
    "torch": lambda path: torch.save(torch.zeros(100_000), path),
    "safetensors": lambda path: save_file({"a": torch.zeros(100_000)}, path),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_disk_that_is_full(tmp_path, write):
    with small_disk(10_000):
        error = raised_by(lambda: write(tmp_path / "file"))
    assert kinds_of(error) == ["disk"]


def test_memory_that_is_used_up():
    assert kinds_of(raised_by(lambda: torch.empty(1 << 60))) == ["memory"]
    assert kinds_of(raised_by(lambda: bytearray(1 << 60))) == ["memory"]
    wrapped = RuntimeError("a thread failed")
    wrapped.__cause__ = MemoryError()
    assert kinds_of(wrapped) == ["memory"]


@pytest.mark.parametrize(
    "error", [ValueError("out of memory"), RuntimeError("shapes do not match"), FileNotFoundError(2, "No such file")]
)
def test_other_errors_are_none_of_these(error):
    assert kinds_of(error) == []


@pytest.mark.parametrize("command", command_line.COMMANDS)
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), r"out of memory \(CUDA out of memory.\): (try|give)"),
        (OSError(28, os.strerror(28)), "no space is left on the disk.* make room"),
        (PermissionError(13, os.strerror(13), "place"), "a file or folder is forbidden .*'place'.*: allow it"),
    ],
    ids=["memory", "disk", "rights"],
)
def test_every_command_says_so_in_one_line(monkeypatch, capsys, command, error, words):
    def fail(arguments):
        raise error

    parsed = SimpleNamespace(command=command)
    monkeypatch.setattr(command_line, "build_parser", lambda: SimpleNamespace(parse_args=lambda _: parsed))
    monkeypatch.setitem(command_line.COMMANDS, command, SimpleNamespace(execute=fail))
    assert command_line.main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(f"stts-hf {command}: error: {words}", line), line


def test_what_is_none_of_these_keeps_its_traceback(monkeypatch):
    def fail(arguments):
        raise RuntimeError("a bug")

    monkeypatch.setitem(command_line.COMMANDS, "doctor", SimpleNamespace(execute=fail))
    parsed = SimpleNamespace(command="doctor")
    monkeypatch.setattr(command_line, "build_parser", lambda: SimpleNamespace(parse_args=lambda _: parsed))
    with pytest.raises(RuntimeError, match="a bug"):
        command_line.main([])
