"""Inputs of `stts-hf predict`: videos in folders and by pattern, and rows of files and data sets."""

import glob
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stts_hf.data.rows import PLACE, check_files, read_row, row_id
from stts_hf.modeling.budget_stts import KEEP_ARGUMENTS
from stts_hf.video.sources import is_url
from stts_hf.wording import listed

ENDINGS = (
    *(".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".wmv", ".flv", ".mpg", ".mpeg", ".m2ts", ".mts", ".ts"),
    *(".3gp", ".ogv", ".vob", ".gif"),
)
_TABLES = (".jsonl", ".json", ".parquet")
_OF_DATA_SET = ("state.json", "dataset_dict.json", "metadata.jsonl", "metadata.csv", "metadata.parquet")
STAND_INS = {"question": "?", "answer": "..."}  # for what rows for training and scoring have
_ON_HUB = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


@dataclass(frozen=True)
class StoredVideo:
    """A video in a data set, loaded when it is decoded: all of them may not fit into memory."""

    table: Any
    number: int

    def load(self) -> Any:
        """Its bytes or path. Raises `RowError` if there is neither."""
        row = self.table[self.number]
        sample = read_row({name: row.get(name) for name in (*PLACE, "video")} | STAND_INS)
        check_files(sample)
        return sample.videos[0]


def read_inputs(
    inputs: Sequence[str],
    *,
    prompt: str | None = None,
    split: str | None = None,
    subset: str | None = None,
    leave_out: Iterable[Path] = (),
) -> list[dict[str, Any]]:
    """
    Rows `{id, video, prompt}` of all inputs, in their order, with `media_root`, the folder of relative paths, and what
    they say of how many blocks stay (`KEEP_ARGUMENTS`).

    Args:
        inputs: paths or URLs of videos; folders, searched recursively by suffix; patterns such as `videos/**/*.mp4`;
            JSONL and Parquet files of rows `{id, video, prompt}`; data sets on the Hub or in a folder. The `id` of a
            video without a row is its path as given.
        prompt: for videos without one.
        split, subset: of data sets; by default "train", and the only one.
        leave_out: files to ignore: the answers of an earlier run.

    Raises:
        ValueError: an input is none of these, holds no videos or cannot be read, an id occurs twice, a prompt is
            missing.
    """
    left_out = set(map(os.path.realpath, leave_out))
    try:
        rows = [row for one in inputs for row in _read(one, split, subset, left_out)]
    except PermissionError as error:
        raise ValueError(
            f"{error.filename} cannot be read: {error.strerror}. Make it readable, or leave it out."
        ) from error
    if not rows:
        raise ValueError("inputs are empty. Name videos, folders or files of rows.")
    check_ids(rows)
    without = [row["id"] for row in rows if row["prompt"] is None]
    if without and prompt is None:
        raise ValueError(f"prompt is missing for {len(without)} of {len(rows)} rows ({listed(without)}). Pass one.")
    return [row | {"prompt": prompt} if row["prompt"] is None else row for row in rows]


def check_ids(rows: Iterable[Mapping[str, Any]]) -> None:
    """Raises `ValueError` if two rows have the same id."""
    if twice := [name for name, times in Counter(row["id"] for row in rows).items() if times > 1]:
        raise ValueError(f"ids must differ, but several rows have the id {listed(twice)}. Give each its own.")


def _read(source: str, split: str | None, subset: str | None, left_out: Set[str]) -> Iterable[dict[str, Any]]:
    path = Path(source)
    if _is_data_set(source, left_out):
        if any(Path(name).is_relative_to(os.path.realpath(source)) for name in left_out):
            raise ValueError(f"{source} is a data set, so answers cannot be written there. Name another output.")
        return _read_rows(source, split, subset)
    if os.path.isdir(path):
        return map(_of_video, _videos_in(path))
    if os.path.exists(path) or is_url(source):
        return [_of_video(source)]
    if not glob.has_magic(source):
        raise ValueError(f"{source} does not exist. Name a file, a folder, or user/name of a data set.")
    for part in (path, *path.parents):
        if glob.has_magic(part.name):  # `glob` leaves out folders that it cannot list
            for folder in filter(os.path.isdir, glob.iglob(str(part.parent), recursive=True)):
                os.listdir(folder)
    names = (name for name in glob.glob(source, recursive=True) if os.path.isfile(name))
    found = sorted(name for name in names if os.path.realpath(name) not in left_out)
    if not found:
        raise ValueError(f"{source} matches no file. Correct the pattern; ** stands for any folders.")
    return map(_of_video, found)


def _of_video(path: str) -> dict[str, Any]:
    return {"id": path, "video": path, "prompt": None}


def _is_data_set(source: str, left_out: Set[str]) -> bool:
    path = Path(source)
    if os.path.isdir(path):
        os.listdir(source)  # `Path.glob` hides that it cannot
        tables = (*path.glob("*.parquet"), *path.glob("data/*.parquet"))
        return any((path / name).is_file() for name in _OF_DATA_SET) or any(
            os.path.realpath(table) not in left_out for table in tables
        )
    if os.path.exists(path) or path.suffix.lower() in (*ENDINGS, *_TABLES):
        return path.suffix.lower() in _TABLES
    return _ON_HUB.fullmatch(source) is not None


def _videos_in(folder: Path) -> list[str]:
    """All videos below a folder, sorted by name, without hidden ones."""

    def fail(error: OSError) -> None:
        raise error

    videos, others = [], 0
    for place, folders, files in os.walk(folder, onerror=fail):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if not name.startswith(".") and name.lower().endswith(ENDINGS):
                videos.append(os.path.join(place, name))
            else:
                others += 1
    if not videos:
        raise ValueError(
            f"The folder {folder} holds no videos, and {others} other files. Videos end in {', '.join(ENDINGS)}; name "
            "others one by one or by a pattern."
        )
    return videos


def _read_rows(source: str, split: str | None, subset: str | None) -> Iterator[dict[str, Any]]:
    """Rows of a data set, without the content of its videos."""
    import datasets

    from stts_hf.data.loading import load_rows

    try:
        table = load_rows(source, split=split, name=subset)
    except (OSError, RuntimeError) as error:  # what `datasets` raises for what it does not find
        here = "" if Path(source).exists() else " does not exist here, and"
        raise ValueError(f"{source}{here} cannot be loaded as a data set: {error}") from error
    if "video" not in table.column_names:
        raise ValueError(f"{source} has no column 'video', but {', '.join(table.column_names)}. Rename one.")
    are_named = table.features["video"] in (datasets.Value("string"), datasets.Json())
    for number, row in enumerate(table if are_named else table.remove_columns("video")):
        video = row["video"] if are_named else StoredVideo(table, number)
        carried = {name: row[name] for name in (*PLACE, *KEEP_ARGUMENTS) if name in row}
        yield {**carried, "id": row_id(row, number), "video": video, "prompt": row.get("prompt")}
