"""Which runs a study has, in which order, and what a folder refuses when it is gone on with."""

import dataclasses
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
    expected_hours,
    fingerprint_base,
    is_done,
    open_study,
    plan,
    read_records,
)
from stts_hf.training.arguments import PAPER_LEARNING_RATES
from tests.study.small_study import write_base, write_dataset

SETTINGS = Settings(dataset="d", base="b", base_layer=3)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data") / "set")


def test_every_method_with_runs_is_run_once_with_each_seed_and_the_first_seed_first():
    runs = plan(SETTINGS)
    methods = {name for name, method in METHODS.items() if method.has_runs}
    assert len(runs) == len(set(runs)) == 5 * len(methods)
    assert {run.method for run in runs[: len(methods)]} == methods == {run.method for run in runs}
    assert [run.seed for run in runs] == sorted(run.seed for run in runs)
    assert [run.method for run in runs[:4]] == ["none", "stts-answers", "stts-answers-fixed", "cosine"]


def test_further_layers_are_of_both_kinds_of_stts():
    runs = plan(dataclasses.replace(SETTINGS, layers=(1,), seeds=(0,)), ["stts", "stts-answers", "cosine"])
    assert {run.name for run in runs if run.pruning_layer == 1} == {"stts-layer1-seed0", "stts-answers-layer1-seed0"}


def test_one_training_is_asked_at_all_ratios():
    assert [one.pruning_ratio for one in evaluations(Run("cosine", 3, 0), SETTINGS)] == list(SETTINGS.ratios)
    assert [one.name for one in evaluations(Run("none", 3, 0), SETTINGS)] == ["none-0", "none-0-frames-for-50"]
    told = {one.name for one in evaluations(Run("stts-answers", 3, 0), SETTINGS)}
    assert told >= {"told-80", "told-clip-80", "stts-answers-50-frames-for-50"}
    assert {one.name for one in evaluations(Run("stts-answers-fixed", 3, 0), SETTINGS)} >= {"told-80", "told-clip-80"}
    assert not {one.method for one in evaluations(Run("stts-answers", 2, 0), SETTINGS)} & {"told", "told-clip"}


def test_methods_without_training_are_asked_of_the_frozen_base_where_the_seed_matters():
    first, second = (evaluations(Run("scorer-answers", 3, seed), SETTINGS) for seed in (0, 1))
    untrained = {name for name, method in METHODS.items() if not method.trained}
    assert {one.method for one in first} == untrained
    assert {one.method for one in second} == {"scorer-answers", "random-inference"}
    assert {one.pruning_ratio for one in first if one.method == "told"} == set(SETTINGS.ratios)


def test_methods_without_training_can_be_asked_alone():
    only = ["cosine-inference", "none-inference"]
    assert {run.method for run in plan(SETTINGS, only)} == {"scorer-answers"}
    run = Run("scorer-answers", 3, 0)
    asked = [one.name for one in evaluations(run, SETTINGS, only)]
    assert sorted(asked) == [
        "cosine-inference-50",
        *(f"cosine-inference-{k}" for k in (70, 80, 90)),
        "none-inference-0",
    ]
    record = {"evaluations": dict.fromkeys(asked)}
    assert is_done(record, run, SETTINGS, only)
    assert not is_done(record, run, SETTINGS, [*only, "told"])
    assert is_done(None, Run("scorer-answers", 3, 1), SETTINGS, only)  # which has nothing to ask


def test_hours_are_reckoned_from_runs_that_are_done():
    left = [Run("cosine", 3, 1), Run("stts", 3, 1)]
    assert expected_hours({}, left, 2) == (0.5, "1800 s a run, not measured")
    done = {str(n): {"run": {"method": "cosine"}, "seconds": seconds} for n, seconds in enumerate((3600, 7200, 7300))}
    assert expected_hours(done, left, 1) == (4.0, "the seconds of 3 runs that are done")


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
    for name, value in (("steps", 30), ("scorer_rate", 1e-3), ("split", "validation")):
        with pytest.raises(StudyError, match=rf"--{name.replace('_', '-')} is {value}, but .* begun with"):
            open_study(tmp_path, dataset, base, {name: value})


def test_further_test_clips_are_part_of_the_study(tmp_path, base, dataset):
    calm = write_dataset(tmp_path / "calm", strength=0.0)
    open_study(tmp_path / "study", dataset, base, {"split": "validation"}, tests={"calm": calm})
    about = json.loads((tmp_path / "study" / "questions.json").read_text())
    assert (about["main"]["look"]["strength"], about["calm"]["look"]["strength"]) == (1.0, 0.0)
    assert all(question["clip"].startswith("validation") for question in about["calm"]["questions"])
    with pytest.raises(StudyError, match=r"--tests is .* was begun with"):
        open_study(tmp_path / "study", dataset, base, {})


def test_layers_that_the_base_lacks_are_refused_and_nothing_is_written(tmp_path, base, dataset):
    study = tmp_path / "study"  # the base has layers 0 to 4, and the last takes the score bias of l = 3
    for layer in (-1, 4):
        with pytest.raises(StudyError, match=rf"--layers holds {layer}, .* 0 to 3"):
            open_study(study, dataset, base, {"layers": (2, layer)})
    assert not study.exists()


def test_a_plan_writes_nothing(tmp_path, base, dataset, capsys):
    options = ["--dataset", str(dataset), "--base", str(base), "--seeds", "7", "--plan"]
    assert main(["run", str(tmp_path / "study"), *options]) == 0
    printed = capsys.readouterr()
    assert "none-layer2-seed7" in printed.out
    assert "take about 5.0 hours with --workers 1" in printed.err
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
        ({"ratios": (0.7,)}, "--ratios must hold 0.8"),
        ({"tests": {"main": "d"}}, "--tests names 'main'"),
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
    run = {"method": "stts", "pruning_layer": 3, "seed": 0}
    (tmp_path / "records" / "alien.json").write_text(json.dumps({"format": FORMAT, "study": "other", "run": run}))
    with pytest.raises(StudyError, match="with other settings"):
        read_records(tmp_path, SETTINGS)
