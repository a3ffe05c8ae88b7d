"""Clients of a Hub on loopback, in this process and in others, and what they push and leave there."""

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers
from huggingface_hub import close_session, constants, hf_api

from stts_hf.cli.main import main
from tests.conftest import REPOSITORY


@contextlib.contextmanager
def client_of(hub, home: Path, token: str | None = "write-token", **environment: str) -> Iterator[None]:
    """This process knows `hub` and no other."""
    with client_in(hub.environment(home, token) | environment):
        yield


@contextlib.contextmanager
def client_in(environment: dict[str, str]) -> Iterator[None]:
    """
    This process is as one would be that starts with `environment`, of `hub.environment`: huggingface_hub reads that
    only once, so its constants change too.
    """
    home = Path(environment["HF_HOME"])
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ.keys() - environment.keys():
            patch.delenv(name)
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setattr(constants, "ENDPOINT", environment["HF_ENDPOINT"])
        template = environment["HF_ENDPOINT"] + "/{repo_id}/resolve/{revision}/{filename}"
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        for client in (hf_api.api, transformers.utils.hub.hf_api()):  # what `push_to_hub` methods share
            patch.setattr(client, "endpoint", environment["HF_ENDPOINT"])
        patch.setattr(constants, "HF_HUB_OFFLINE", environment.get("HF_HUB_OFFLINE") == "1")
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        close_session()
        yield
        close_session()


def push(hub, home: Path, *arguments: object, token: str | None = "write-token", **environment: str):
    """Runs `stts-hf push`; returns exit status, output and what it says on stderr."""
    out, err = io.StringIO(), io.StringIO()
    with (
        client_of(hub, home, token, **environment),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        status = main(["push", *map(str, arguments)])
    return status, out.getvalue(), err.getvalue()


def start(hub, home: Path, *arguments: str, token: str | None = "write-token", **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=REPOSITORY,
        env=hub.environment(home, token) | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


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
