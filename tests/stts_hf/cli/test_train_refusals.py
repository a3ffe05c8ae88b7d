"""`stts-hf train` before its first step: the plan that it shows, and what it refuses, by name."""

import errno
import importlib.util
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch

from stts_hf.cli.main import main
from tests.checkpoints import TINIES, TINY
from tests.stts_hf.checkpoints.test_loading import with_trap
from tests.training_files import row, train, write_config, write_rows

pytest.importorskip("accelerate")


@pytest.fixture
def without_weights(tmp_path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def test_dry_run_shows_the_plan_and_loads_no_weights(data, tmp_path, without_weights, capsys):
    more = "freeze: [vision_tower]\npruning_ratio: 0.5\n"
    config = write_config(tmp_path, data, tmp_path / "out", model=without_weights, more=more)
    assert train(config, "--dry-run", "--pack_to=120") == 0
    plan = {line.split(":")[0]: line.partition(":")[2].strip() for line in capsys.readouterr().out.splitlines()}
    assert plan["scorer"].endswith("parameters, trained at 0.001")
    assert plan["vision_tower"].endswith("frozen")
    assert plan["language_model"].endswith("trained at 1e-05")
    assert plan["train"].startswith("3 samples in 2 rows of up to 120 tokens after pruning (1.50 a row")
    assert plan["steps"] == "1 of 2 rows (2 a process x 1 x 1 accumulated), 1 epochs"
    assert not (tmp_path / "out").exists()


def test_plan_shows_the_rates_of_an_adapter_in_several_parts(data, tmp_path, without_weights, capsys):
    pytest.importorskip("peft")
    config = write_config(tmp_path, data, tmp_path / "out", model=without_weights)
    targets = ["--use_peft", "--lora_target_modules=q_proj"]
    assert train(config, "--dry-run", *targets) == 0
    rates = re.findall(r"^(\w+): .* of them trained at (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert rates == [("language_model", "1e-05"), ("vision_tower", "5e-06"), ("connector", "5e-06")]
    assert train(config, "--dry-run", *targets, "--learning_rates={adapter: 2e-4}") == 0
    assert re.search(r"^adapter: .* trained at 0.0002$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without an accelerator")
def test_dry_run_of_a_configuration_for_gpus_needs_none(data, tmp_path, without_weights, capsys):
    config = write_config(tmp_path, data, tmp_path / "out", model=without_weights)
    overrides = ["--use_cpu=false", "--bf16=true"]
    assert train(config, "--dry-run", *overrides) == 0
    assert train(config, *overrides) == 2
    assert "bf16" in capsys.readouterr().err


def test_configuration_that_is_missing_is_asked_for(tmp_path, capsys):
    assert main(["train"]) == 2
    assert "CONFIG is missing" in capsys.readouterr().err
    assert main(["train", "--resume", str(tmp_path / "run.yaml")]) == 2
    assert "Write the file first: stts-hf train CONFIG --resume" in capsys.readouterr().err


def test_resume_without_a_checkpoint_is_refused(data, tmp_path, capsys):
    config = write_config(tmp_path, data, tmp_path / "out")
    assert train(config, "--resume") == 2
    assert "holds no whole checkpoint" in capsys.readouterr().err
    assert train(config, "--resume", str(tmp_path / "nowhere")) == 2
    assert "is no whole checkpoint: there is no such folder" in capsys.readouterr().err


def test_output_that_cannot_be_written_is_refused(data, tmp_path, without_weights, capsys):
    (tmp_path / "file").touch()
    config = write_config(tmp_path, data, tmp_path / "file" / "out", model=without_weights)
    assert train(config) == 2
    assert f"cannot be written: '{tmp_path / 'file'}' is a file" in capsys.readouterr().err


def test_the_last_checkpoint_of_an_earlier_run_is_named(data, tmp_path, capsys):
    for step in (9, 90, 100):
        (tmp_path / "out" / f"checkpoint-{step}").mkdir(parents=True)
        (tmp_path / "out" / f"checkpoint-{step}" / "trainer_state.json").touch()
    assert train(write_config(tmp_path, data, tmp_path / "out")) == 2
    assert "holds checkpoint-100 of an earlier run" in capsys.readouterr().err


def test_run_without_a_step_is_refused(data, tmp_path, without_weights, capsys):
    config = write_config(tmp_path, data, tmp_path / "out", model=without_weights)
    dropping = ["--per_device_train_batch_size=4", "--dataloader_drop_last=true"]
    assert train(config, *dropping) == 2
    assert "`dataloader_drop_last` leaves nothing of 3 rows in batches of 4" in capsys.readouterr().err


BAD_ROWS = {
    "missing file": (row(1, videos=["gone.mp4"]), "gone.mp4' does not exist"),
    "no messages": ({"id": "row-1", "videos": ["clip_0.mp4"]}, "messages and question"),
    "too long": (
        row(1, messages=[{"role": "user", "content": "w " * 500}, *row(1)["messages"][1:]]),
        "max_length is 300",
    ),
}


@pytest.mark.parametrize(("bad", "problem"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_bad_rows_are_named_before_weights_are_loaded(bad, problem, data, tmp_path, without_weights, capsys):
    rows = write_rows(data.parent, [row(0), bad], f"{tmp_path.name}.jsonl")
    config = write_config(tmp_path, rows, tmp_path / "out", model=without_weights)
    assert train(config, "--max_length=300") == 2
    error = capsys.readouterr().err
    assert "'row-1'" in error
    assert problem in error
    assert not (tmp_path / "out").exists()


REFUSED = {
    "ratio out of range": ("--pruning_ratio=1.5", "`pruning_ratio` is 1.5, but must be a number in [0, 1]"),
    "module that the model has not": ("--lora_modules_to_save=skorer", "`lora_modules_to_save` names 'skorer'"),
    "nothing to train": ("--freeze language_model vision_tower connector scorer", "Nothing is left to train"),
    "missing rows": ("--train_data=nowhere.jsonl", "`train_data` cannot be loaded: There is no data file"),
    "order by lengths": (
        "--train_sampling_strategy=group_by_length",
        "`train_sampling_strategy` is 'group_by_length', but the rows have no column 'length'",
    ),
    "missing folder": ("--model_name_or_path=/nowhere/model", "`model_name_or_path` '/nowhere/model' (no folder here"),
}


@pytest.mark.parametrize(("assignment", "message"), REFUSED.values(), ids=REFUSED)
def test_settings_that_do_not_fit_are_refused_by_key(assignment, message, data, tmp_path, without_weights, capsys):
    config = write_config(tmp_path, data, tmp_path / "out", model=without_weights)
    words = assignment.split() + ["--use_peft"] * assignment.startswith("--lora")
    assert train(config, "--dry-run", *words) == 2
    assert message in capsys.readouterr().err


NOT_HERE = {
    "package of an optimizer": ("--optim=adamw_bnb_8bit", "bitsandbytes"),
    "the Hub": ("--push_to_hub=true", "`push_to_hub` cannot be done: the Hub is switched off"),
}


@pytest.mark.parametrize(("assignment", "message"), NOT_HERE.values(), ids=NOT_HERE)
def test_what_this_machine_lacks_is_named(assignment, message, data, tmp_path, capsys):
    if importlib.util.find_spec(message.split()[0].strip("`").split(".")[0]):
        pytest.skip("it is installed")
    config = write_config(tmp_path, data, tmp_path / "out")
    assert train(config, assignment) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out" / "train_config.yaml").exists()


@pytest.mark.parametrize("kind", ["tokenizer", "image_processor"])
@pytest.mark.parametrize("backbone", TINIES)
def test_no_code_of_a_checkpoint_runs_and_nobody_is_asked(backbone, kind, data, tmp_path, capsys, monkeypatch):
    """A class that transformers does not know, in a terminal where the user answers "y" to every question."""
    questions: list[object] = []

    def agree(*question: object) -> str:
        questions.append(question)
        return "y"

    monkeypatch.setattr("builtins.input", agree)
    folder = with_trap(TINIES[backbone], tmp_path / "model")
    file = folder / ("tokenizer_config.json" if kind == "tokenizer" else "processor_config.json")
    settings = json.loads(file.read_text())
    if kind == "tokenizer":
        settings["tokenizer_class"] = "Trap"
    else:
        settings["image_processor"] |= {"image_processor_type": "Trap", "auto_map": {"AutoImageProcessor": "trap.Trap"}}
    file.write_text(json.dumps(settings))
    assert train(write_config(tmp_path, data, tmp_path / "out", model=folder), "--dry-run") == 2
    assert "trust_remote_code" not in capsys.readouterr().err
    assert questions == []
    assert not list(tmp_path.rglob("ran"))


def full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_disk_in_torch(*_: object, **__: object) -> None:
    """As `torch.save` says it: the system's error is gone, and closing the file fails once more."""
    try:
        raise RuntimeError("basic_ios::clear: iostream error")
    finally:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")


@pytest.mark.parametrize("failure", [full_disk, full_disk_in_torch])
def test_a_full_disk_is_said_in_a_line_and_the_next_run_starts(failure, data, tmp_path, capsys, monkeypatch):
    config = write_config(tmp_path, data, tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr("transformers.Trainer._save_optimizer_and_scheduler", failure)
        assert train(config, "--save_steps=1") == 2
    assert f"No space is left on the disk of '{tmp_path / 'out'}'" in capsys.readouterr().err
    assert train(config) == 0


def test_an_error_that_is_none_of_these_keeps_its_traceback(data, tmp_path, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("transformers.Trainer.save_state", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        train(write_config(tmp_path, data, tmp_path / "out"))


def test_rows_with_urls_are_refused_unless_they_are_allowed(data, tmp_path, without_weights, capsys):
    rows = write_rows(data.parent, [row(0, videos=["https://example.com/a.mp4"])], f"{tmp_path.name}.jsonl")
    config = write_config(tmp_path, rows, tmp_path / "out", model=without_weights)
    assert train(config, "--dry-run") == 2
    assert "Row 'row-0': videos: 'https://example.com/a.mp4' is a URL" in capsys.readouterr().err
    assert train(config, "--dry-run", "--allow_urls") == 0


def test_options_of_the_command_may_stand_anywhere(data, tmp_path, without_weights, capsys):
    config = str(write_config(tmp_path, data, tmp_path / "out", model=without_weights))
    assert main(["train", "--dry-run", config, "--max_steps", "7"]) == 0
    assert main(["train", config, "--max_steps", "7", "--dry-run"]) == 0
    assert capsys.readouterr().out.count("7 of 2 rows") == 2
    assert main(["train", config, "--dry-run", "--resume", "--learning_rates={scorer: 1e-3}"]) == 0
    with pytest.raises(SystemExit) as exit:
        main(["train", config, "--help"])
    assert exit.value.code == 0
    assert "--lora_r" in capsys.readouterr().out
