"""The way from a configuration and its rows to the first gradient: everything on it is done once."""

from collections import Counter
from typing import Any

import pytest
from transformers import TrainerCallback

from stts_hf import STTSProcessor
from stts_hf.data import preparing, rows
from stts_hf.training.build import load_model, make_trainer, prepare
from stts_hf.training.config import load_config
from tests.stts_hf.training.runs import KeepGradients
from tests.training_files import row, write_config, write_rows


@pytest.fixture
def counted(monkeypatch) -> Counter[str]:
    """How often a row is parsed and a template rendered, from here on."""
    counts: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            counts[name] += 1
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    count(STTSProcessor, "apply_chat_template")
    count(rows, "_read")
    count(preparing, "check_files")
    return counts


class Watch(TrainerCallback):
    """Counts as they are when the optimizer is about to take its first step."""

    def __init__(self, counts: Counter[str]):
        self.counts, self.found = counts, Counter[str]()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.found = self.counts.copy()


@pytest.mark.parametrize("packing", [["--pack_to=300"], []], ids=" ".join)
def test_a_row_is_parsed_and_rendered_before_training_alone(packing, data, undecided, tmp_path, counted):
    one = write_rows(data.parent, [row(0)], f"{tmp_path.name}.jsonl")
    config = write_config(tmp_path, one, tmp_path / "out", model=undecided)
    setup = prepare(load_config(config, packing), progress=False)
    trainer = make_trainer(setup, load_model(setup))
    watch, gradients = Watch(counted), KeepGradients()
    trainer.add_callback(watch)
    trainer.add_callback(gradients)
    trainer.train()
    # One rendering checks the template when it is loaded, two make the prompt.
    assert watch.found == {"apply_chat_template": 3, "_read": 1, "check_files": 1}
    assert gradients.gradients["model.vision_tower.scorer.score_layer.weight"].abs().max() > 0
