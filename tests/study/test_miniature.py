"""All of the study in miniature, by its commands: data, a scorer fitted to answers, training, questions, the page."""

import json

import pytest

from examples.study.__main__ import main
from examples.study.data import encode_conversations, load_processor
from examples.study.runs import do_run
from examples.study.study import open_study, plan
from tests.conftest import REPOSITORY
from tests.study.small_study import SETTINGS, study_command, write_base, write_dataset

pytestmark = pytest.mark.slow
METHODS = ("cosine", "stts-answers", "scorer-answers")


def test_the_study_runs_from_its_data_to_its_page(tmp_path, capsys):
    places = (tmp_path / "study", tmp_path / "data", tmp_path / "base")
    sizes = ["--train", "4", "--validation", "1", "--test", "3", "--photographs", "0"]
    assert main(["make-dataset", str(tmp_path / "data"), *sizes]) == 0
    write_dataset(tmp_path / "calm", seed=1, strength=0.0)
    write_base(tmp_path / "base")
    options = ["--seeds", "0", "--tests", f"calm={tmp_path / 'calm'}", "--only", *METHODS, "--workers", "2"]
    assert main([*study_command(*places), *options, "--plan"]) == 0
    assert "The other 3 take about 0.8 hours with --workers 2 (from 1800 s" in capsys.readouterr().err
    study = open_study(*places, SETTINGS | {"seeds": (0,)}, tests={"calm": tmp_path / "calm"})
    encode_conversations(study.dataset, load_processor(study.base), study.folder)
    for run in plan(study.settings, METHODS):
        do_run(study, run)  # here, as processes of their own would import PyTorch three times
    assert main(["report", str(study.folder)]) == 0

    page = (study.folder / "README.md").read_text()
    for label in ("STTS by answers", "Heuristic", "Scorer by answers (frozen base)", "Heuristic (frozen base)"):
        rows = [line.split("|") for line in page.splitlines() if line.startswith(f"| {label} |")]
        of_looks = [row for row in rows if row[-2].strip() == "1"]  # with one seed
        assert len(of_looks) == 2
        assert all(row[2].strip() for row in of_looks)
    settings = json.loads((study.folder / "study.json").read_text())
    assert (settings["scorer_rate"], settings["answers_steps"], settings["tests"].keys()) == (2e-3, 2, {"calm"})
    records = {path.stem: json.loads(path.read_text()) for path in (study.folder / "records").iterdir()}
    trained, frozen = (records[f"{name}-layer2-seed0"]["training"] for name in METHODS[1:])
    assert trained["scorer_seconds"] == frozen["scorer_seconds"] > 0  # one fit serves both
    assert [bool(it["losses"]) for it in (trained, frozen)] == [True, False]
    assert {"told-80", "none-inference-0"} <= records["scorer-answers-layer2-seed0"]["evaluations"].keys()


def test_another_backbone_is_trained_and_asked_alike(tmp_path):
    """Of Qwen3-VL; ToMe, the ceiling and scores against what moves are of Molmo2 alone."""
    dataset = write_dataset(tmp_path / "data")
    settings = SETTINGS | {"seeds": (0,), "steps": 1, "answers_steps": 1}
    study = open_study(tmp_path / "study", dataset, REPOSITORY / "hub_configs/stts-qwen3-vl-tiny", settings)
    assert study.settings.backbone == "stts_qwen3_vl"
    assert not {run.method for run in plan(study.settings)} & {"tome", "told"}
    encode_conversations(study.dataset, load_processor(study.base), study.folder)
    for run in plan(study.settings, ["stts-answers", "scorer-answers", "cosine-inference"]):
        do_run(study, run, only=["stts-answers", "scorer-answers", "cosine-inference"])
    assert main(["report", str(study.folder)]) == 0
    found = {path.stem: json.loads(path.read_text()) for path in (study.folder / "records").iterdir()}
    trained, frozen = (found[f"{name}-layer{study.settings.base_layer}-seed0"] for name in METHODS[1:])
    assert trained["training"]["losses"][-1]["worth_loss"] > 0
    assert frozen["evaluations"].keys() == {"scorer-answers-80", "cosine-inference-80"}
