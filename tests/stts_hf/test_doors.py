"""What `import stts_hf` offers, and what it costs."""

import importlib
import subprocess
import sys

import pytest

import stts_hf

# The standard library alone: no process here imports PyTorch.
NAMES = """
import sys, types
import stts_hf
slow = {"torch", "transformers", "numpy", "av", "stts_hf.modeling"} & sys.modules.keys()
print(*sorted(slow))
print(*sorted(name for name in vars(stts_hf) if not name.startswith("_")))
"""


@pytest.mark.parametrize("name", stts_hf.__all__)
def test_every_public_name_is_there(name):
    assert getattr(stts_hf, name).__name__ == name


def test_nothing_else_is_offered_and_nothing_is_imported_before_its_use():
    printed = subprocess.run([sys.executable, "-c", NAMES], check=True, capture_output=True, text=True).stdout
    imported, names = printed.splitlines()
    assert imported == ""
    assert names == "versions"
    assert dir(stts_hf) == sorted([*stts_hf.__all__, "__version__"])


def test_another_name_is_an_error_of_python():
    with pytest.raises(AttributeError, match="module 'stts_hf' has no attribute 'STTSTrainr'"):
        stts_hf.STTSTrainr  # type: ignore[attr-defined]  # noqa: B018 - reading it is the point


def test_first_use_of_a_class_registers_the_auto_classes(monkeypatch):
    registered: list[bool] = []
    monkeypatch.setattr("stts_hf.auto_classes.register_auto_classes", lambda: registered.append(True))
    importlib.import_module("stts_hf.modeling.configuration_stts")
    assert not registered
    assert stts_hf.STTSConfig.model_type == "stts"
    assert registered
