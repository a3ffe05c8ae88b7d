"""A resumed run goes on as if it had never stopped, bit for bit on the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments

from stts_hf.training.checkpointing import accept_saved_names
from tests.stts_hf.training.runs import Rows, logged, trainer, without_ids
from tests.tiny import tiny_config, tiny_model

STEPS = 7
# 14 rows in micro-batches of one: an epoch is 4 steps of 4, 4, 4 and 2 micro-batches, so 7 steps are two epochs.
SCHEDULE: dict[str, Any] = {
    "max_steps": STEPS,
    "gradient_accumulation_steps": 4,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "learning_rates": {"scorer": 1e-2, "language_model": 1e-3},
    "save_strategy": "steps",
    "save_steps": 1,
}
NOT_REPEATED = ("_per_second", "_runtime")  # times


def history(run) -> list[dict[str, float]]:
    """What was logged at each step, without times."""
    logs = [logs for logs in run.state.log_history if "loss" in logs]
    return [{k: v for k, v in step.items() if not k.endswith(NOT_REPEATED)} for step in logs]


def noisy_model(seed: int) -> Any:
    """A model that draws random numbers in every step: a random selector, and dropout."""
    text = {"attention_dropout": 0.1}
    return tiny_model(tiny_config(selector="random", text_overrides=text), seed=seed)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> tuple[Any, Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("run")
    options = {**SCHEDULE, "dataloader_num_workers": 2}
    run = trainer(folder, model=noisy_model(0), data=Rows(length=14), **options)
    run.train()
    return run, folder, options


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 4], ids=["within_an_epoch", "between_epochs"])
def test_a_resumed_run_repeats_the_uninterrupted(uninterrupted, step):
    whole, folder, options = uninterrupted
    torch.manual_seed(99)
    run = trainer(folder, model=noisy_model(1), data=Rows(length=14), **options)
    run.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
    assert len(history(run)) == STEPS
    assert history(run) == history(whole)
    for (name, weight), other in zip(whole.model.named_parameters(), run.model.parameters(), strict=True):
        assert torch.equal(weight, other), name


def test_names_of_saved_files_are_accepted_where_they_are_renamed(tmp_path):
    """Molmo2's files have other names than its modules, and fuse several weights in one."""
    saved, model = tiny_model(seed=0), tiny_model(seed=1)
    saved.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="accept_saved_names"):  # else the model would silently keep its weights
        model.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    accept_saved_names(model)
    parameters = list(model.parameters())
    model.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    for (name, expected), found, before in zip(saved.named_parameters(), model.parameters(), parameters, strict=True):
        assert torch.equal(found, expected), name
        assert found is before  # what an optimizer holds


@pytest.mark.slow
def test_plain_trainer_resumes_with_the_weights_it_saved(tmp_path):
    settings: dict[str, Any] = {"use_cpu": True, "logging_steps": 1, "report_to": "none", "max_steps": 4}
    settings |= {"remove_unused_columns": False, "learning_rate": 1e-2, "save_steps": 2, "disable_tqdm": True}
    runs = []
    for seed, resume in ((0, None), (1, str(tmp_path / "checkpoint-2"))):
        args = TrainingArguments(output_dir=str(tmp_path), per_device_train_batch_size=2, **settings)
        model = tiny_model(seed=seed)
        accept_saved_names(model)
        runs.append(Trainer(model, args, without_ids, Rows(length=8)))
        runs[-1].train(resume_from_checkpoint=resume)
    assert logged(runs[1], "loss") == logged(runs[0], "loss")
