"""
A JSONL file of answers, one line each, which stays valid if the run is killed, and which the same command continues.

`answers.summary.json` beside it holds the settings of the answers, and their sums once all are there.
"""

import contextlib
import io
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock

from stts_hf.checkpoints.atomic_folder import atomic_file
from stts_hf.checkpoints.files import read_json
from stts_hf.data.lines import read_lines, write_line

FORMAT = 1


class AnswersError(ValueError):
    """Answers must not or cannot be added to a file."""


class AnswersFile:
    """
    A file open for more answers; made by `open_answers`.

    Attributes:
        answered: its answers by id.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], answered: dict[str, dict[str, Any]], file: io.FileIO):
        self.path, self.settings, self.answered = path, settings, answered
        self._file, self._marked = file, False

    def write(self, record: Mapping[str, Any]) -> None:
        """Adds an answer, whole or not at all; raises `AnswersError` where the disk is full."""
        with _writing(self.path):
            if not self._marked:  # an earlier run may have finished
                _write_summary(self.path, self.settings, None)
                self._marked = True
            write_line(self._file, record)
        self.answered[record["id"]] = dict(record)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Writes the sums of all answers."""
        with _writing(self.path):
            os.fsync(self._file.fileno())
            _write_summary(self.path, self.settings, summary)


def summary_path(path: Path) -> Path:
    """The file of an answers file's settings and sums."""
    return path.with_suffix(".summary.json")


@contextlib.contextmanager
def open_answers(
    path: Path, settings: Mapping[str, Any], *, columns: Mapping[str, Any] | None = None, retry_errors: bool = True
) -> Iterator[AnswersFile]:
    """
    Opens a new file, or continues one with the same settings; a last line that is cut off is dropped.

    settings: plain JSON, everything that changes answers. columns: each with its type. retry_errors: whether answers
    with an error are dropped, so that they are asked again. Raises `AnswersError` if the file holds something else,
    another process writes to it, or it cannot be written.
    """
    settings = json.loads(json.dumps(settings))
    target = Path(os.path.realpath(path))  # of a link
    with contextlib.ExitStack() as stack:
        with _writing(path):
            try:
                stack.enter_context(filelock.FileLock(target.with_name(f".{target.name}.lock"), timeout=0))
            except filelock.Timeout as error:
                raise AnswersError(f"Another process writes to {path}. Wait for it, or name another file.") from error
            answered: dict[str, dict[str, Any]] = {}
            if path.exists() and path.stat().st_size:
                answered, changed = _read(path, settings, columns or {}, retry_errors)
                if changed:
                    _write_summary(path, settings, None)
                    with atomic_file(path) as new, io.FileIO(new, "w") as whole:
                        for record in answered.values():
                            write_line(whole, record)
            else:
                _write_summary(path, settings, None)
            file = stack.enter_context(io.FileIO(path, "a"))
        yield AnswersFile(path, settings, answered, file)


def _read(
    path: Path, settings: Mapping[str, Any], columns: Mapping[str, Any], retry_errors: bool
) -> tuple[dict[str, dict[str, Any]], bool]:
    """The answers of an earlier run, and whether its file holds more than them. Raises `AnswersError`."""
    advice = "Name another file, or move that one away."
    try:
        made_with = read_json(summary_path(path))
        rows, torn = read_lines(path)
    except ValueError as error:
        raise AnswersError(f"{error} {advice}") from error
    if made_with.get("format") != FORMAT or not isinstance(made_with.get("settings"), dict):
        raise AnswersError(
            f"{path} is not empty, but {summary_path(path).name} beside it does not record the settings of its "
            f"answers. {advice}"
        )
    for number, row in enumerate(rows, 1):
        for name, kind in columns.items():
            if name not in row:
                raise AnswersError(f"{path}:{number} has no {name!r}, which every answer has. {advice}")
            if not isinstance(row[name], kind) and (row[name] is not None or row.get("error") is None):
                raise AnswersError(f"{path}:{number}: {name} cannot be {_shown(row[name])}. {advice}")
    differences = [
        f"{name} was {_shown(made_with['settings'].get(name))}, and is {_shown(settings.get(name))} now"
        for name in sorted(made_with["settings"].keys() | settings.keys())
        if made_with["settings"].get(name) != settings.get(name)
    ]
    if differences:
        raise AnswersError(f"{path} holds answers of other settings: {'; '.join(differences)}. {advice}")
    good = {
        row["id"]: row for row in rows if isinstance(row.get("id"), str) and not (retry_errors and row.get("error"))
    }
    return good, torn or len(good) < len(rows)


def _write_summary(path: Path, settings: Mapping[str, Any], summary: Mapping[str, Any] | None) -> None:
    content = {"format": FORMAT, "settings": settings, "finished": summary is not None} | dict(summary or {})
    with atomic_file(summary_path(path)) as new:
        # An undecodable byte of a file's name becomes the JSON escape \udcXX, as in the lines.
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        new.write_text(text, encoding="utf-8", errors="backslashreplace")


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise AnswersError(f"{path} cannot be written: {error}. Mend that; the same command then continues.") from error


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
