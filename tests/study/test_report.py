"""The page's figures against made-up answers whose accuracies are known."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from examples.study.data import StudyError
from examples.study.methods import FROZEN, TOLD_TOO
from examples.study.report import Claim, claims_table, write_report
from examples.study.results import Results, t_interval
from examples.study.study import FORMAT, QUESTIONS, RECORDS, SETTINGS, Evaluation, Run, Settings, evaluations, plan
from stts_hf.evaluation.statistics import Interval

PER_GROUP = 100
GROUPS = ("motion", "detail", "long", "image")
STUDY = Settings(dataset="d", base="b", base_layer=3, tests={"calm": "c"}, layers=(2,), seeds=(0, 1, 2))
LOOKS = {"main": {"style": "plain", "strength": 1.0}, "calm": {"style": "plain", "strength": 0.0}}
# Right of each 100 questions of a group at 80 %, by method, with distraction; on calm clips cosine has 24 more.
RIGHT = {"none": 90, "stts-answers": 85, "stts": 70, "stts-no-temporal": 50, "cosine": 70, "random": 50, "tome": 65}
RIGHT |= {"scorer-answers": 80, "stts-answers-fixed": 85, "told": 86, "told-clip": 83, "text-only": 25}


def rights(run: Run, one: Evaluation, look: str, group: str) -> int:
    if group == "image":
        return 95
    number = RIGHT[one.method.removesuffix("-inference")]
    number += 24 if look == "calm" and one.method.startswith("cosine") else 0
    number -= round(20 * (one.pruning_ratio - 0.8)) if 0.5 <= one.pruning_ratio < 1 else 0
    number += 4 if one.scaling else 0
    drawn = run.seed if one.method in ("stts-answers", "random-inference") else 0
    return number - (STUDY.base_layer - run.pruning_layer) + drawn


def as_planned(run: Run, one: Evaluation, look: str, group: str) -> str:
    number = rights(run, one, look, group)
    return "1" * number + "0" * (PER_GROUP - number)


def contrary(run: Run, one: Evaluation, look: str, group: str) -> str:
    """What learns from answers is always wrong."""
    return ("0" if one.method in (FROZEN, *TOLD_TOO) else "1") * PER_GROUP


def record_of(run: Run, marks_of: Callable[[Run, Evaluation, str, str], str]) -> dict:
    asked = {}
    for one in evaluations(run, STUDY):
        marks = ""
        for look in LOOKS:
            for group in GROUPS:
                not_asked = one.scaling and (group, look) != ("long", "main")
                marks += "-" * PER_GROUP if not_asked else marks_of(run, one, look, group)
        tokens = dict.fromkeys(["long"] if one.scaling else GROUPS, 100 * (1 + one.scaling - one.pruning_ratio))
        asked[one.name] = dataclasses.asdict(one) | {"marks": marks, "llm_tokens": tokens, "video_tokens": tokens}
    record = {"format": FORMAT, "study": STUDY.fingerprint, "run": dataclasses.asdict(run), "evaluations": asked}
    record |= {"machine": {"cpu": "abacus", "threads": 1, "device": "cpu"}, "versions": {"stts_hf": "0"}, "seconds": 36}
    seconds = None if run.method == FROZEN else 1.5
    scorer_seconds = 60.0 + run.seed if run.method in (FROZEN, *TOLD_TOO) else None
    record |= {"training": {"seconds_per_step": seconds, "losses": [], "scorer_seconds": scorer_seconds}}
    if run.method in ("stts", "cosine"):
        record["motion"] = {"clip-0": 0.4 + 0.1 * run.seed, "clip-1": 0.6}
    return record


def write_study(folder: Path, runs: list[Run], marks_of: Callable = as_planned) -> Path:
    (folder / RECORDS).mkdir(parents=True)
    questions = [
        {"id": f"{group}-{number}", "clip": f"{group}-{number // 2}", "type": f"{group}-type", "group": group}
        for group in GROUPS
        for number in range(PER_GROUP)
    ]
    levels = {"chance": {f"{group}-type": 0.25 for group in GROUPS}, "text_only": {}}
    about = {look: {"questions": questions, "look": shown} | levels for look, shown in LOOKS.items()}
    (folder / QUESTIONS).write_text(json.dumps(about))
    (folder / SETTINGS).write_text(json.dumps({"format": FORMAT, **dataclasses.asdict(STUDY)}))
    for run in runs:
        (folder / RECORDS / f"{run.name}.json").write_text(json.dumps(record_of(run, marks_of)))
    return folder


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("study")
    write_report(write_study(folder, plan(STUDY)), folder / "report")
    assert (folder / "report" / "accuracy.png").stat().st_size
    return (folder / "report" / "README.md").read_text()


def cells(page: str, heading: str, row: str, mean_alone: bool = True) -> list[str]:
    """The cells of a row of the table under a heading; of intervals only the mean."""
    table = page.partition(f"\n{heading}")[2].partition("\n#")[0]
    line = next(line for line in table.splitlines() if line.startswith(f"| {row} |"))
    return [cell.strip().partition(" [")[0] if mean_alone else cell.strip() for cell in line.split("|")[2:-1]]


def test_every_method_has_its_accuracy_at_every_ratio_on_all_clips(page):
    assert cells(page, "### main", "STTS by answers") == ["92.0", "88.0", "86.0", "84.0", "3"]
    assert cells(page, "### main", "No pruning") == [*["90.0"] * 4, "3"]
    assert cells(page, "### main", "Heuristic (frozen base)") == ["76.0", "72.0", "70.0", "68.0", "3"]
    assert cells(page, "### calm", "Heuristic (frozen base)") == ["100.0", "96.0", "94.0", "92.0", "3"]
    assert cells(page, "### calm", "chance")[0] == "25.0"
    assert "### main, style plain, strength 1.0" in page


def test_intervals_are_student_s_over_seeds_and_missing_where_seeds_make_no_difference(page):
    # Seeds have 85, 86, 87: 86 +- 4.303 / sqrt(3).
    assert cells(page, "### main", "STTS by answers", mean_alone=False)[2] == "86.0 [83.5, 88.5]"
    assert cells(page, "### main", "Heuristic (frozen base)", mean_alone=False)[2] == "70.0"


def test_the_interval_of_five_seeds():
    found = t_interval(np.array([1.0, 2.0, 3.0, 4.0, 5.0]))
    half = 2.776 * np.sqrt(2.5 / 5)
    assert (found.mean, found.low, found.high) == pytest.approx((3.0, 3.0 - half, 3.0 + half))
    assert np.isnan(t_interval(np.array([7.0])).low)


def test_weights_of_stts_are_told_what_matters_too(page):
    assert cells(page, "### main", "Told what a question is about (frozen base)")[2:] == ["86.0", "84.0", "3"]
    assert cells(page, "### main", "Told what a question is about (STTS by answers)") == ["", "", "86.0", "", "3"]


@pytest.mark.parametrize(
    ("marks_of", "expected"),
    [
        # Frozen 10 points above the heuristic are not 18, trained 16 are 8 and 15; on calm clips both are behind.
        (as_planned, {"main": ["yes", "**no**", "yes", "yes"], "calm": ["**no**"] * 4}),
        (contrary, {"main": ["**no**"] * 4, "calm": ["**no**"] * 4}),
    ],
)
def test_claims_hold_or_fail(tmp_path, marks_of, expected):
    lines = claims_table(Results(write_study(tmp_path, plan(STUDY), marks_of))).splitlines()
    for look, verdicts in expected.items():
        found = []
        for pair in ("scorer by answers - heuristic, frozen base", "STTS by answers - heuristic"):
            for at in ("80%", "90%"):
                [line] = [line for line in lines if line.startswith(f"| {pair}, at {at} | {look} |")]
                found.append(line.split(" | ")[-1].removesuffix(" |"))
        assert found == verdicts


@pytest.mark.parametrize(
    ("seeds", "clips", "verdict"),
    [
        (Interval(9, 8, 10), Interval(9, 7, 11), "yes"),
        (Interval(9, 8, 10), Interval(9, -1, 19), "undecided"),
        (Interval(9, -1, 19), Interval(9, 7, 11), "undecided"),
        (Interval(7, 6, 8), Interval(7, 6, 8), "**no**"),
        (Interval(9, np.nan, np.nan), Interval(9, 7, 11), ""),
    ],
)
def test_a_claim_asks_for_its_mean_and_for_both_intervals(seeds, clips, verdict):
    assert Claim("", [], mean=8, low=0).verdict(seeds, clips) == verdict


def test_a_page_that_is_no_study_s_is_not_overwritten(tmp_path):
    study = write_study(tmp_path / "study", plan(STUDY, ["none"]))
    (tmp_path / "README.md").write_text("# My project\n")
    with pytest.raises(StudyError, match=r"README\.md is not a study's page.*--output"):
        write_report(study, tmp_path)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["README.md", "study"]


def test_costs_layers_scaling_images_motion_and_types(page):
    assert cells(page, "## Cost", "STTS by answers") == ["1.50", "61.00", "20"]
    assert cells(page, "## Cost", "Scorer by answers (frozen base)") == ["", "61.00", "20"]
    assert cells(page, "## Pruning layer", "STTS, l = 2")[2] == "69.0"
    assert cells(page, "## Test-time scaling", "No pruning, as many frames") == ["94.0", "150", "150"]
    assert cells(page, "## Images", "STTS") == ["95.0", "+0.0"]
    assert cells(page, "## Scores against what moves", "STTS") == ["0.550"]  # seeds 0.4, 0.5, 0.6 beside 0.6
    assert cells(page, "## By type of question at 80%, calm", "Heuristic") == ["94.0", "94.0", "94.0", "95.0"]


def test_a_cell_is_of_the_seeds_that_were_run(tmp_path):
    runs = [run for run in plan(STUDY) if run.seed == 0 or run.method == "random"][:13]
    write_report(write_study(tmp_path, runs), tmp_path)
    page = (tmp_path / "README.md").read_text()
    assert f"**Unfinished**: {len(plan(STUDY)) - 13} of {len(plan(STUDY))} runs are missing" in page
    assert cells(page, "### main", "STTS")[-1] == "1"
    assert cells(page, "### main", "Random")[-1] == "2"
