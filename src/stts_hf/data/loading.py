"""Data sets of rows: JSONL, Parquet or the Hub, through `datasets`."""

import codecs
import copy
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.file_download import repo_folder_name

from .lines import parse
from .rows import ANSWER, WITHIN

_FILES = (".jsonl", ".json", ".parquet")
_TEXTS = ("id", "media_root", WITHIN)  # columns that are never JSON


def load_rows(
    source: str | os.PathLike | datasets.Dataset | datasets.DatasetDict | Sequence[Any],
    *,
    split: str | None = None,
    media_root: str | os.PathLike | None = None,
    **options: Any,
) -> datasets.Dataset:
    """
    Loads rows without reading a video or image.

    Args:
        source: a JSONL file (`.jsonl`, or `.json` with a list), a Parquet file, a folder that `Dataset.save_to_disk`
            wrote, a Hub data set by name, a `Dataset` or `DatasetDict`, or a list of several of these.
        split: split of a Hub data set, a saved one or a `DatasetDict`, by default "train".
        media_root: folder that relative paths start from, by default that of each data file.
        options: further arguments of `datasets.load_dataset` (`name`, `revision`, ...) for data sets of the Hub.

    Returns:
        A map-style `Dataset`. Each row has an `id`, `<file>:<line>` where the file has none, and `media_root`. Columns
        that datasets would decode give `{"bytes", "path"}` instead. Rows from the Hub may name files of their own data
        set and below `media_root`, and no others.

    Raises:
        ValueError: the file is missing, of another kind or damaged (it names the file and line), or has no such split.
        TypeError: the source is something else, such as rows.
    """
    sources = list(source) if isinstance(source, list | tuple) else [source]
    if not sources:
        raise ValueError("source is an empty list. Name at least one file.")
    for one in sources:
        if not isinstance(one, str | os.PathLike | datasets.Dataset | datasets.DatasetDict):
            raise TypeError(
                f"source must be a path, a name or a Dataset, or a list of these, got {type(one).__name__}. Load "
                "without streaming; rows are a source by `datasets.Dataset.from_list(rows)`."
            )
    tables = [_load(one, split or "train", media_root, options) for one in sources]
    return tables[0] if len(tables) == 1 else datasets.concatenate_datasets(_alike(tables))


def _load(source: Any, split: str, media_root: Any, options: dict[str, Any]) -> datasets.Dataset:
    path = Path() if isinstance(source, dict | datasets.Dataset) else Path(source)
    if isinstance(source, datasets.Dataset | datasets.DatasetDict):
        table, name, root = source, "row", media_root
    elif path.suffix.lower() in _FILES:
        if not path.is_file():
            raise ValueError(f"There is no data file {str(path)!r}. Correct the path.")
        root = media_root if media_root is not None else path.parent
        if path.suffix.lower() != ".parquet":
            return _load_json(path, root)
        try:
            table = datasets.load_dataset("parquet", data_files=str(path), split="train")
        except (ValueError, OSError) as error:
            raise ValueError(f"{str(path)!r} cannot be read as Parquet: {error}") from error
        name = path.name
    elif any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        table, name = datasets.load_from_disk(str(path)), path.name
        root = media_root if media_root is not None else path
    elif path.suffix and path.is_file():
        raise ValueError(f"{str(path)!r} is neither JSONL nor Parquet. Convert it, or pass a datasets.Dataset.")
    else:
        table, name = datasets.load_dataset(os.fspath(source), split=split, **options), f"{source}/{split}"
        root = path if path.is_dir() and media_root is None else media_root
        if not isinstance(table, datasets.Dataset):
            raise ValueError(f"{str(source)!r} gave a {type(table).__name__}; training needs rows by number.")
        own_files = path.exists() or ("/" not in str(source) and "data_files" in options)  # of "csv" and the like
        if not own_files:
            table = _confined(table, os.fspath(source), media_root, options)
    if isinstance(table, datasets.DatasetDict):
        if split not in table:
            raise ValueError(f"{name!r} has the splits {sorted(map(str, table))}, not {split!r}. Pass split.")
        table = table[split]
    return _finish(table, name, root)


