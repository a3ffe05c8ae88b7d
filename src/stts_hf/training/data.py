"""Data sets of rows: JSONL, Parquet or the Hub, through `datasets`; and a look at all rows before the first step."""

import copy
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
from tqdm import tqdm
from transformers.utils import logging

from .collator import check_on_error
from .encoding import check_text
from .labels import render
from .rows import RowError, check_files, read_row

logger = logging.get_logger(__name__)

_MAX_LISTED = 20


def load_rows(
    source: str | os.PathLike | Sequence[str | os.PathLike] | datasets.Dataset,
    *,
    split: str | None = None,
    media_root: str | os.PathLike | None = None,
    **options: Any,
) -> datasets.Dataset:
    """
    Loads rows without reading a video or image.

    Args:
        source: a JSONL file (`.jsonl`, or `.json` with a list), a Parquet file, several of these, a folder that
            `Dataset.save_to_disk` wrote, a Hub data set by name, or a `Dataset`.
        split: split of a Hub data set, by default "train".
        media_root: folder that relative paths start from, by default that of each data file.
        options: further arguments of `datasets.load_dataset` (`name`, `revision`, `streaming=False`, ...).

    Returns:
        A map-style `Dataset`. Each row has an `id`, `<file>:<line>` where the file has none, and `media_root`. Columns
        that datasets would decode give `{"bytes", "path"}` instead.

    Raises:
        ValueError: the file is missing, of another kind or damaged; it names the file and line.
    """
    if isinstance(source, datasets.Dataset):
        return _finish(source, "row", media_root)
    if not isinstance(source, str | os.PathLike):
        if not source:
            raise ValueError("source is an empty list. Name at least one file.")
        return datasets.concatenate_datasets(
            [load_rows(one, split=split, media_root=media_root, **options) for one in source]
        )
    path = Path(source)
    if path.suffix in (".jsonl", ".json", ".parquet"):
        if not path.is_file():
            raise ValueError(f"There is no data file {str(path)!r}.")
        root = Path(media_root) if media_root is not None else path.parent
        if path.suffix == ".parquet":
            table = datasets.load_dataset("parquet", data_files=str(path), split="train", **options)
            return _finish(table, path.name, root)
        return _load_json(path, root)
    if path.is_dir() and any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        stored = datasets.load_from_disk(str(path))
        if isinstance(stored, datasets.DatasetDict):
            stored = _pick_split(stored, split, str(path))
        return _finish(stored, path.name, media_root if media_root is not None else path)
    if path.suffix and path.is_file():
        raise ValueError(f"{str(path)!r} is neither JSONL nor Parquet. Convert it, or pass a datasets.Dataset.")
    if path.is_dir() and media_root is None:
        media_root = path
    loaded = datasets.load_dataset(os.fspath(source), split=split or "train", **options)
    if not isinstance(loaded, datasets.Dataset):
        raise ValueError(f"{os.fspath(source)!r} gave a {type(loaded).__name__}; training needs rows by number.")
    return _finish(loaded, f"{os.fspath(source)}/{split or 'train'}", media_root)


def check_rows(rows: Any, processor: Any = None, *, on_error: str = "raise", progress: bool = True) -> list[int]:
    """
    Looks at every row before training, without reading a video or image: columns, kinds, placeholders, subtitles, that
    files exist, and, with a `processor`, that the chat template takes the conversation.

    Returns:
        Which rows are good. `rows.select(check_rows(rows, on_error="skip"))` leaves out the others.

    Raises:
        RowError: with on_error="raise", naming the first 20 bad rows and what is wrong with each.
    """
    check_on_error(on_error)
    good, bad = [], []
    for index in tqdm(range(len(rows)), desc="Checking rows", disable=not progress):
        try:
            sample = read_row(rows[index], index)
            check_files(sample)
            if processor is not None:
                _check_prompt(processor, sample)
            good.append(index)
        except RowError as error:
            bad.append(error)
    if bad:
        listed = "\n".join(f"  {error}" for error in bad[:_MAX_LISTED])
        more = f"\n  ... and {len(bad) - _MAX_LISTED} more" if len(bad) > _MAX_LISTED else ""
        message = f"{len(bad)} of {len(rows)} rows cannot be trained on:\n{listed}{more}"
        if on_error == "raise":
            raise RowError(message, bad[0].row_id)
        logger.warning(message)
    return good


def _check_prompt(processor: Any, sample: Any) -> None:
    try:
        check_text(processor, sample)
        render(processor, sample.messages)
    except Exception as error:  # the template raises what Jinja makes of its problem
        raise RowError(f"Row {sample.id!r}: {error}", sample.id) from error


def _load_json(path: Path, root: Path) -> datasets.Dataset:
    """A JSONL file, or a JSON file that is a list of rows; values come back as they are in the file.

    Not `load_dataset("json")`, which refuses content that is text in one row and a list of parts in another.
    """
    text = path.read_text(encoding="utf-8-sig")
    if path.suffix == ".json" and text.lstrip().startswith("["):
        numbered = list(enumerate(_parse(text, str(path)), 1))
    else:
        lines = ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())
        numbered = [(number, _parse(line, f"{path}:{number}")) for number, line in lines]
    if not numbered:
        raise ValueError(f"{str(path)!r} holds no rows.")
    rows = []
    for number, row in numbered:
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number} must be an object with columns, got {type(row).__name__}.")
        name = f"{path.name}:{number}" if row.get("id") is None else str(row["id"])
        rows.append(row | {"id": name, "media_root": row.get("media_root") or str(root.absolute())})
    columns = {key: [row.get(key) for row in rows] for key in dict.fromkeys(key for row in rows for key in row)}
    plain = {key for key, values in columns.items() if all(value is None or isinstance(value, str) for value in values)}
    features = {key: datasets.Value("string") if key in plain else datasets.Json() for key in columns}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is not JSON: {error}.") from error


def _pick_split(stored: datasets.DatasetDict, split: str | None, name: str) -> datasets.Dataset:
    wanted = split or "train"
    if wanted not in stored:
        raise ValueError(f"{name!r} has the splits {sorted(map(str, stored))}, not {wanted!r}. Pass split.")
    return stored[wanted]


def _finish(table: datasets.Dataset, name: str, root: Any) -> datasets.Dataset:
    """The table with files left as they are, an `id` for every row, and the folder of its relative paths."""
    features = datasets.Features({key: _undecoded(feature) for key, feature in table.features.items()})
    if features != table.features:
        # `cast` would write the whole table anew, videos and all, where nothing of what is stored changes.
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
