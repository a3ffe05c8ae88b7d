"""The page's figures against made-up answers whose accuracies are known."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.study.data import StudyError
from examples.study.report import claims_table, write_report
from examples.study.results import Results
from examples.study.study import FORMAT, QUESTIONS, RECORDS, SETTINGS, Evaluation, Run, Settings, evaluations, plan

PER_GROUP = 40
GROUPS = ("motion", "detail", "long", "image")
STUDY = Settings(dataset="d", base="b", base_layer=3, layer_ratios=(0.5, 0.8))
# Right of each 40 questions of a group, by method and ratio; the same ones of every seed.
RIGHT = {"none": 36, "stts": 36, "random": 30, "cosine": 34, "stts-no-temporal": 20, "tome": 32, "text-only": 10}
RIGHT |= {"told": 37, "told-clip": 36}


def rights(method: str, ratio: float, scaling: float, layer: int, group: str) -> int:
    if group == "image":
        return 38
    number = RIGHT[method.removesuffix("-inference")]
    number -= round(100 * ratio - 50) // 10 * (4 if method == "random" else 1) if 0.5 < ratio < 1 else 0
    number += 2 if scaling and method == "stts" else 0
    return number - (STUDY.base_layer - layer)


def as_claimed(one: Evaluation, layer: int, group: str) -> str:
    number = rights(one.method, one.pruning_ratio, one.scaling, layer, group)
    return "1" * number + "0" * (PER_GROUP - number)


def contrary(one: Evaluation, layer: int, group: str) -> str:
    """STTS is the worst, and the worse the more it drops."""
    number = 36 if one.method != "stts" else 20 if one.pruning_ratio == 0.5 else 8
    return "1" * number + "0" * (PER_GROUP - number)


def record_of(run: Run, marks_of: Callable[[Evaluation, int, str], str]) -> dict:
    asked = {}
    for one in evaluations(run, STUDY):
        marks = ""
        for group in GROUPS:
            not_asked = one.scaling and group != "long"
            marks += "-" * PER_GROUP if not_asked else marks_of(one, run.pruning_layer, group)
        tokens = dict.fromkeys(["long"] if one.scaling else GROUPS, 100 * (1 + one.scaling - one.pruning_ratio))
        asked[one.name] = dataclasses.asdict(one) | {"marks": marks, "llm_tokens": tokens, "video_tokens": tokens}
    record = {"format": FORMAT, "study": STUDY.fingerprint, "run": dataclasses.asdict(run), "evaluations": asked}
    record |= {"machine": {"cpu": "abacus", "threads": 1, "device": "cpu"}, "versions": {"stts_hf": "0"}, "seconds": 36}
    record |= {"training": {"seconds_per_step": 1.5 - run.pruning_ratio, "losses": []}}
    if run.method in ("stts", "cosine", "random", "stts-no-temporal"):
        record["motion"] = {"clip-0": 0.4 + 0.1 * run.seed, "clip-1": 0.6}
    return record


def write_study(folder: Path, runs: list[Run], marks_of: Callable = as_claimed, settings: Settings = STUDY) -> Path:
    (folder / RECORDS).mkdir(parents=True)
    questions = [
        {"id": f"{group}-{number}", "clip": f"{group}-{number // 2}", "type": f"{group}-type", "group": group}
        for group in GROUPS
        for number in range(PER_GROUP)
    ]
    about = {"questions": questions, "splits": {"train": {"clips": 9}}}
    levels = {"chance": {f"{group}-type": 0.25 for group in GROUPS}, "text_only": {}}
    (folder / QUESTIONS).write_text(json.dumps(about | levels))
    (folder / SETTINGS).write_text(json.dumps({"format": FORMAT, **dataclasses.asdict(settings)}))
    for run in runs:
        (folder / RECORDS / f"{run.name}.json").write_text(json.dumps(record_of(run, marks_of)))
    return folder


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("study")
    write_report(write_study(folder, plan(STUDY)), folder / "report")
    assert all((folder / "report" / name).stat().st_size for name in ("degradation.png", "layers.png"))
    return (folder / "report" / "README.md").read_text()


def cells(page: str, heading: str, row: str) -> list[str]:
    """The cells of a row of the table under a heading; of intervals only the mean."""
    table = page.partition(f"\n## {heading}")[2].partition("\n## ")[0]
    line = next(line for line in table.splitlines() if line.startswith(f"| {row} |"))
    return [cell.strip().partition(" [")[0] for cell in line.split("|")[2:-1]]


def test_methods_have_their_accuracies_differences_tokens_and_seconds(page):
    columns = ["75.0"] * 4
    assert cells(page, "Methods", "Random") == [*columns, "-15.0", "", "-1.6", "50", "1.00", "3"]
    assert cells(page, "Methods", "No pruning") == [*["90.0"] * 4, "", "+15.0", "+0.0", "100", "1.50", "3"]
    assert cells(page, "Methods", "Heuristic (inference only)")[4:] == ["-5.0", "+10.0", "-3.9", "50", "", "3"]


def test_claims_are_held_to_their_numbers(page):
    assert cells(page, "What the paper claims", "STTS - no pruning: -0.7 or more") == ["+0.0", "yes"]
    assert cells(page, "What the paper claims", "STTS - random: above 0") == ["+15.0", "yes"]
    assert cells(page, "What the paper claims", "STTS - heuristic, long: 0 or more") == ["+5.0", "yes"]
    # From 50 to 90 % STTS loses 4 of 40 and random 16.
    assert cells(page, "What the paper claims", "from 50% to 90%, STTS - random: above 0") == ["+30.0", "yes"]
    assert cells(page, "What the paper claims", "STTS with test-time scaling - no pruning, long: above 0")[0] == "+5.0"


@pytest.mark.parametrize(
    ("marks_of", "verdicts"),
    [
        # More frames mend one clip, which three resamples of eight do not hold.
        (as_claimed, [*["yes"] * 5, "undecided", "undecided", "yes"]),
        (contrary, ["**no**"] * 8),
    ],
)
def test_claims_hold_or_fail_or_are_undecided(tmp_path, marks_of, verdicts):
    write_study(tmp_path, plan(STUDY, ["methods", "ratios"]), marks_of)
    rows = [line.split(" | ") for line in claims_table(Results(tmp_path)).splitlines() if line.startswith("| ")][2:]
    assert [row[-1].removesuffix(" |") for row in rows] == verdicts


def test_a_page_that_is_no_study_s_is_not_overwritten(tmp_path):
    study = write_study(tmp_path / "study", plan(STUDY, ["images"]))
    (tmp_path / "README.md").write_text("# My project\n")
    with pytest.raises(StudyError, match=r"README\.md is not a study's page.*--output"):
        write_report(study, tmp_path)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["README.md", "study"]


def test_the_curve_has_every_ratio(page):
    assert cells(page, "More and more dropped", "Random") == ["75.0", "55.0", "45.0", "35.0"]
    assert cells(page, "More and more dropped", "No pruning") == ["90.0"] * 4
    assert cells(page, "More and more dropped", "ToMe (inference only)") == ["80.0", "75.0", "72.5", "70.0"]
    assert cells(page, "More and more dropped", "Text only") == ["25.0"] * 4


def test_layers_are_compared_at_their_own_ratio(page):
    assert cells(page, "Pruning layer", "STTS at 50%, l = 1") == [*["85.0"] * 4, "-5.0", "1.00"]
    assert cells(page, "Pruning layer", "STTS at 80%, l = 3") == [*["82.5"] * 4, "", "0.70"]
    assert cells(page, "Pruning layer", "STTS at 80%, l = 2")[4] == "-2.5"


def test_scaled_frames_are_compared_on_long_clips(page):
    assert cells(page, "Test-time scaling", "STTS with test-time scaling") == ["95.0", "+5.0", "100", "100"]
    assert cells(page, "Test-time scaling", "STTS") == ["90.0", "+0.0", "50", "50"]
    assert cells(page, "Test-time scaling", "No pruning, as many frames") == ["90.0", "+0.0", "150", "150"]


def test_images_types_and_motion(page):
    assert cells(page, "Images", "STTS") == ["95.0", "+0.0"]
    assert cells(page, "By type of question", "STTS without temporal loss") == ["50.0", "50.0", "50.0", "95.0"]
    assert cells(page, "Scores against what moves", "STTS") == ["0.550"]  # seeds 0.4, 0.5, 0.6 beside 0.6


def test_a_cell_is_of_the_seeds_that_were_run(tmp_path):
    runs = [run for run in plan(STUDY) if run.seed == 0 or run.method == "random"][:12]
    write_report(write_study(tmp_path, runs), tmp_path)
    page = (tmp_path / "README.md").read_text()
    assert f"**Unfinished**: {len(plan(STUDY)) - 12} of {len(plan(STUDY))} runs are missing" in page
    assert cells(page, "Methods", "STTS")[-1] == "1"
    assert cells(page, "More and more dropped", "STTS")[3] == ""
