"""Writes a result to its folder: `result.json`, `README.md`, `plot.png`, each whole or not at all."""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stts_hf.benchmark.report import markdown
from stts_hf.benchmark.run import SCHEMA

RESULT, PAGE, PLOT = "result.json", "README.md", "plot.png"


def check_folder(folder: Path) -> None:
    """Raises `ValueError` where a result could not be written to `folder`, which need not exist yet."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output {folder} is a file, but must be a folder")
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"--output {folder} cannot be written: no permission in {there}")


def write_result(result: Mapping[str, Any], folder: Path) -> None:
    """
    Writes JSON, page and picture into `folder`, which is made if need be. Other files in it stay.

    All three are finished beside their places before the first takes its own, so a run that fails or is interrupted
    leaves what was there before. Raises `ImportError` without matplotlib.
    """
    from stts_hf.benchmark.plots import draw

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".writing-") as unfinished:
        made = Path(unfinished)
        (made / RESULT).write_text(json.dumps(result, indent=1) + "\n")
        (made / PAGE).write_text(markdown(result).rstrip("\n") + f"\n\n![plot]({PLOT})\n")
        draw(result, made / PLOT)
        for name in (RESULT, PAGE, PLOT):
            os.replace(made / name, folder / name)


def read_result(folder: Path) -> dict[str, Any]:
    """The result in `folder`. Raises `ValueError` where there is none, or one of another schema."""
    path = folder / RESULT
    try:
        result = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read as a benchmark's result: {error}") from error
    if not isinstance(result, dict) or result.get("schema") != SCHEMA:
        raise ValueError(f"{path} has another schema than {SCHEMA}; measure again")
    return result
