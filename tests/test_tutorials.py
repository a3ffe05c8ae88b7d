"""The tutorials, run from top to bottom as they are written; a `text` block is what the block before it prints."""

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY
from tests.hub_server import LoopbackHub

MAKES = {
    "asking": "kept.png",
    "training": "merged/README.md",
    "many_videos": "scorer.summary.json",
    "selector": "clip.mp4",
}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The working directory, with what a checkout has."""
    monkeypatch.chdir(tmp_path)
    for name in ("hub_configs", "examples"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    return tmp_path


def run(page: Path, environment: dict[str, str]) -> list[str]:
    """Runs Python's blocks in one namespace and bash's in processes; returns the `text` blocks, which they print."""
    names: dict[str, Any] = {}
    printed, texts = "", []
    for language, code in re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), re.M | re.S):
        if language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(code, str(page), "exec"), names)
            printed = out.getvalue()
        elif language == "bash":
            ran = subprocess.run(["bash", "-euc", code], env=environment, capture_output=True, text=True, timeout=300)
            assert ran.returncode == 0, code + ran.stderr
            printed = ran.stdout
        else:
            # `Trainer` prints its logs before.
            assert printed.splitlines()[-code.count("\n") :] == code.splitlines()
            texts.append(code)
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKES)
def test_it_runs_and_prints_what_it_says(name, folder):
    with LoopbackHub() as hub:
        environment = hub.environment(folder / "hf_home") | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY}",
        }
        assert run(REPOSITORY / "docs" / f"tutorial_{name}.md", environment)
        assert (folder / MAKES[name]).is_file()
        if name == "training":
            assert {"config.json", "model.safetensors", "README.md"} <= hub.files("user/my-stts").keys()


def test_every_tutorial_is_run():
    assert {page.stem.removeprefix("tutorial_") for page in (REPOSITORY / "docs").glob("tutorial_*")} == set(MAKES)
