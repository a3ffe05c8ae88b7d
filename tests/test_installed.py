"""
The wheel installed without the checkout, and the wheel made of the sdist: what users install is whole.

pip installs it, offline, into a new environment, whose path holds the packages of this environment besides and nothing
of the checkout. An environment without them would be a copy of PyTorch, 6 GB.
"""

import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.checkpoints import TINY
from tests.conftest import REPOSITORY
from tests.hub_server import LoopbackHub

# Of this environment, which may lie in the checkout.
PACKAGES = sorted({sysconfig.get_path(name) for name in ("purelib", "platlib")})
BUILD = "import os, sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
USE = """
import stts_hf, sys
assert stts_hf.__file__.startswith(sys.prefix), stts_hf.__file__
assert not [path for path in sys.path if path.startswith(sys.argv[1]) and path not in sys.argv[2:]], sys.path
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


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory) -> Path:
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The environment that holds the package."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "venv", symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "venv"), "install", "--no-index", "--no-deps"]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True)
    [packages] = (folder / "venv" / "lib").glob("python*/site-packages")
    # Of a folder that one file `.pth` names no other `.pth` is read: an editable checkout stays out.
    (packages / "others.pth").write_text("\n".join(PACKAGES) + "\n")
    return folder / "venv"


@pytest.mark.slow
def test_the_wheel_made_of_the_sdist_is_the_same(source, wheel, tmp_path):
    with tarfile.open(build("sdist", source, tmp_path)) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    with zipfile.ZipFile(build("wheel", unpacked, tmp_path)) as found, zipfile.ZipFile(wheel) as expected:
        contents = [{name: file.read(name) for name in file.namelist()} for file in (found, expected)]
    assert contents[0] == contents[1]


@pytest.mark.slow
def test_what_is_installed_does_its_work_without_the_checkout(installed, tmp_path):
    shutil.copytree(TINY, tmp_path / "tiny")  # follows links
    with LoopbackHub() as hub:
        environment = hub.environment(tmp_path / "home")
        environment.pop("PYTHONPATH", None)

        def run(*words: str) -> str:
            program, *rest = words
            command = [str(installed / "bin" / program), *rest]
            ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
            assert ran.returncode == 0, ran.stderr
            return ran.stdout

        run("python", "-m", "stts_hf.visualize.sample_clip", "clip.mp4")
        assert run("python", "-c", USE, str(REPOSITORY), *PACKAGES).strip() == "right"
        assert "answer:       right" in run(
            "stts-hf", "run", "clip.mp4", "Which way does the red ring move?", "--checkpoint", "tiny"
        )
        ask = ("--prompt", "What moves?", "--checkpoint", "tiny", "--output", "answers.jsonl", "--workers", "0")
        run("stts-hf", "predict", "clip.mp4", *ask)
        run("stts-hf", "convert", "tiny", "mine", "--pruning-ratio", "30%")
        run("stts-hf", "doctor", "mine")
        run("stts-hf", "push", "mine", "user/name")
        assert {path.name for path in (tmp_path / "mine").glob("*.py")} <= hub.files("user/name").keys()
        # `-S`: neither this package nor a checkout is on the path, the others are.
        others = sysconfig.get_path("purelib")
        run("python", "-S", "-c", f"import sys; sys.path.append({others!r})\n{REMOTE}")
