"""Which runs a study has, in which order, and what a folder refuses when it is gone on with."""

import json
import shutil

import pytest

from examples.study.__main__ import build_parser, main, settings_of
from examples.study.data import StudyError, fingerprint_dataset
from examples.study.methods import METHODS
from examples.study.study import (
    FORMAT,
    Run,
    Settings,
    evaluations,
    fingerprint_base,
    open_study,
    plan,
    read_records,
    read_settings,
)
from stts_hf.training.arguments import PAPER_LEARNING_RATES
from tests.conftest import REPOSITORY
from tests.study.small_study import write_base, write_dataset

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


def test_methods_without_training_are_asked_of_the_unpruned_weights():
    asked = evaluations(Run("none", 0.0, 3, 0), SETTINGS)
    untrained = [name for name, method in METHODS.items() if not method.trained]
    assert {one.method for one in asked} == {"none", *untrained}
    assert {one.pruning_ratio for one in asked if one.method in untrained} == set(SETTINGS.ratios)


def test_fingerprints_are_those_that_studies_were_begun_with(tmp_path):
    """Values that the first studies wrote down; with others, none of them could go on."""
    names = ["config.json", "generation_config.json", "processor_config.json", "tokenizer.json"]
    names += ["tokenizer_config.json", "model.safetensors", "chat_template.jinja", "modeling_stts.py", "README.md"]
    (tmp_path / "set").mkdir()
    for name in (*names, "set/dataset.json", "set/train_conversations.jsonl", "set/test.jsonl"):
        (tmp_path / name).write_text(f"This is {name.removeprefix('set/')}.")
    assert fingerprint_base(tmp_path) == "1949bb867324c256"
    assert fingerprint_dataset(tmp_path / "set") == "5dcca640e3e9dab2"


def test_settings_stay_and_lists_grow(tmp_path, base, dataset):
    open_study(tmp_path, dataset, base, {"steps": 20, "seeds": (0, 1)})
    again = open_study(tmp_path, dataset, base, {"seeds": (2,)})
    assert (again.settings.steps, again.settings.seeds) == (20, (0, 1, 2))
    with pytest.raises(StudyError, match=r"--steps is 30, but .* begun with 20"):
        open_study(tmp_path, dataset, base, {"steps": 30})


def test_layers_that_the_base_lacks_are_refused_and_nothing_is_written(tmp_path, base, dataset):
    study = tmp_path / "study"  # the base has layers 0 to 4, and the last takes the score bias of l = 3
    for layer in (-1, 4):
        with pytest.raises(StudyError, match=rf"--layers holds {layer}, .* 0 to 3"):
            open_study(study, dataset, base, {"layers": (2, layer)})
    assert not study.exists()


def test_a_plan_writes_nothing(tmp_path, base, dataset, capsys):
    options = ["--dataset", str(dataset), "--base", str(base), "--seeds", "7", "--plan"]
    assert main(["run", str(tmp_path / "study"), *options]) == 0
    assert "none-0-layer2-seed7" in capsys.readouterr().out
    assert not (tmp_path / "study").exists()


def test_settings_are_read_from_the_command():
    options = ["--learning-rates", "scorer=2e-3", "--model-settings", "packing=varlen", "a=true"]
    given = settings_of(build_parser().parse_args(["run", "study", "--dataset", "d", "--base", "b", *options]))
    assert given["model_settings"] == {"packing": "varlen", "a": True}
    assert given["learning_rates"] == PAPER_LEARNING_RATES | {"scorer": 2e-3}


def test_another_data_set_or_base_is_refused(tmp_path, base, dataset):
    study = tmp_path / "study"
    open_study(study, dataset, base, {})
    with pytest.raises(StudyError, match=r"--dataset is .* was begun with"):
        open_study(study, write_dataset(tmp_path / "other", seed=1), base, {})
    changed = shutil.copytree(base, tmp_path / "base")
    (changed / "config.json").write_text((base / "config.json").read_text() + "\n")
    with pytest.raises(StudyError, match=r"--base is .* was begun with"):
        open_study(study, dataset, changed, {})


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"warmup_steps": 200}, "--warmup-steps is 200"),
        ({"learning_rates": {"tower": 1.0}}, "--learning-rates names 'tower'"),
        ({"model_settings": {"pruning_layer": 1}}, "--model-settings names 'pruning_layer'"),
        ({"ratios": (0.7,)}, "--ratios must hold 0.5"),
    ],
)
def test_settings_that_cannot_be_are_refused(given, problem):
    with pytest.raises(StudyError, match=problem):
        Settings(dataset="d", base="b", base_layer=3, **given)


@pytest.mark.parametrize("text", ["{", "[]", f'{{"format": {FORMAT}, "study": "x", "run": {{}}}}'])
def test_a_damaged_record_is_named(tmp_path, text):
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "bad.json").write_text(text)
    with pytest.raises(StudyError, match=r"bad\.json is no record"):
        read_records(tmp_path, SETTINGS)


def test_a_record_of_other_settings_is_refused(tmp_path):
    (tmp_path / "records").mkdir()
    run = {"method": "stts", "pruning_ratio": 0.5, "pruning_layer": 3, "seed": 0}
    (tmp_path / "records" / "alien.json").write_text(json.dumps({"format": FORMAT, "study": "other", "run": run}))
    with pytest.raises(StudyError, match="with other settings"):
        read_records(tmp_path, SETTINGS)


@pytest.mark.parametrize("name", ["", "snow", "snow-scorer-1e-3"])
def test_the_committed_studies_can_be_read_and_the_newest_gone_on_with(name):
    folder = REPOSITORY / "docs" / "study" / name
    settings = read_settings(folder)
    missing = {run.name for run in plan(settings)} - read_records(folder, settings).keys()
    assert len(missing) == (8 if name == "snow" else 0)
    if not name:
        assert fingerprint_base(folder / "base") == settings.base
