"""Reading the JSON files of a checkpoint."""

import json
from pathlib import Path
from typing import Any

MAX_DEPTH = 100  # copying settings goes down level by level, and Python's stack ends at 1000 calls


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file, empty where the file is missing. Raises `ValueError` for anything else."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        content = None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}): copy it again.") from error
    if content is None or _is_deep(content):
        raise ValueError(f"{path} is nested deeper than the files of a checkpoint are: copy it again.")
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, but is {str(content)[:40]}: copy it again.")
    return content


def _is_deep(content: Any) -> bool:
    level = [content]
    for _ in range(MAX_DEPTH):
        parts = [part for part in level if isinstance(part, dict | list)]
        level = [value for part in parts for value in (part.values() if isinstance(part, dict) else part)]
    return bool(level)
