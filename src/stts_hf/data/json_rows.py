"""Rows of JSON files as a table whose values come back as they were written, whatever their kinds."""

import json
from pathlib import Path
from typing import Any

import datasets

_TEXTS = ("id", "media_root")


def load_json(path: Path, root: Path) -> datasets.Dataset:
    """
    A JSONL file, or a JSON file that is a list of rows, with `id` and `media_root` (that of the row, else `root`).

    Not `load_dataset("json")`, which refuses content that is text in one row and a list of parts in another. Raises
    `ValueError` that names file and line.
    """
    rows = []
    for number, row in _read(path):
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number} must be an object with columns, got {type(row).__name__}.")
        name = f"{path.name}:{number}" if row.get("id") is None else str(row["id"])
        rows.append(row | {"id": name, "media_root": str(row.get("media_root") or root.absolute())})
    if not rows:
        raise ValueError(f"{str(path)!r} holds no rows.")
    names = list(dict.fromkeys(name for row in rows for name in row))
    try:
        columns = {name: [row.get(name) if name in _TEXTS else _dump(row.get(name)) for row in rows] for name in names}
    except RecursionError as error:
        raise ValueError(f"{str(path)!r} holds values that are nested too deeply.") from error
    return datasets.Dataset.from_dict(columns, features=_json_features(dict.fromkeys(names), names))


def as_json(table: datasets.Dataset, names: list[str]) -> datasets.Dataset:
    """The table with the values of the columns `names` as JSON, which takes every kind, but ids as text."""
    for name in set(names) & set(_TEXTS):
        table = table.cast_column(name, datasets.Value("string"))
    names = [name for name in names if name not in _TEXTS and table.features[name] != datasets.Json()]
    if not names:
        return table

    def encode(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {name: [_dump(value) for value in columns[name]] for name in names}

    features = _json_features(table.features, names)
    return table.map(encode, batched=True, features=features, desc="Joining data sets")


def _json_features(features: Any, names: list[str]) -> datasets.Features:
    changed = {name: datasets.Value("string") if name in _TEXTS else datasets.Json() for name in names}
    return datasets.Features({**features, **changed})


def _dump(value: Any) -> str | None:
    """JSON, for texts too: `datasets.Json` would take the text "12" for a number."""
    return None if value is None else json.dumps(value, default=str)


def _read(path: Path) -> list[tuple[int, Any]]:
    """The rows with their numbers: of the line, or in the list."""
    text = path.read_text(encoding="utf-8-sig")
    start = text.lstrip()[:1] if path.suffix == ".json" else ""
    if start == "[":
        return list(enumerate(_parse(text, str(path)), 1))
    if start == "{":
        try:
            whole = json.loads(text)
        except (ValueError, RecursionError):  # lines of objects, or damaged
            pass
        else:
            if not {"messages", "question"} & whole.keys():
                raise ValueError(
                    f"{path} is one object, of {sorted(whole)}, but must be a list of rows: [{{...}}, ...]."
                )
            return [(1, whole)]
    lines = ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())
    return [(number, _parse(line, f"{path}:{number}")) for number, line in lines]


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(f"{place} is nested too deeply.") from error
    except ValueError as error:  # also for numbers of thousands of digits
        raise ValueError(f"{place} is not JSON: {error}.") from error
