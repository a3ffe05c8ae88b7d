"""The core serves every backbone and names none; remote code imports only its neighbours and what it needs."""

import ast
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY

MODELING = REPOSITORY / "modeling"
CORE = [
    "scoring",
    "layout",
    "attention",
    "sequence",
    "settings",
    "checks",
    "plan",
    "cache",
    "pruning",
    "generation",
    "outputs",
    "mrope",
    "mrope_generation",
    "mrope_tower",
]
BACKBONES = re.compile(r"molmo|qwen|siglip|olmo", re.IGNORECASE)
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


def test_no_room_is_imported_in_a_circle():
    graph = {file.stem: {module for level, module in imports(file) if level} for file in MODELING.glob("*.py")}
    graph["modeling_stts"].discard("processing_stts")  # for the type checker alone: saved together
    graph["processing_stts"].discard("modeling_stts")
    while graph:
        leaves = {name for name, needs in graph.items() if not needs & graph.keys()}
        assert leaves, f"a circle among {sorted(graph)}"
        graph = {name: needs for name, needs in graph.items() if name not in leaves}


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# Of the core's, what the files of one backbone alone mention, and why it is in the core all the same.
OF_ONE_BACKBONE = {"end": "a streamer's, which native `generate` calls"}


def mentions(node: ast.AST) -> Counter[str]:
    """Names and attributes, however deep in the code."""
    kinds = (ast.Name, ast.Attribute)
    return Counter(getattr(some, "id", getattr(some, "attr", "")) for some in ast.walk(node) if isinstance(some, kinds))


def test_what_one_backbone_alone_uses_is_not_in_the_core():
    """No checkpoint carries code that its model never runs; nor what only such code uses."""
    core = [ast.parse((MODELING / f"{room}_stts.py").read_text()) for room in CORE]
    users: dict[str, set[str]] = {}
    for file in MODELING.glob("*_stts*.py"):
        room, _, backbone = file.stem.partition("_stts")  # Molmo2's end as the core's do
        if backbone or room not in CORE:
            for name in mentions(ast.parse(file.read_text())):
                users.setdefault(name, set()).add(backbone)
    used = sum(map(mentions, core), Counter())

    def is_used(node: Any) -> bool:
        return used[node.name] > mentions(node)[node.name]

    defined: list[Any] = [node for tree in core for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]
    # What nobody mentions is called by libraries.
    suspects = [n for n in defined if len(users.get(n.name, ())) == 1 or (n.name not in users and is_used(n))]
    misplaced: list[str] = []
    while found := [node for node in suspects if not is_used(node)]:
        for node in found:
            suspects.remove(node)
            misplaced.append(node.name)
            used -= mentions(node)
    assert set(misplaced) == OF_ONE_BACKBONE.keys()