def _confined(table: datasets.Dataset, name: str, media_root: Any, options: Mapping[str, Any]) -> datasets.Dataset:
    """Rows that strangers wrote: they may lead to what was downloaded with them, and below `media_root`."""
    own = {ANSWER, WITHIN, "media_root"} & set(table.column_names)
    cached = Path(HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type="dataset"))
    allowed = [cached, options.get("cache_dir") or datasets.config.HF_DATASETS_CACHE, media_root]
    within = json.dumps([str(Path(place).absolute()) for place in allowed if place])
    return table.remove_columns(sorted(own)).add_column(WITHIN, [within] * len(table))


def _load_json(path: Path, root: Any) -> datasets.Dataset:
    """
    A JSONL file, or a JSON file that is a list of rows, with `id` and `media_root` (that of the row, else `root`).

    Not `load_dataset("json")`, which takes the text "12" for a number where a column's values are of several kinds.
    Raises `ValueError` that names file and line.
    """
    content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    given: list[tuple[int, Any]]
    if path.suffix.lower() == ".json" and content.lstrip().startswith(b"["):
        given = list(enumerate(parse(content, str(path)), 1))
    else:
        lines = enumerate(content.split(b"\n"), 1)
        given = [(number, parse(line, f"{path}:{number}")) for number, line in lines if line.strip()]
    rows = []
    for number, row in given:
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number} must be an object with columns, got {type(row).__name__}.")
        name = f"{path.name}:{number}" if row.get("id") is None else str(row["id"])
        rows.append(row | {"id": name, "media_root": str(row.get("media_root") or Path(root).absolute())})
        for column in ("id", "media_root"):
            if re.search("[\ud800-\udfff]", rows[-1][column]):  # Arrow's texts are UTF-8
                raise ValueError(
                    f"{path}:{number}: {column} {rows[-1][column]!r} holds a lone surrogate. Write whole characters."
                )
    if not rows:
        raise ValueError(f"{str(path)!r} holds no rows. Name another file.")
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: [row.get(name) if name in _TEXTS else _dump(row.get(name)) for row in rows] for name in names}
    return datasets.Dataset.from_dict(columns, features=_json_features({}, names))


def _dump(value: Any) -> str | None:
    """JSON, for texts too: `datasets.Json` would take the text "12" for a number."""
    return None if value is None else json.dumps(value, default=str)


def _json_features(features: Mapping[str, Any], names: list[str]) -> datasets.Features:
    changed = {name: datasets.Value("string") if name in _TEXTS else datasets.Json() for name in names}
    return datasets.Features({**features, **changed})


def _alike(tables: list[datasets.Dataset]) -> list[datasets.Dataset]:
    """The tables with columns that can be joined: where they differ, each value is kept as JSON."""
    kinds: dict[str, Any] = {}
    differing = set()
    for number, table in enumerate(tables, 1):
        for name, feature in table.features.items():
            if feature == kinds.setdefault(name, feature):
                continue
            differing.add(name)
            if any(word in str((feature, kinds[name])) for word in ("Image(", "Video(", "binary")):
                raise ValueError(
                    f"The column {name!r} of source {number} is {feature}, but {kinds[name]} in one before it: they "
                    "cannot be joined, because one of them holds files. Give the column the same type in all."
                )
    return [_as_json(table, sorted(differing & set(table.column_names))) for table in tables]


def _as_json(table: datasets.Dataset, names: list[str]) -> datasets.Dataset:
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


def _finish(table: datasets.Dataset, name: str, root: Any) -> datasets.Dataset:
    """The table with files left as they are, an `id` for every row, and the folder of its relative paths."""
    features = datasets.Features({key: _undecoded(feature) for key, feature in table.features.items()})
    if features != table.features:
        # `cast` would rewrite the whole table, videos included, though nothing that is stored changes.
        table = copy.deepcopy(table)
        table.info.features = features
    if "id" not in table.column_names:
        table = table.add_column("id", [f"{name}:{number}" for number in range(1, len(table) + 1)])
    if root is not None and "media_root" not in table.column_names:
        table = table.add_column("media_root", [str(Path(root).absolute())] * len(table))
    return table


def _undecoded(feature: Any) -> Any:
    """The same feature, but videos and images inside it come as `{"bytes", "path"}`: the collator decodes them."""
    if isinstance(feature, datasets.Video | datasets.Image):
        return type(feature)(decode=False)
    if isinstance(feature, datasets.List | datasets.LargeList):
        return type(feature)(_undecoded(feature.feature))
    if isinstance(feature, dict):
        return {key: _undecoded(inner) for key, inner in feature.items()}
    return feature
