"""A run resumes from the last whole checkpoint: errors amid saves, rotation, the best checkpoint."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from stts_hf import STTSForConditionalGeneration, STTSProcessor
from stts_hf.training.checkpointing import last_checkpoint
from tests.checkpoints import TINY
from tests.stts_hf.training.runs import Rows, logged, trainer
from tests.tiny import tiny_model

EVERY_STEP: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    trainer(folder, max_steps=3, **EVERY_STEP).train()
    return folder


@pytest.fixture
def run_folder(finished, tmp_path) -> Path:
    return shutil.copytree(finished, tmp_path, dirs_exist_ok=True)


def test_a_folder_that_was_cut_off_is_passed_over(run_folder, caplog):
    (run_folder / "checkpoint-3" / "trainer_state.json").unlink()
    (run_folder / "checkpoint-77").write_text("a file")
    run = trainer(run_folder, max_steps=4)
    run.train(resume_from_checkpoint=True)
    assert len(logged(run, "loss")) == 4
    assert last_checkpoint(run_folder) == str(run_folder / "checkpoint-2")


@pytest.mark.parametrize("damage", ["trainer_state.json", "optimizer.pt", "scheduler.pt"])
def test_what_is_missing_is_found(run_folder, damage):
    last = run_folder / "checkpoint-3" / damage
    last.write_text('{"global_') if last.suffix == ".json" else last.unlink()
    assert last_checkpoint(run_folder) == str(run_folder / "checkpoint-2")


@pytest.mark.parametrize("name", ["optimizer.bin", "optimizer_0/", "global_step3/"], ids=["FSDP", "FSDP2", "DeepSpeed"])
def test_other_forms_of_the_optimizers_state_are_known(run_folder, name):
    last = run_folder / "checkpoint-3"
    (last / "optimizer.pt").unlink()
    (last / name).mkdir() if name.endswith("/") else (last / name).touch()
    assert last_checkpoint(run_folder) == str(last)


def test_a_named_checkpoint_without_its_optimizer_is_refused(tmp_path):
    trainer(tmp_path, max_steps=1, save_only_model=True, **EVERY_STEP).train()
    with pytest.raises(ValueError, match=r"is not a complete checkpoint: it has no optimizer\.pt.*save_only_model"):
        trainer(tmp_path, max_steps=2).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_no_checkpoint_is_an_error_only_for_a_resumed_run(tmp_path):
    assert last_checkpoint(tmp_path / "absent") is last_checkpoint(tmp_path) is None
    with pytest.raises(ValueError, match="holds no complete checkpoint"):
        trainer(tmp_path).train(resume_from_checkpoint=True)


def test_an_error_while_a_step_is_saved_again_leaves_no_mixed_checkpoint(run_folder, monkeypatch):
    run = trainer(run_folder, max_steps=3, **EVERY_STEP)
    monkeypatch.setattr(run, "_save_rng_state", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.train(resume_from_checkpoint=str(run_folder / "checkpoint-2"))
    assert last_checkpoint(run_folder) == str(run_folder / "checkpoint-2")


@pytest.mark.parametrize(
    "adapter", [pytest.param(False, id="whole model"), pytest.param(True, id="adapter", marks=pytest.mark.slow)]
)
def test_an_error_amid_the_save_at_the_end_leaves_what_was_there(tmp_path, monkeypatch, adapter):
    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=[r"q_proj"])) if adapter else tiny_model()
    run = trainer(tmp_path, model=model, processing_class=STTSProcessor.from_pretrained(TINY), max_steps=1)
    run.train()
    run.save_model()
    (tmp_path / "notes.txt").write_text("mine")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    config, weights = ("adapter_config.json", "adapter_model") if adapter else ("config.json", "model")
    expected = {config, f"{weights}.safetensors", "processor_config.json", "training_args.bin", "README.md"}
    assert expected <= before.keys()
    for parameter in run.model.parameters():
        parameter.data += 1
    with monkeypatch.context() as patch:
        patch.setattr(STTSProcessor, "save_pretrained", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run.save_model()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    run.save_model()
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert after.keys() == before.keys()
    assert after[f"{weights}.safetensors"] != before[f"{weights}.safetensors"]
    assert after["notes.txt"] == b"mine"


@pytest.mark.slow
def test_the_best_checkpoint_is_kept_and_loaded(tmp_path):
    options: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "load_best_model_at_end": True,
        "save_total_limit": 1,
    }
    rates = {"vision_tower": 0.1, "language_model": 1.0}  # every step makes it worse, so that the first is the best
    run = trainer(tmp_path, eval_dataset=Rows(), learning_rates=rates, max_steps=3, **options, **EVERY_STEP)
    run.train()
    losses = logged(run, "eval_loss")
    best = tmp_path / f"checkpoint-{1 + losses.index(min(losses))}"
    assert run.state.best_model_checkpoint == str(best)
    state = json.loads((best / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(best)
    loaded = STTSForConditionalGeneration.from_pretrained(best)
    assert best.name != "checkpoint-3"  # else there would be nothing to load
    for (name, expected), found in zip(loaded.named_parameters(), run.model.parameters(), strict=True):
        assert torch.equal(found, expected), name
