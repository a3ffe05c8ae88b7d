"""`STTSSFTTrainer` on TRL's SFTTrainer, the real one."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from stts_hf import STTSDataCollator, load_rows
from stts_hf.checkpoints.families import family_of_checkpoint
from stts_hf.checkpoints.loading import load_processor
from stts_hf.model_parts import SCORER, module_of
from tests.checkpoints import ALL_TINIES, EVERY
from tests.stts_hf.training.samples import text_row, video_row
from tests.tiny import randomise

trl = pytest.importorskip("trl")
sft = pytest.importorskip("stts_hf.training.sft")

PARTS = ("language_model", "vision_tower", "connector", "scorer")
RATE = 1e-2
COMMON: dict[str, Any] = {
    "max_steps": 1,
    "per_device_train_batch_size": 4,
    "optim": "sgd",
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0,
    "logging_steps": 1,
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
}


@pytest.fixture(scope="module")
def rows(media):
    """Videos of different lengths, a picture, and text alone, so that every row loses another number of tokens."""
    import datasets

    return load_rows(
        datasets.Dataset.from_list(
            [
                video_row("two", media / "two.mp4", "Yes."),
                video_row("three", media / "three.mp4", "A red ball on a long green line."),
                text_row("text") | {"videos": None},
                video_row("five", media / "five.mkv", "Nothing."),
            ]
        )
    )


@pytest.fixture(scope="module", params=EVERY)
def model(request):
    """The tiny checkpoint of a backbone with a random scorer, which is not sure of clips of another kind."""
    folder = ALL_TINIES[request.param]
    model: Any = family_of_checkpoint(folder).model.from_pretrained(folder, scorer_target="change")
    randomise(module_of(model, SCORER))
    return model.train()


@pytest.fixture(scope="module")
def processor(model):
    return load_processor(model.name_or_path)


@pytest.fixture
def collator(processor, model):
    return STTSDataCollator(processor, model_config=model.config, return_ids=True)


def train_ours(model, rows, processor, output: Path, **options: Any):
    arguments = sft.STTSSFTConfig(output_dir=str(output), learning_rates=dict.fromkeys(PARTS, RATE), **COMMON | options)
    trainer = sft.STTSSFTTrainer(model, arguments, train_dataset=rows, processing_class=processor)
    trainer.train()
    return trainer


def first_log(trainer) -> dict[str, float]:
    return next(entry for entry in trainer.state.log_history if "loss" in entry)


def test_it_trains_as_the_models_own_loss(model, rows, processor, collator, tmp_path):
    batch = collator([rows[index] for index in range(4)])
    batch = {name: value for name, value in batch.items() if name not in ("sample_ids", "skipped_ids")}
    expected = copy.deepcopy(model)
    routed = hasattr(model.config.text_config, "output_router_logits")  # of experts, whose loss TRL turns on
    outputs = expected(**batch, **{"output_router_logits": True} if routed else {})
    outputs.loss.backward()
    with torch.no_grad():
        for parameter in expected.parameters():
            if parameter.grad is not None:
                parameter -= RATE * parameter.grad
    trainer = train_ours(copy.deepcopy(model), rows, processor, tmp_path)
    assert isinstance(trainer, trl.SFTTrainer)
    # Sums in another order of rows, on a loss of about 8.
    assert first_log(trainer)["loss"] == pytest.approx(outputs.loss.item(), abs=1e-4)
    for (name, found), wanted in zip(trainer.model.named_parameters(), expected.parameters(), strict=True):
        # A hundredth of gradients of order 1: float32 rounding of sums of another order.
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5, msg=name)
    assert outputs.temporal_loss > 0


REFUSED = [("packing", True), ("padding_free", True), ("loss_type", "dft")]


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=[name for name, _ in REFUSED])
def test_what_knows_nothing_of_dropped_tokens_is_refused(name, value, tmp_path):
    with pytest.raises(ValueError, match=f"`{name}` must be"):
        sft.STTSSFTConfig(output_dir=str(tmp_path), use_cpu=True, **{name: value})
