"""The wheel, and the wheel made of the sdist, away from the checkout: what users install is whole."""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from stts_hf.visualize.sample_clip import write_sample_clip
from tests.checkpoints import TINY
from tests.conftest import REPOSITORY
from tests.hub_server import LoopbackHub

BUILD = "import os, sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
# Who installs has no checkout; `stts_hf` is the one that was unpacked.
USE = """
import stts_hf, sys
assert stts_hf.__file__.startswith(sys.argv[1]), stts_hf.__file__
print(stts_hf.load("tiny").answer("clip.mp4", "Which way does the red ring move?").answer)
"""
REMOTE = """
import sys
from transformers import AutoModelForMultimodalLM, AutoProcessor
model = AutoModelForMultimodalLM.from_pretrained("user/name", trust_remote_code=True)
AutoProcessor.from_pretrained("user/name", trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules"), type(model)
assert not any(name.startswith("stts_hf") for name in sys.modules)
"""


def build(kind: str, source: Path, output: Path) -> Path:
    """Builds a wheel or an sdist with what is installed: nothing is downloaded."""
    command = [sys.executable, "-c", BUILD, f"build_{kind}", str(output)]
    built = subprocess.run(command, cwd=source, check=True, capture_output=True, text=True).stdout
    return output / built.splitlines()[-1]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of what is packed, since building writes beside it."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, folder)
    leave_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("src", "modeling"):
        shutil.copytree(REPOSITORY / name, folder / name, symlinks=True, ignore=leave_out)
    return folder


@pytest.fixture(scope="module", params=["wheel", "sdist"])
def installed(request, source, tmp_path_factory) -> Path:
    """The folder that holds the package alone."""
    folder = tmp_path_factory.mktemp("installed")
    if request.param == "sdist":
        with tarfile.open(build("sdist", source, folder)) as archive:
            archive.extractall(folder / "unpacked", filter="data")
        (source,) = (folder / "unpacked").iterdir()
    wheel = build("wheel", source, folder)
    shutil.unpack_archive(wheel, folder / "site", "zip")
    return folder / "site"


@pytest.mark.slow
def test_what_is_installed_does_its_work_without_the_checkout(installed, tmp_path):
    write_sample_clip(tmp_path / "clip.mp4")
    shutil.copytree(TINY, tmp_path / "tiny")  # follows links
    with LoopbackHub() as hub:
        environment = hub.environment(tmp_path / "home") | {"PYTHONPATH": str(installed)}

        def run(*words: str, **changes: str) -> str:
            ran = subprocess.run(
                [sys.executable, *words], cwd=tmp_path, env=environment | changes, capture_output=True, text=True
            )
            assert ran.returncode == 0, ran.stderr
            return ran.stdout

        assert run("-c", USE, str(installed)).strip() == "right"
        command = ("-m", "stts_hf.cli.main")
        assert "answer:       right" in run(
            *command, "run", "clip.mp4", "Which way does the red ring move?", "--checkpoint", "tiny"
        )
        ask = ("--prompt", "What moves?", "--checkpoint", "tiny", "--output", "answers.jsonl", "--workers", "0")
        run(*command, "predict", "clip.mp4", *ask)
        run(*command, "convert", "tiny", "mine", "--pruning-ratio", "30%")
        run(*command, "doctor", "mine")
        run(*command, "push", "mine", "user/name")
        assert {path.name for path in (tmp_path / "mine").glob("*.py")} <= hub.files("user/name").keys()
        # Isolated from `PYTHONPATH` and from a checkout that is installed too.
        run("-S", "-c", f"import sys; sys.path.append({os.path.dirname(os.path.dirname(pytest.__file__))!r})\n{REMOTE}")
