"""`push_to_hub` of model, processor and `Trainer`, with the real client to a Hub on loopback."""

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import Trainer, TrainingArguments

from stts_hf import STTSForConditionalGeneration, STTSProcessor
from stts_hf.checkpoints.families import OWN
from stts_hf.checkpoints.trainer_card import ModelCardTrainerMixin
from tests.checkpoints import TINY, load_tiny, prepare
from tests.stts_hf.checkpoints.pushing import client_of, contents, without_card, write_files

SAVED = contents(TINY).keys() - {"contact_sheet.webp"}  # without the picture of the card

PARTS: dict[str, Any] = {"model": STTSForConditionalGeneration, "processor": STTSProcessor}


@pytest.mark.parametrize(("how", "order"), [("push_to_hub", "processor,model"), ("save_pretrained", "model,processor")])
def test_push_to_hub_of_model_and_processor_gives_a_whole_repository(hub, tmp_path, sharded, how, order):
    folder = write_files(tmp_path / "tiny", contents(sharded))
    with client_of(hub, tmp_path / "home"):
        for part in order.split(","):
            loaded = PARTS[part].from_pretrained(folder)
            if how == "push_to_hub":
                loaded.push_to_hub("user/tiny")
            else:
                loaded.save_pretrained(f"{folder}-saved/tiny", push_to_hub=True, repo_id="user/tiny")
    files = hub.files("user/tiny")
    assert without_card(files).keys() == SAVED
    code = {name: content for name, content in files.items() if name.endswith(".py")}
    assert code == {name: content for name, content in contents(TINY).items() if name.endswith(".py")}
    card: Any = ModelCard(files["README.md"].decode())
    assert set(OWN["stts"].tags) <= set(card.data.tags)


class CardTrainer(ModelCardTrainerMixin, Trainer):
    """A plain trainer that writes cards."""


def train(clip: Path, output: Path, strategy: str, kind: str) -> dict[str, torch.Tensor]:
    """Two steps, pushed as `strategy` says; returns the weights."""
    inputs = prepare(clip)
    labels = inputs["input_ids"].where(inputs["input_ids"] < 1024, -100)
    arguments = TrainingArguments(
        str(output),
        max_steps=2,
        save_steps=1,
        report_to="none",
        use_cpu=True,
        remove_unused_columns=False,
        disable_tqdm=True,
        push_to_hub=True,
        hub_model_id="user/trained",
        hub_strategy=strategy,
        hub_always_push=True,
    )
    trainer = {"plain": Trainer, "card": CardTrainer}[kind](
        STTSForConditionalGeneration.from_pretrained(TINY),
        arguments,
        train_dataset=[dict(inputs, labels=labels)] * 2,
        data_collator=lambda samples: samples[0],
        processing_class=STTSProcessor.from_pretrained(TINY),
    )
    trainer.train()
    if strategy == "end":
        trainer.push_to_hub()
    else:
        trainer._finish_current_push()
    assert trainer.model is not None
    return trainer.model.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "kind"), [("end", "card"), ("checkpoint", "plain")])
def test_trainer_pushes_a_whole_repository(hub, tmp_path, clip, strategy, kind):
    output = tmp_path / "run"
    with client_of(hub, tmp_path / "home"):
        trained = train(clip, output, strategy, kind)
    files = hub.files("user/trained")
    assert files.keys() >= SAVED
    folder = write_files(tmp_path / "downloaded", files)
    assert all(torch.equal(tensor, trained[name]) for name, tensor in load_tiny(folder).state_dict().items())
    if strategy == "end":
        card: Any = ModelCard(files["README.md"].decode())
        assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "video-text-to-text")
        assert {"stts", "generated_from_trainer"} <= set(card.data.tags)
        assert "| `pruning_layer` | 1 " in card.text
        assert "learning_rate" in card.text
    else:
        last = folder / "last-checkpoint"  # training can be resumed from it
        assert {*SAVED, "optimizer.pt", "trainer_state.json"} <= contents(last).keys()
