"""A result's folder: `result.json`, and `README.md` and `plot.png` made of it."""

import importlib.util
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stts_hf.benchmark.report import draw, markdown
from stts_hf.benchmark.run import SCHEMA

RESULT, UNFINISHED, PAGE, PLOT = "result.json", "unfinished.json", "README.md", "plot.png"


def check_folder(folder: Path) -> None:
    """
    Raises `ValueError` where a result could not be written to `folder`, which need not exist yet, or would replace
    files that no benchmark of this version wrote.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("writing a result draws a plot, which needs matplotlib: pip install 'stts-hf[bench]'")
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"--output {folder} must be a folder that can be written, but {there} is not")
    if any(os.path.lexists(folder / name) for name in (RESULT, UNFINISHED, PAGE, PLOT)):
        try:
            read_result(folder)
        except ValueError as error:
            raise ValueError(f"--output {folder} holds files that would be replaced; name another: {error}") from error


def write_result(result: Mapping[str, Any], folder: Path) -> None:
    """
    Writes JSON, page and picture into `folder`, each whole or not at all, and takes away what `keep_unfinished` left
    if the result is finished. Other files stay. Raises `ImportError` without matplotlib.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / PLOT, lambda path: draw(result, path))
    _replace(folder / PAGE, lambda path: path.write_text(page(result)))
    if result["finished"]:
        _replace(folder / RESULT, lambda path: path.write_text(_as_json(result)))
        (folder / UNFINISHED).unlink(missing_ok=True)
    else:
        keep_unfinished(result, folder)


def page(result: Mapping[str, Any]) -> str:
    """The page as it stands in a folder, with the picture."""
    return markdown(result) + f"\n![plot]({PLOT})\n"


def keep_unfinished(result: Mapping[str, Any], folder: Path) -> None:
    """Writes what there is so far to `unfinished.json`, beside any finished result of an earlier run."""
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / UNFINISHED, lambda path: path.write_text(_as_json(result)))


def read_result(folder: Path) -> dict[str, Any]:
    """
    The result in `folder`; without one what a run that did not finish left. Raises `ValueError` where there is neither,
    or one of another schema.
    """
    path = next((folder / name for name in (RESULT, UNFINISHED) if (folder / name).exists()), folder / RESULT)
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a benchmark's result: {error}") from error
    if not isinstance(result, dict) or result.get("schema") != SCHEMA:
        raise ValueError(f"{path} has another schema than {SCHEMA}; measure again")
    return result


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    """Has `path` written beside its place, where it goes once it is whole."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".writing-") as folder:
        write(Path(folder, path.name))
        os.replace(Path(folder, path.name), path)


def _as_json(result: Mapping[str, Any]) -> str:
    return json.dumps(result, indent=1) + "\n"
