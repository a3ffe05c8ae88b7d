"""JSON Lines files to which a command appends whole lines while it works."""

import errno
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def open_lines(path: Path) -> io.FileIO:
    """Opens a file for `write_line`. A last line that was cut off by a kill is removed."""
    file = io.FileIO(path, "a")
    file.truncate(file.seek(path.read_bytes().rfind(b"\n") + 1))
    return file


def write_line(file: io.FileIO, row: Mapping[str, Any]) -> None:
    """Appends a row in one write. Raises `OSError` where the disk is full, and leaves the file as it was."""
    whole_lines = file.tell()
    # An undecodable byte of a file's name becomes the JSON escape \udcXX.
    line = (json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
    try:
        if file.write(line) < len(line):  # the disk is full
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        file.truncate(whole_lines)
        file.seek(whole_lines)
        raise


def read_lines(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """The rows of a file of `write_line`, and whether its last line was cut off. Raises `ValueError` for others."""
    *lines, torn = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, 1):
        row = parse(line, f"{path}:{number}")
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number} must be a JSON object, got {type(row).__name__}.")
        rows.append(row)
    return rows, bool(torn)


def parse(text: bytes, place: str) -> Any:
    """Parses JSON. Raises `ValueError` that names the `place`, a file and line."""
    try:
        return json.loads(text.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"{place} is not UTF-8 ({error.reason}). Save the file as UTF-8.") from error
    except (ValueError, RecursionError) as error:  # nested too deeply, or a number of thousands of digits
        raise ValueError(f"{place} is not JSON: {error}. Correct the line, or delete it.") from error
