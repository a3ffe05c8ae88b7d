"""Reading the JSON files of a checkpoint."""

import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file, empty where the file is missing. Raises `ValueError` for anything else."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply to be a file of a checkpoint: copy it again.") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}): copy it again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, but is {str(content)[:40]}: copy it again.")
    return content
