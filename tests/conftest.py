"""What several test files share."""

import os

# Read once, when huggingface_hub is imported: no test needs the network, and none waits for it.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import itertools
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


MODELS = {"any_folder", "assistant", "backbone", "model", "shape"}  # parameters that are one of several models
BESIDE = ("study", "gpu", "benchmarks", "fuzz")  # folders of what runs in a checkout, beside the package


def pytest_addoption(parser):
    parser.addoption("--every-case", action="store_true", help="also spare cases and all combinations of parameters")


def cover(items, size, chosen=()):
    """Few of `items`, besides `chosen`, with which any `size` parameters take all values together that they take."""
    # Private, since nothing else has an entry for each `parametrize`: the public `indices` number whole cases.
    values = {item: set(itertools.combinations(enumerate(item.callspec._idlist), size)) for item in items}
    left, found = set().union(*values.values()).difference(*(values[item] for item in chosen if item in values)), []
    while left:
        found.append(max(items, key=lambda item: len(values[item] & left)))
        left -= values[found[-1]]
    return found


def thin(items):
    """
    Returns the cases left out, which `--every-case` takes. A test with parameters besides the model takes each value of
    each parameter once; of its cases that are not slow, also each two values together, among the slow tests.
    """
    left_out = {item for item in items if item.get_closest_marker("spare") is not None}
    products = defaultdict(list)
    for item in items:
        callspec: Any = getattr(item, "callspec", None)
        several = callspec is not None and len(callspec._idlist) > 1
        if several and MODELS & callspec.params.keys() and item not in left_out:
            products[item.nodeid.partition("[")[0]].append(item)
    for cases in products.values():
        daily = [case for case in cases if case.get_closest_marker("slow") is None]
        once = cover([*daily, *(case for case in cases if case not in daily)], 1)
        together = cover(daily, 2, once)
        for case in together:
            case.add_marker(pytest.mark.slow)
        left_out |= {*cases}.difference(once, together)
    return left_out


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marks
def pytest_collection_modifyitems(config, items):
    """Makes tests `BESIDE` the package slow; skips, saying why, what needs a CUDA device or newer transformers."""
    if not config.option.every_case and not any("::" in argument for argument in config.args):
        left_out = thin(items)
        items[:] = [item for item in items if item not in left_out]
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
