"""What several test files share."""

import os

# Read once, when huggingface_hub is imported: no test needs the network, and none waits for it.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version

REPOSITORY = Path(__file__).resolve().parent.parent

# A finder of an editable install answers even `python -I`; a None in `sys.modules` is what stops an import for sure.
WITHOUT_PACKAGE = "import sys; sys.modules['stts_hf'] = None\n"


@pytest.fixture(scope="session")
def hub_configs() -> Path:
    """The folder of preset checkpoints."""
    return REPOSITORY / "hub_configs"


@pytest.fixture
def run_without_package(tmp_path) -> Callable[..., str]:
    """
    Runs Python code in a fresh process that cannot import `stts_hf`, sees no network and starts with an empty cache of
    remote code; returns what it printed.
    """

    def run(code: str, *arguments: str) -> str:
        environment = {**os.environ, "HF_HOME": str(tmp_path / "hf_home"), "HF_HUB_OFFLINE": "1"}
        environment.pop("HF_MODULES_CACHE", None)
        result = subprocess.run(
            [sys.executable, "-c", WITHOUT_PACKAGE + code, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run


BESIDE = ("study", "gpu", "benchmarks", "fuzz")  # folders of what runs in a checkout, beside the package


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marks
def pytest_collection_modifyitems(items):
    """Makes tests `BESIDE` the package slow; skips, saying why, what needs a CUDA device or newer transformers."""
    old = Version(transformers.__version__) < Version("5.23")
    for item in items:
        if old and "smolvlm" in item.nodeid:
            item.add_marker(pytest.mark.skip(reason="SmolVLM2 needs transformers 5.23"))
        if any(item.path.is_relative_to(REPOSITORY / "tests" / folder) for folder in BESIDE):
            item.add_marker(pytest.mark.slow)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:  # keywords hold names of folders too
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
