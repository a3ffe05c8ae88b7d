"""Writes a result to its folder: `result.json`, `README.md`, `plot.png`, each whole or not at all."""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stts_hf.benchmark.report import markdown
from stts_hf.benchmark.run import SCHEMA

RESULT, UNFINISHED, PAGE, PLOT = "result.json", "unfinished.json", "README.md", "plot.png"
KEYS = {"preset", "command", "started", "seconds", "machine", "versions", "cells"}
CELL_KEYS = {"workload", "title", "status", "variants"}


def check_folder(folder: Path) -> None:
    """
    Raises `ValueError` where a result could not be written to `folder`, which need not exist yet, or would replace
    files that are none of a result's.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output {folder} is a file, but must be a folder")
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise ValueError(f"--output {folder} cannot be made: {there} is a file")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"--output {folder} cannot be written: no permission in {there}")
    replaced = [name for name in (RESULT, UNFINISHED, PAGE, PLOT) if os.path.lexists(folder / name)]
    if replaced and not any(_is_result(folder / name) for name in (RESULT, UNFINISHED)):
        raise ValueError(
            f"--output {folder} holds {', '.join(replaced)}, which would be replaced, but no result of a benchmark; "
            "name another folder"
        )


def write_result(result: Mapping[str, Any], folder: Path) -> None:
    """
    Writes JSON, page and picture into `folder`, which is made if need be. Other files in it stay, but for what
    `keep_unfinished` left if the result is finished.

    All three are ready beside their places before the first takes its own, so a run that fails or is interrupted
    leaves what was there before. Raises `ImportError` without matplotlib.
    """
    from stts_hf.benchmark.plots import draw

    finished = result.get("finished", True)  # older results do not say
    name = RESULT if finished else UNFINISHED
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".writing-") as unfinished:
        made = Path(unfinished)
        (made / name).write_text(_as_json(result))
        (made / PAGE).write_text(page(result))
        draw(result, made / PLOT)
        for written in (name, PAGE, PLOT):
            os.replace(made / written, folder / written)
    if finished:
        (folder / UNFINISHED).unlink(missing_ok=True)


def page(result: Mapping[str, Any]) -> str:
    """The page as it stands in a folder, with the picture."""
    return markdown(result).rstrip("\n") + f"\n\n![plot]({PLOT})\n"


def keep_unfinished(result: Mapping[str, Any], folder: Path) -> None:
    """Writes what there is so far to `unfinished.json`, beside any finished result of an earlier run."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".writing-") as made:
        Path(made, UNFINISHED).write_text(_as_json(result))
        os.replace(Path(made, UNFINISHED), folder / UNFINISHED)


def read_result(folder: Path) -> dict[str, Any]:
    """
    The result in `folder`; without one what a run that did not finish left. Raises `ValueError` where there is neither,
    or one of another schema.
    """
    path = folder / RESULT
    if not path.exists() and (folder / UNFINISHED).exists():
        path = folder / UNFINISHED
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a benchmark's result: {error}") from error
    if not isinstance(result, dict) or result.get("schema") != SCHEMA:
        raise ValueError(f"{path} has another schema than {SCHEMA}; measure again")
    missing = KEYS - result.keys()
    if not missing:
        missing = {f"cells' {key}" for cell in result["cells"] for key in CELL_KEYS - cell.keys()}
    if missing:
        raise ValueError(f"{path} is no whole result of a benchmark, for it lacks {', '.join(sorted(missing))}")
    return result


def _is_result(path: Path) -> bool:
    """Whether a benchmark of any version wrote this file."""
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return isinstance(result, dict) and {"schema", "preset", "cells"} <= result.keys()


def _as_json(result: Mapping[str, Any]) -> str:
    return json.dumps(result, indent=1) + "\n"
