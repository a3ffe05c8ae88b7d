"""Rooms of the package stand above what they import, and so do files."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import REPOSITORY

PACKAGE = REPOSITORY / "src" / "stts_hf"
# From the top down. A file that lies in no folder stands right above `modeling`.
FLOORS = [
    {"cli"},
    {"demo", "benchmark", "visualize", "evaluation"},
    {"inference", "training", "serving"},
    {"checkpoints"},
    {"data"},
    {"video"},
    {""},
    {"modeling"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
# For the type checker alone: it makes `save_pretrained` copy both files.
ALLOWED_CIRCLE = {"modeling/modeling_stts.py", "modeling/processing_stts.py"}


def files() -> dict[str, ast.Module]:
    """Every file of the package and of remote code, by its path in the package."""
    found = {path.relative_to(PACKAGE): path for path in PACKAGE.rglob("*.py") if "modeling" not in path.parts}
    found |= {Path("modeling", path.name): path for path in (REPOSITORY / "modeling").glob("*.py")}
    return {str(name): ast.parse(path.read_text()) for name, path in sorted(found.items())}


FILES = files()


def imported(name: str) -> Iterator[str]:
    """Paths of the package's files that a file imports, however deep in its code."""
    for node in ast.walk(FILES[name]):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            home = ["stts_hf", *Path(name).parent.parts] if node.level == 1 else []
            module = ".".join([*home, *filter(None, [node.module])])
            modules = [module, *(f"{module}.{alias.name}" for alias in node.names)]
        for module in modules:
            parts = module.split(".")
            if parts[0] == "stts_hf":
                path = "/".join(parts[1:])
                yield from ({f"{path}.py", f"{path}/__init__.py".lstrip("/")} & FILES.keys())


def room(name: str) -> str:
    return name.rpartition("/")[0].partition("/")[0]


IMPORTS = {name: set(imported(name)) for name in FILES if name != "__init__.py"}


def in_circles(graph: dict[str, set[str]]) -> set[str]:
    """What is left of a graph after all that stands above or below everything it is tied to."""
    left = dict(graph)
    while True:
        used = set().union(*left.values())
        ends = {name for name, needs in left.items() if not needs & left.keys() or name not in used}
        if not ends:
            return set(left)
        left = {name: needs & left.keys() - ends for name, needs in left.items() if name not in ends}


def test_nothing_in_the_package_imports_the_package_itself():
    """Its public names are for users, and lead back up."""
    assert {name for name, needs in IMPORTS.items() if "__init__.py" in needs} == set()


def test_nothing_in_the_package_imports_what_is_not_in_the_wheel():
    modules = {
        getattr(node, "module", None) or alias.name
        for tree in FILES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom) and not getattr(node, "level", 0)
        for alias in node.names
    }
    assert {module.split(".")[0] for module in modules} & {"examples", "tests"} == set()


def test_no_arrow_between_rooms_goes_up():
    arrows = {(room(name), room(other)) for name, needs in IMPORTS.items() for other in needs - {"__init__.py"}}
    assert [arrow for arrow in sorted(arrows) if FLOOR[arrow[0]] > FLOOR[arrow[1]]] == []


def test_rooms_of_one_floor_do_not_import_each_other_in_a_circle():
    graph: dict[str, set[str]] = defaultdict(set)
    for name, needs in IMPORTS.items():
        graph[room(name)] |= {room(other) for other in needs} - {room(name)}
    assert in_circles(graph) == set()


def test_files_do_not_import_each_other_in_a_circle():
    assert in_circles(IMPORTS) == ALLOWED_CIRCLE
