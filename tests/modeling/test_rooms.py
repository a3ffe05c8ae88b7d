"""The core serves every backbone and names none; remote code imports only its neighbours and what it needs."""

import ast
import re
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

MODELING = REPOSITORY / "modeling"
CORE = [
    "selectors",
    "scoring",
    "attention",
    "sequence",
    "budget",
    "settings",
    "plan",
    "cache",
    "pruning",
    "generation",
    "outputs",
    "tower",
    "raster_tower",
    "vision_tokens",
    "causal",
    "mrope",
    "mrope_tower",
    "recurrent",
]
BACKBONES = re.compile(r"molmo|qwen|smolvlm|siglip|olmo", re.IGNORECASE)
ALLOWED = {"av", "huggingface_hub", "numpy", "PIL", "torch", "torchvision", "transformers"}


def imports(file: Path) -> list[tuple[int, str]]:
    """Level and module of every import, however deep in the code."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            found.append((node.level, node.module or ""))
        elif isinstance(node, ast.Import):
            found += [(0, name.name) for name in node.names]
    return found


@pytest.mark.parametrize("room", CORE)
def test_the_core_names_no_backbone(room):
    text = (MODELING / f"{room}_stts.py").read_text()
    assert BACKBONES.findall(text) == []


@pytest.mark.parametrize("room", CORE)
def test_the_core_imports_only_the_core(room):
    siblings = {module for level, module in imports(MODELING / f"{room}_stts.py") if level}
    assert siblings <= {f"{name}_stts" for name in CORE}


def test_remote_code_imports_neighbours_and_what_it_needs():
    for file in MODELING.glob("*.py"):
        for level, module in imports(file):
            assert level <= 1, (file.name, module)
            if level:
                assert (MODELING / f"{module}.py").is_file(), (file.name, module)
            else:
                assert module.split(".")[0] in ALLOWED | sys.stdlib_module_names, (file.name, module)
