"""
Accuracies of answers files of `stts-hf eval`, and the difference between two checkpoints, with intervals.

    python -m stts_hf.evaluation.compare rows.jsonl --answers stts.jsonl --against random.jsonl
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stts_hf.checkpoints.files import read_json
from stts_hf.data.lines import read_lines
from stts_hf.data.loading import load_rows
from stts_hf.inference.answers_file import summary_path

from .statistics import Bootstrap, interval, table


def read_right(path: Path, ids: Sequence[str]) -> np.ndarray:
    """(Q,) 100 for each right answer, else 0. Raises `ValueError` where the file's questions are not these."""
    lines, _ = read_lines(path)
    right: dict[str, bool] = {}
    for number, line in enumerate(lines, 1):
        if not isinstance(line.get("id"), str) or not isinstance(line.get("right"), bool):
            raise ValueError(f"{path}:{number} has no id and right, as a line that stts-hf eval wrote has")
        right[line["id"]] = line["right"]
    missing, other = [name for name in ids if name not in right], right.keys() - set(ids)
    if missing or other:
        raise ValueError(
            f"{path} answers {len(ids) - len(missing)} of these {len(ids)} questions and {len(other)} others: name its "
            "own rows, and let stts-hf eval end"
        )
    return np.array([100.0 * right[name] for name in ids])


def asked(path: Path) -> dict[str, Any]:
    """Rows and manner of an answers file's questions, from the summary beside it; empty without one."""
    settings = read_json(summary_path(path)).get("settings", {})
    return {name: settings.get(name) for name in ("rows", "without_options")} if settings else {}


def clip_of(row: Mapping[str, Any]) -> str:
    """The videos and images of a row, which other questions may share; a row without any stands alone."""
    media = [row.get(f"{kind}s") or [row.get(kind)] for kind in ("video", "image")]
    return json.dumps(media, default=repr) if any(map(any, media)) else row["id"]


def compare(rows: Sequence[Mapping[str, Any]], answers: np.ndarray, against: np.ndarray | None = None) -> str:
    """
    A table of the percentage of right answers with intervals over clips and runs: of each group, of the mean over the
    groups about videos, and of all questions.

    rows: Q. answers: (S, Q) of `read_right`, of S runs such as seeds. against: (S, Q) or (1, Q) of another method.
    """
    bootstrap = Bootstrap([clip_of(row) for row in rows])
    groups = np.array([str(row.get("group") or "") for row in rows])
    videos = np.array([bool(row.get("videos") or row.get("video")) for row in rows])
    named = [name for name in dict.fromkeys(groups.tolist()) if name]
    about_videos = [groups == name for name in named if videos[groups == name].any()]
    subsets = {name: [groups == name] for name in named}
    if len(about_videos) > 1:
        subsets["**average**"] = about_videos
    subsets["**all**"] = [np.ones(len(rows), dtype=bool)]
    lines = []
    for name, masks in subsets.items():
        cells = [interval(bootstrap.mean(answers, masks))]
        if against is not None:
            cells.append(interval(bootstrap.mean(against, masks)))
            cells.append(interval(bootstrap.mean(answers - against, masks), signed=True))
        lines.append([name, str(int(sum(mask.sum() for mask in masks))), *cells])
    heads = ["", "questions", "answers", *([] if against is None else ["against", "difference"])]
    return table(heads, lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Accuracies of answers files, and their difference, with intervals.")
    parser.add_argument("rows", type=Path, metavar="ROWS.jsonl", help="the questions")
    files: dict[str, Any] = {"type": Path, "nargs": "+", "metavar": "ANSWERS.jsonl"}
    files["help"] = "of stts-hf eval; several: of runs with other seeds, in the same order"
    parser.add_argument("--answers", required=True, **files)
    parser.add_argument("--against", **files)
    given = parser.parse_args(arguments)
    if given.against and len(given.against) not in (1, len(given.answers)):
        parser.error(f"--against names {len(given.against)} files; name one, or {len(given.answers)} as --answers")
    try:
        rows = list(load_rows(given.rows))
        ids = [str(row["id"]) for row in rows]
        questions = [it for it in map(asked, [*given.answers, *(given.against or [])]) if it]
        if any(it != questions[0] for it in questions):
            raise ValueError("the answers are to other questions, as the files' summaries say: ask them alike")
        answers = np.stack([read_right(path, ids) for path in given.answers])
        against = np.stack([read_right(path, ids) for path in given.against]) if given.against else None
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(compare(rows, answers, against))


if __name__ == "__main__":
    main()
