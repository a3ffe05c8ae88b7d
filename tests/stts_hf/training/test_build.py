"""What is prepared of a configuration before any weights are loaded."""

import json
from typing import Any

import datasets
import pytest

from stts_hf.data.rows import ANSWER, RowError
from stts_hf.training.build import load_data, make_trainer, prepare, with_ids
from stts_hf.training.config import load_config
from tests.tiny import tiny_model
from tests.training_files import CHANGE, row, write_config, write_data, write_rows


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A configuration's file and its data."""
    folder = tmp_path_factory.mktemp("files")
    data = write_data(folder)
    return write_config(folder, data, folder / "out"), data


@pytest.mark.parametrize("on_error", ["skip", "raise"])
def test_no_row_of_the_training_takes_the_place_of_one_in_an_evaluation(files, on_error):
    config, data = files
    run = prepare(load_config(config, [f"--eval_data={data}", f"--on_error={on_error}"]), progress=False)
    trainer: Any = make_trainer(run, tiny_model())
    assert run.rows["eval"] is not run.rows["train"]
    for name, collator in (("train", trainer.data_collator), ("eval", trainer.eval_collator)):
        assert collator.replacements is (run.rows[name] if on_error == "skip" else None)


def test_a_revision_is_for_the_data_of_the_hub(files, monkeypatch):
    config, data = files
    asked = {}
    monkeypatch.setattr("datasets.load_dataset", lambda path, **options: asked.update({path: options}))
    both = load_config(config, ["--train_data=someone/clips", f"--eval_data={data}", "--data_revision=v2"])
    with pytest.raises(ValueError, match="training needs rows by number"):
        load_data(both, "train", "change")
    assert asked["someone/clips"]["revision"] == "v2"
    assert len(load_data(both, "eval", "change"))


def test_a_file_that_is_no_video_is_found_before_the_training(files, tmp_path):
    config, _ = files
    (tmp_path / "broken.mp4").write_bytes(b"not a video" * 50)
    broken = write_rows(tmp_path, [row(0, videos=["broken.mp4"], id="broken")])
    for setting in ("--num_frames=2", "--max_length=5000"):  # the latter by measuring
        with pytest.raises(RowError, match=r"Row 'broken': .*broken.mp4'"):
            prepare(load_config(config, [f"--eval_data={broken}", setting]), progress=False)
    prepare(load_config(config, [f"--eval_data={broken}", "--check_headers=false"]), progress=False)


def test_rows_get_answers_where_the_checkpoint_says_that_its_scorer_learns_them(files):
    config, data = files
    asked = write_rows(data.parent, [row(0, messages=None, question="What moves?")], "asked.jsonl")
    unsaid = config.with_name("unsaid.yaml")
    unsaid.write_text(config.read_text().replace(CHANGE, ""))  # so it is stts-tiny's own: answers
    run = prepare(load_config(unsaid, [f"--train_data={asked}", "--scorer_only"]), progress=False)
    assert run.needs_answers
    assert json.loads(run.tables["train"][ANSWER][0]) == {"question": "Describe this video.", "room": 128}


def test_a_new_scorer_has_no_unit_yet(files):
    """That of the checkpoint belongs to the scorer that it replaces."""
    config, _ = files
    unsaid = config.with_name("unit.yaml")
    unsaid.write_text(config.read_text().replace(CHANGE, ""))
    units = []
    for more in ([], ["--new_scorer"], ["--new_scorer", "--worth_unit=0.5"]):
        run = prepare(load_config(unsaid, ["--scorer_only", *more]), progress=False)
        units.append(run.model_config.worth_unit)
    assert units[0]
    assert units[1:] == [None, 0.5]


def test_rows_of_several_data_sets_get_ids_that_differ():
    rows = datasets.Dataset.from_dict({"id": ["a", None, "a", "row 1"], "question": ["?"] * 4})
    assert list(with_ids(rows)["id"]) == ["a", "row 1", "a (2)", "row 1 (2)"]
