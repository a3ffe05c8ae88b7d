"""Processes that push to a Hub on loopback, and what they push and leave there."""

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import REPOSITORY


def start(hub, home: Path, *arguments: str, token: str | None = "write-token", **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=REPOSITORY,
        env=hub.environment(home, token) | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_python(hub, home: Path, code: str, *arguments: str) -> str:
    process = start(hub, home, "-c", code, *arguments, PYTHONPATH=f"{REPOSITORY / 'src'}{os.pathsep}{REPOSITORY}")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file() and file.name != "README.md"}


def without_card(files: dict[str, bytes]) -> dict[str, bytes]:
    return {path: content for path, content in files.items() if path not in ("README.md", ".gitattributes")}


def write_files(folder: Path, files: dict[str, bytes]) -> Path:
    """A new folder with these files."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder
