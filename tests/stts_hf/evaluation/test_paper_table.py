"""The script that makes the paper's rows of lmms-eval's results, against the averages that the paper prints."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY

SCRIPT = runpy.run_path(str(REPOSITORY / "examples" / "eval" / "paper" / "table.py"))

# Tables 1 (+ STTS 30 %) and of images (0 %), with their averages.
VIDEO = [84.1, 79.0, 72.7, 35.6, 59.2, 69.6, 63.4, 68.5, 61.1, 59.2, 69.5, 42.6, 47.7], [66.7, 58.9, 62.8]
IMAGE = [95.0, 84.1, 91.9, 77.2, 85.5, 86.0, 74.6, 49.6, 57.4, 94.3, 91.1, 61.2], [80.6]


def results(scores: list[float], groups: int, arguments: str = "pruning_ratio=0.3") -> dict[str, Any]:
    """A results file as lmms-eval writes it, in which the benchmarks have these percentages."""
    found: dict[str, Any] = {"a_group": {"alias": "a_group"}}
    columns = [column for group in SCRIPT["TABLES"][groups].values() for column in group.values()]
    for column, score in zip(columns, scores, strict=True):
        names = [column.tasks.replace("*", str(n)) for n in range(20)] if "*" in column.tasks else column.tasks.split()
        for name in names:
            value: Any = score * column.full / 100
            if column.metric == "videoevalpro_mcq_score":
                value = {"Local Perception": 0.0, "overall": value}
            found[name] = {"alias": name, f"{column.metric},some-filter": value, f"{column.metric}_stderr,none": "N/A"}
    tasks = [name for name in found if name != "a_group"]
    return {
        "results": found,
        "n-samples": {name: {"original": 10, "effective": 10} for name in tasks},
        "efficiency": {"by_task": {name: {"docs": 10.0, "docs_with_token_counts": 10.0} for name in tasks}},
        "throughput": {"avg_unreadable": 0.0, "avg_text_only": 0.0},
        "config": {"model_args": arguments},
        "date": "20261122_120000",
    }


def run(folder: Path, *files: dict[str, Any]) -> int:
    for number, file in enumerate(files):
        (folder / f"{number}_results.json").write_text(json.dumps(file))
    return SCRIPT["main"]([str(folder)])


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize(("table", "groups"), [(VIDEO, 0), (IMAGE, 1)], ids=["videos", "images"])
def test_averages_are_the_papers(capsys, tmp_path, table, groups):
    scores, averages = table
    assert run(tmp_path, results(scores, groups)) == 0
    header, _, row = capsys.readouterr().out.splitlines()
    assert cells(row) == ["pruning_ratio=0.3", *(f"{score:.1f}" for score in (*scores, *averages))]
    assert len(cells(header)) == len(cells(row))


def test_several_tasks_of_a_benchmark_count_by_their_questions(capsys, tmp_path):
    file = results(VIDEO[0], 0)
    for name, score, number in (("multi_choice", 100.0, 30), ("yes_no", 0.0, 60), ("caption_matching", 50.0, 10)):
        file["results"][f"tempcompass_{name}"]["avg_accuracy,none"] = score
        file["results"][f"tempcompass_{name}"].pop("avg_accuracy,some-filter")
        file["n-samples"][f"tempcompass_{name}"] = {"original": number, "effective": number}
    run(tmp_path, file)
    header, _, row = map(cells, capsys.readouterr().out.splitlines())
    assert row[header.index("TempCompass")] == "35.0"


def test_runs_of_the_same_arguments_make_one_row_in_which_the_later_counts(capsys, tmp_path):
    whole, again = results(VIDEO[0], 0), results(VIDEO[0], 0)
    again["date"] = "20261123_120000"
    again["results"] = {"lvbench": {"lvbench_score,none": 0.5}}
    run(tmp_path, again, whole, results(VIDEO[0], 0, "pruning_ratio=0"))
    header, _, *rows = map(cells, capsys.readouterr().out.splitlines())
    assert {row[0]: row[header.index("LVBench")] for row in rows} == {
        "pruning_ratio=0.3": "50.0",
        "pruning_ratio=0": "42.6",
    }


def test_what_makes_a_number_unsound_is_said(capsys, tmp_path):
    file = results(VIDEO[0], 0)
    file["efficiency"]["by_task"]["videomme"]["docs_with_token_counts"] = 7.0
    file["n-samples"]["tomato"]["effective"] = 4
    del file["efficiency"]["by_task"]["lvbench"]
    assert run(tmp_path, file) == 1
    assert capsys.readouterr().err.splitlines() == [
        "pruning_ratio=0.3: tomato: 4 of 10 questions",
        "pruning_ratio=0.3: videomme: 3 questions could not be asked",
        "pruning_ratio=0.3: lvbench: asked without --log_samples, so whether all videos were there is not known",
    ]
    file["throughput"]["avg_text_only"] = 2.0
    assert run(tmp_path, file) == 1
    assert "tomato: some questions of its run were asked without a video or image" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds no *_results.json. Name lmms-eval's --output_path"),
        ({"a_results.json": "[1]"}, "is no results file of lmms-eval"),
        (
            {"a_results.json": json.dumps(results(VIDEO[0], 0) | {"results": {}})},
            "none of these results is of a benchmark",
        ),
    ],
    ids=["none", "no object", "other tasks"],
)
def test_what_is_no_results_file_is_refused(capsys, tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(SystemExit) as ended:
        SCRIPT["main"]([str(tmp_path)])
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
