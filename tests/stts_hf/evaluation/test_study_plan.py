"""Which runs a study has, in which order, and what a folder refuses when it is gone on with."""

import json
import shutil

import pytest

from stts_hf.evaluation.methods import METHODS
from stts_hf.evaluation.study import Evaluation, Run, Settings, evaluations, open_study, plan, read_records
from stts_hf.evaluation.study_data import StudyError
from tests.stts_hf.evaluation.small_study import write_base, write_dataset

SETTINGS = Settings(dataset="d", base="b", base_layer=3)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data") / "set")


def test_every_trained_method_ratio_layer_and_seed_is_run_once():
    runs = plan(SETTINGS)
    assert len(runs) == len(set(runs)) == 3 * (7 + 5 * 3 + 3)  # methods, three more ratios of five, three more layers
    assert {run.method for run in runs} == {name for name, method in METHODS.items() if method.trained}


def test_the_first_seed_at_half_comes_first_and_other_seeds_last():
    runs = plan(SETTINGS)
    assert [run.name for run in runs[:3]] == ["none-0-layer3-seed0", "stts-50-layer3-seed0", "random-50-layer3-seed0"]
    assert [run.seed for run in runs] == sorted(run.seed for run in runs)
    assert [run.pruning_ratio in (0.0, 0.5, 1.0) for run in runs[:8]] == [True] * 7 + [False]


def test_a_part_alone_has_its_own_runs():
    assert [run.method for run in plan(SETTINGS, ["images"])] == ["none", "stts"] * 3


def test_methods_without_training_are_asked_of_the_unpruned_weights():
    asked = evaluations(Run("none", 0.0, 3, 0), SETTINGS)
    untrained = [name for name, method in METHODS.items() if not method.trained]
    assert {one.method for one in asked} == {"none", *untrained}
    assert {one.pruning_ratio for one in asked if one.method in untrained} == set(SETTINGS.ratios)


def test_frames_are_scaled_at_the_main_ratio_alone():
    assert Evaluation("stts", 0.5, scaling=0.5) in evaluations(Run("stts", 0.5, 3, 0), SETTINGS)
    assert len(evaluations(Run("stts", 0.7, 3, 0), SETTINGS)) == len(evaluations(Run("stts", 0.5, 1, 0), SETTINGS)) == 1


def test_settings_stay_and_lists_grow(tmp_path, base, dataset):
    open_study(tmp_path, dataset, base, {"steps": 20, "seeds": (0, 1)})
    again = open_study(tmp_path, dataset, base, {"seeds": (2,)})
    assert (again.settings.steps, again.settings.seeds) == (20, (0, 1, 2))
    with pytest.raises(StudyError, match=r"--steps is 30, but .* begun with 20"):
        open_study(tmp_path, dataset, base, {"steps": 30})


def test_another_data_set_or_base_is_refused(tmp_path, base, dataset):
    study = tmp_path / "study"
    open_study(study, dataset, base, {})
    with pytest.raises(StudyError, match="--dataset is another data set"):
        open_study(study, write_dataset(tmp_path / "other", seed=1), base, {})
    changed = shutil.copytree(base, tmp_path / "base")
    (changed / "config.json").write_text((base / "config.json").read_text() + "\n")
    with pytest.raises(StudyError, match="--base is another base checkpoint"):
        open_study(study, dataset, changed, {})


def test_a_data_set_of_another_version_is_refused(tmp_path, base, dataset):
    other = shutil.copytree(dataset, tmp_path / "other")
    about = json.loads((other / "dataset.json").read_text())
    (other / "dataset.json").write_text(json.dumps(about | {"format": 99}))
    with pytest.raises(StudyError, match=r"format 99.*make-dataset"):
        open_study(tmp_path / "study", other, base, {})
    assert not (tmp_path / "study").exists()


def test_a_data_set_that_is_not_whole_is_refused(tmp_path, base, dataset):
    other = shutil.copytree(dataset, tmp_path / "other")
    (other / "test.jsonl").unlink()
    with pytest.raises(StudyError, match=r"no test\.jsonl"):
        open_study(tmp_path / "study", other, base, {})


def test_a_base_without_weights_is_refused(tmp_path, dataset):
    with pytest.raises(StudyError, match=r"--base .* is no checkpoint"):
        open_study(tmp_path / "study", dataset, tmp_path, {})


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"warmup_steps": 200}, "--warmup-steps is 200"),
        ({"learning_rates": {"tower": 1.0}}, "'tower'; the parts are"),
        ({"learning_rates": {"scorer": "fast"}}, "'scorer' the rate 'fast'"),
        ({"model_settings": {"pruning_layer": 1}}, "names 'pruning_layer'; it may name temporal_loss_weight"),
        ({"ratios": (0.7,)}, "--ratios must hold 0.5"),
    ],
)
def test_settings_that_cannot_be_are_refused(given, problem):
    with pytest.raises(StudyError, match=problem):
        Settings(dataset="d", base="b", base_layer=3, **given)


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 1, "study": "x", "run": {}}'])
def test_a_damaged_record_is_named(tmp_path, text):
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "bad.json").write_text(text)
    with pytest.raises(StudyError, match=r"bad\.json is no record.*delete it"):
        read_records(tmp_path, SETTINGS)


def test_a_record_of_other_settings_is_refused(tmp_path):
    (tmp_path / "records").mkdir()
    run = {"method": "stts", "pruning_ratio": 0.5, "pruning_layer": 3, "seed": 0}
    (tmp_path / "records" / "alien.json").write_text(json.dumps({"format": 1, "study": "other", "run": run}))
    with pytest.raises(StudyError, match="with other settings"):
        read_records(tmp_path, SETTINGS)
