"""The examples, run as they are, with the real libraries, on tiny data."""

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoProcessor

from stts_hf import STTSForConditionalGeneration, STTSProcessor
from stts_hf.cli.main import main
from tests.checkpoints import (
    ALL_TINIES,
    QWENS,
    TINIES,
    TINY,
    load_tiny,
    logits_of,
    needs_num2words,
    prepare,
    weights_of,
)
from tests.conftest import REPOSITORY
from tests.preloaded import preloaded
from tests.training_files import train, write_data

EXAMPLES = REPOSITORY / "examples"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"), clips=2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """The tiny checkpoint, with a processor that shows 2 frames."""
    folder = tmp_path_factory.mktemp("checkpoint")
    STTSForConditionalGeneration.from_pretrained(TINY, scorer_target="change").save_pretrained(folder)
    processor = STTSProcessor.from_pretrained(TINY)
    processor.video_processor.num_frames = 2
    processor.save_pretrained(folder)
    return folder


@pytest.fixture
def run_example(monkeypatch, checkpoint, data, tmp_path):
    """Runs an example for one step; returns its globals and the output folder."""

    def run(name: str, model: Path = checkpoint) -> tuple[dict[str, Any], Path]:
        output = tmp_path / "out"
        monkeypatch.setattr(sys, "argv", [name, str(model), str(data), str(output), "1"])
        return runpy.run_path(str(EXAMPLES / name), run_name="__main__"), output

    return run


@pytest.fixture(scope="module")
def environment() -> Iterator[dict[str, str]]:
    with preloaded(os.environ) as environment:
        yield environment


@pytest.mark.slow
@pytest.mark.parametrize("name", ["finetune.py", "finetune_lora.py", "finetune_trl.py"])
def test_an_example_runs_in_a_process_of_its_own(name, environment, checkpoint, data, tmp_path):
    """In this process the Auto classes are registered already, so that transformers would not ask for them."""
    command = ["python", str(EXAMPLES / name), str(checkpoint), str(data), str(tmp_path / "out"), "1"]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "custom code" not in done.stdout + done.stderr


def losses(names: dict[str, Any]) -> list[float]:
    return [entry["loss"] for entry in names["trainer"].state.log_history if "loss" in entry]


def test_plain_trainer(run_example, data):
    names, output = run_example("finetune.py")
    assert type(names["trainer"]).__module__ == "transformers.trainer"
    assert len(losses(names)) == 1
    assert [group["initial_lr"] for group in names["optimizer"].param_groups] == [1e-5, 5e-6, 5e-6, 1e-4]
    trained = sum(parameter.numel() for group in names["optimizer"].param_groups for parameter in group["params"])
    assert trained == sum(parameter.numel() for parameter in names["model"].parameters())
    assert main(["doctor", str(output)]) == 0


@pytest.mark.slow
def test_trl(run_example, checkpoint, data):
    trl = pytest.importorskip("trl")
    peft = pytest.importorskip("peft")
    names, output = run_example("finetune_trl.py")
    trainer = names["trainer"]
    assert isinstance(trainer, trl.SFTTrainer)
    assert isinstance(trainer.model, peft.PeftModel)
    [entry] = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert entry["loss"] == pytest.approx(entry["task_loss"] + entry["temporal_loss"], rel=1e-4)
    assert entry["temporal_loss"] > 0
    reloaded = peft.PeftModel.from_pretrained(load_tiny(checkpoint), output).eval()
    inputs = prepare(data.parent / "clip_0.mp4", checkpoint)
    # TRL's forward is no other: only its head's loss is, which is not used.
    assert torch.equal(logits_of(reloaded, inputs), logits_of(trainer.model.eval(), inputs))
    assert AutoProcessor.from_pretrained(output, trust_remote_code=True).video_processor.num_frames == 2


@pytest.mark.slow
@needs_num2words
def test_adapters_of_a_text_model_that_is_called_otherwise(run_example):
    names, _ = run_example("finetune_lora.py", ALL_TINIES["smolvlm"])
    assert any("text_model" in name and "lora_" in name for name, _ in names["model"].named_parameters())


@pytest.mark.parametrize("backbone", QWENS)
def test_another_backbone(run_example, backbone):
    """By nothing but its folder."""
    names, output = run_example("finetune.py", TINIES[backbone])
    assert len(losses(names)) == 1
    assert weights_of(output).keys() == weights_of(TINIES[backbone]).keys()
    assert main(["doctor", str(output)]) == 0


@pytest.mark.slow
def test_smoke_configuration(monkeypatch, tmp_path, capsys):
    names = runpy.run_path(str(EXAMPLES / "make_smoke_data.py"))
    rows = names["make_smoke_data"](tmp_path / "data", clips=2)
    few = ["--max_steps=1", "--num_frames=2", f"--output_dir={tmp_path / 'out'}"]
    assert run_config("smoke.yaml", TINY, rows, few) == 0
    assert main(["doctor", str(tmp_path / "out")]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["paper.yaml", "lora.yaml", "scorer_only.yaml", "scorer_start.yaml"])
def test_configurations_for_gpus(name, checkpoint, data, tmp_path):
    """The shipped file but for what a CPU and two clips ask for."""
    output = tmp_path / "out"
    here = [
        f"--output_dir={output}",
        "--max_steps=1",
        "--gradient_accumulation_steps=1",
        "--dataloader_num_workers=0",
        "--use_cpu=true",
        "--num_frames=2",
    ]
    if name.startswith("scorer"):
        make_smoke_data = runpy.run_path(str(EXAMPLES / "make_smoke_data.py"))["make_smoke_data"]
        data = make_smoke_data(tmp_path / "data", clips=2).parent / "unlabelled.jsonl"
    if name == "scorer_only.yaml":
        here.append("--max_answer_tokens=4")
    assert run_config(name, checkpoint, data, here) == 0
    log = json.loads((output / "trainer_state.json").read_text())["log_history"]
    assert log[0]["worth_loss" if name == "scorer_only.yaml" else "temporal_loss"] > 0
    if name == "lora.yaml":
        assert (output / "adapter_model.safetensors").is_file()
    else:
        assert weights_of(output).keys() == weights_of(checkpoint).keys()


def run_config(name: str, model: Path, rows: Path, overrides: list[str]) -> int:
    overrides = [f"--model_name_or_path={model}", f"--train_data={rows}", *overrides]
    return train(EXAMPLES / "configs" / name, *overrides)
