"""
Rows of the paper's tables from the results files of lmms-eval, one for each `--model_args`:

    python examples/eval/paper/table.py outputs/eval

Takes files `*_results.json` and folders of them; of two results of a task for the same arguments the later counts. What
makes a number unsound is said below: questions that could not be asked, were asked without a video, or were left out
by `--limit`. Exit status: 0, 1 where there is such a number, 2 for a mistake.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple


class Column(NamedTuple):
    """
    A benchmark: the names of its tasks in lmms-eval, or patterns, how many they are, their metric, and what that is if
    all answers are right. Several are averaged by their questions.
    """

    tasks: str
    metric: str
    full: int = 1
    number: int = 1

    def has(self, task: str) -> bool:
        return any(fnmatch(task, pattern) for pattern in self.tasks.split())


SHORT = {
    "NextQA": Column("nextqa_mc_test", "exact_match"),
    "PerceptionTest": Column("perceptiontest_val_mc", "accuracy"),
    "MVBench": Column("mvbench_*", "mvbench_accuracy", 100, 20),
    "TOMATO": Column("tomato", "tomato_score"),
    "MotionBench": Column("motionbench_full", "motionbench_acc"),
    "TempCompass": Column(
        "tempcompass_multi_choice tempcompass_yes_no tempcompass_caption_matching", "avg_accuracy", 100, 3
    ),
}
LONG = {
    "VideoMME": Column("videomme", "videomme_perception_score", 100),
    "VideoMME-Sub": Column("stts_videomme_sub", "videomme_perception_score", 100),
    "LongVideo": Column("longvideobench_val_v", "lvb_acc"),
    "LongVideo-Sub": Column("stts_longvideobench_sub", "lvb_acc"),
    "MLVU": Column("mlvu_dev", "mlvu_percetion_score", 100),
    "LVBench": Column("lvbench", "lvbench_score"),
    "VideoEvalPro": Column("videoevalpro_mcq", "videoevalpro_mcq_score"),
}
IMAGE = {
    "AI2D": Column("ai2d_no_mask", "exact_match"),
    "ChartQA": Column("chartqa", "relaxed_overall"),
    "DocVQA": Column("docvqa_val", "anls"),
    "InfoQA": Column("infovqa_val", "anls"),
    "TextVQA": Column("textvqa_val", "exact_match"),
    "VQA v2.0": Column("vqav2_val", "exact_match"),
    "RWQA": Column("realworldqa", "exact_match"),
    "MMMU": Column("mmmu_val", "mmmu_acc"),
    "MathVista": Column("mathvista_testmini_format", "llm_as_judge_eval", 100),
    "CountBench": Column("countbenchqa", "acc"),
    "PixMoCount": Column("pixmo_count", "acc"),
}
MULTI_IMAGE = {"MuirBench": Column("muirbench", "muirbench_score_overall")}  # no average without MMIU, not in lmms-eval
TABLES = ({"Short avg.": SHORT, "Long avg.": LONG}, {"Img avg.": IMAGE, "MultiImg avg.": MULTI_IMAGE})


def read_results(paths: Sequence[Path]) -> dict[str, dict[str, dict[str, Any]]]:
    """Results of each task by `model_args`: `score` by metric, `questions`, and `notes` on what is unsound."""
    files = [file for path in paths for file in (sorted(path.rglob("*_results.json")) if path.is_dir() else [path])]
    if not files:
        raise ValueError(f"{', '.join(map(str, paths))} holds no *_results.json. Name lmms-eval's --output_path.")
    try:
        loaded = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for result in sorted(loaded, key=lambda result: result["date"]):
            tasks = found.setdefault(str(result["config"]["model_args"]), {})
            for name, scores in result["results"].items():
                if name in result["n-samples"]:  # not a group
                    tasks[name] = read_task(name, scores, result)
    except (OSError, KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"One of {', '.join(map(str, files))} is no results file of lmms-eval: {error!r}.") from error
    return found


def read_task(name: str, scores: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, Any]:
    """One task of a results file."""
    notes = []
    count = result["n-samples"][name]
    if count["effective"] < count["original"]:
        notes.append(f"{count['effective']} of {count['original']} questions")
    asked = result.get("efficiency", {}).get("by_task", {}).get(name)  # there with --log_samples
    if asked is None:
        notes.append("asked without --log_samples, so whether all videos were there is not known")
    elif missing := int(asked["docs"] - asked["docs_with_token_counts"]):
        notes.append(f"{missing} questions could not be asked")
    if result.get("throughput", {}).get("avg_text_only"):
        notes.append("some questions of its run were asked without a video or image")
    # "metric,filter"; some metrics are dicts with a sum "overall"
    score = {
        key.split(",")[0]: value.get("overall") if isinstance(value, dict) else value for key, value in scores.items()
    }
    return {"score": score, "questions": count["effective"], "notes": notes}


def percent(column: Column, tasks: Mapping[str, dict[str, Any]]) -> float | None:
    """A benchmark's accuracy, `None` where a task of it is missing."""
    found = [task for name, task in tasks.items() if column.has(name)]
    scores = [task["score"].get(column.metric) for task in found]
    if len(found) != column.number or not all(isinstance(score, int | float) for score in scores):
        return None
    return 100 / column.full * fmean(scores, weights=[task["questions"] for task in found])


def averages(groups: Mapping[str, Mapping[str, float | None]]) -> dict[str, float | None]:
    """The mean of each group of several benchmarks and, of several groups, the mean of these, as the paper takes it."""
    means = {name: _mean(list(scores.values())) for name, scores in groups.items() if len(scores) > 1}
    return means | ({"Average": _mean(list(means.values()))} if len(means) > 1 else {})


def _mean(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return fmean(there) if len(there) == len(values) else None


def table(results: Mapping[str, Mapping[str, dict[str, Any]]], groups: Mapping[str, Mapping[str, Column]]) -> list[str]:
    """Lines of a Markdown table; none where no row has any of the benchmarks."""
    rows: list[dict[str, Any]] = []
    for arguments, tasks in results.items():
        scores = {name: {title: percent(c, tasks) for title, c in columns.items()} for name, columns in groups.items()}
        cells = {title: score for group in scores.values() for title, score in group.items()} | averages(scores)
        if any(score is not None for score in cells.values()):
            texts = {title: "-" if score is None else f"{score:.1f}" for title, score in cells.items()}
            rows.append({"model_args": arguments} | texts)
    if not rows:
        return []
    lines = [list(rows[0]), ["---"] + ["---:"] * (len(rows[0]) - 1), *(list(row.values()) for row in rows)]
    return [f"| {' | '.join(line)} |" for line in lines]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path, help="results files, or folders that hold some")
    try:
        results = read_results(parser.parse_args(arguments).paths)
    except ValueError as error:
        parser.error(str(error))
    tables = [lines for groups in TABLES if (lines := table(results, groups))]
    if not tables:
        parser.error("none of these results is of a benchmark of the paper. Run a list that lies beside this file.")
    print("\n\n".join("\n".join(lines) for lines in tables))
    known = [column for groups in TABLES for columns in groups.values() for column in columns.values()]
    notes = [
        f"{arguments}: {name}: {note}"
        for arguments, tasks in results.items()
        for name, task in tasks.items()
        if any(column.has(name) for column in known)
        for note in task["notes"]
    ]
    print("\n".join(notes), end="\n" if notes else "", file=sys.stderr)
    return 1 if notes else 0


if __name__ == "__main__":
    sys.exit(main())
