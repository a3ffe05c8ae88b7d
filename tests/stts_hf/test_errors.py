"""Errors that say that the machine lacks something are told from others, as the libraries raise them; and said."""

import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from stts_hf.cli import doctor
from stts_hf.cli import main as command_line
from stts_hf.errors import is_disk_full, is_forbidden, is_out_of_memory
from stts_hf.inference.predictor import describe_error
from stts_hf.training.config import ARGUMENT_CLASSES
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


TOKENIZER = Tokenizer(WordLevel({str(number): number for number in range(1000)}, unk_token="0"))
WRITERS = {
    "python": lambda path: Path(path).write_bytes(bytes(100_000)),
    "torch": lambda path: torch.save(torch.zeros(100_000), path),
    "safetensors": lambda path: save_file({"a": torch.zeros(100_000)}, path),
    "tokenizers": lambda path: TOKENIZER.save(str(path)),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_disk_that_is_full(tmp_path, write):
    with small_disk(10_000):
        error = raised_by(lambda: write(tmp_path / "file"))
    assert kinds_of(error) == ["disk"]


def test_memory_that_is_used_up():
    assert kinds_of(raised_by(lambda: torch.empty(1 << 60))) == ["memory"]
    assert kinds_of(raised_by(lambda: bytearray(1 << 60))) == ["memory"]


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (caused(ValueError("the configuration cannot be read"), PermissionError(13, "Permission denied")), "rights"),
        (caused(RuntimeError("CUDA out of memory"), KeyError("a")), "memory"),
        (caused(ValueError("no video"), caused(RuntimeError("a thread failed"), MemoryError())), "memory"),
        (caused(KeyError("a"), OSError(28, "No space left on device")), "disk"),
        (RuntimeError("open file failed with strerror: Permission denied"), "rights"),
        (SafetensorError("I/O error: Permission denied (os error 13)"), "rights"),
        (ImportError("libgomp.so: cannot map zero-fill pages"), "memory"),
        (OSError("libgomp.so: failed to map segment from shared object"), "memory"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_errors_and_their_causes(error, kind):
    assert kinds_of(error) == [kind]


@pytest.mark.parametrize(
    "error",
    [
        KeyError("No space left on device"),  # a name in a file may be anything
        ValueError("CUDA out of memory"),
        SafetensorError("Permission denied"),
        RuntimeError("shapes do not match"),
        FileNotFoundError(2, "No such file", "Permission denied/clip.mp4"),
        Exception("No such file or directory (os error 2)"),
    ],
    ids=repr,
)
def test_other_errors_are_none_of_these(error):
    assert kinds_of(error) == []


def test_a_bug_amid_the_handling_of_a_shortage_is_none():
    def fail():
        try:
            raise OSError(28, "No space left on device")
        except OSError:
            int("a")

    assert kinds_of(raised_by(fail)) == []
    error = ValueError("its own cause")
    assert kinds_of(caused(error, error)) == []


@pytest.mark.parametrize("command", command_line.LESS_MEMORY)
def test_what_takes_less_memory_are_settings_of_the_command(command):
    words = command_line.LESS_MEMORY[command]
    (commands,) = (
        action.choices for action in command_line.build_parser()._actions if isinstance(action.choices, dict)
    )
    options = set(re.findall(r"--[a-z-]+", words))
    assert options
    assert options <= commands[command]._option_string_actions.keys()
    settings = {field.name for kind in ARGUMENT_CLASSES for field in dataclasses.fields(kind)}
    assert set(re.findall(r"`(\w+)", words)) <= settings


def test_what_a_record_says_of_an_error():
    errors = MemoryError(), ValueError("no video"), KeyError("a")
    assert [describe_error(error) for error in errors] == ["MemoryError", "no video", "KeyError: 'a'"]


@pytest.fixture
def run_failing(monkeypatch):
    """The exit status of a command that raises an error."""

    def run(error: Exception) -> int:
        def fail(arguments):
            raise error

        monkeypatch.setattr(doctor, "execute", fail)
        return command_line.main(["doctor", "folder"])

    return run


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), r"out of memory \(CUDA out of memory.\)"),
        (OSError(28, os.strerror(28)), "no space is left on the disk"),
        (PermissionError(13, os.strerror(13), "place"), "a file or folder is forbidden .*'place'"),
    ],
    ids=["memory", "disk", "rights"],
)
def test_a_command_says_so_in_one_line(run_failing, capsys, error, words):
    assert run_failing(error) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(f"stts-hf doctor: error: {words}", line), line


def test_what_is_none_of_these_keeps_its_traceback(run_failing):
    with pytest.raises(RuntimeError, match="a bug"):
        run_failing(RuntimeError("a bug"))
