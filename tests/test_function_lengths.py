"""No function of the package or of remote code is too long to read."""

import ast

from tests.conftest import REPOSITORY

MOST_LINES = 50  # without the docstring


def num_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """From `def` to the last line, without the docstring."""
    first, end = function.body[0], function.end_lineno or 0
    docstring = first if ast.get_docstring(function) is not None else None
    skipped = 0 if docstring is None else (docstring.end_lineno or 0) - docstring.lineno + 1
    return end - function.lineno + 1 - skipped


def test_no_function_is_too_long_to_read():
    too_long = set()
    for folder in (REPOSITORY / "src" / "stts_hf", REPOSITORY / "modeling"):
        for path in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and num_lines(node) > MOST_LINES:
                    too_long.add(f"{path.parent.name}/{path.name} {node.name}")
    assert too_long == set()
