"""Each name in the walks of docs/reading.md is defined in the file that its row, or the last one above it, gives."""

import ast
import re
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

SOURCES = [REPOSITORY / "modeling", REPOSITORY / "src" / "stts_hf"]


def rows(heading: str) -> list[tuple[str, str]]:
    """Name and file of each row."""
    section = (REPOSITORY / "docs" / "reading.md").read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    found, file = [], ""
    for name, given in re.findall(r"^\| `([\w.]+)` \| (?:`([\w/]+)`)? ?\|", section, re.M):
        file = given or file
        found.append((name, file))
    return found


def defined_in(file: Path) -> set[str]:
    """Functions, and methods with their class, of a file."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return names


@pytest.mark.parametrize(
    ("heading", "most_files"),
    [
        ("From `processor(...)` to `logits`", 11),
        ("From a question to its answer", 8),
        ("From a YAML file to the first gradient", 8),
    ],
)
def test_names_of_a_walk_are_where_it_says(heading, most_files):
    walk = rows(heading)
    assert len(walk) > 10
    for name, file in walk:
        (path,) = (folder / f"{file}.py" for folder in SOURCES if (folder / f"{file}.py").is_file())
        assert name in defined_in(path), (name, file)
    assert len({file for _, file in walk}) <= most_files
