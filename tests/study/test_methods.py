"""Every method trains with `STTSTrainer`, answers with `generate`, and spends what the others spend."""

from pathlib import Path
from typing import Any

import pytest
import torch

from examples.study.methods import FROZEN, METHODS, all_methods, load_method
from examples.study.study import Run, Settings, evaluations, plan
from stts_hf.modeling.selectors_stts import SELECTORS, Selector, by_change
from tests.stts_hf.training.runs import Rows, trainer
from tests.tiny import Part, Video, build_inputs, tiny_model

ROWS: list[list[Part]] = [[3, Video(20), 5], [2, Video(1), 3, Video(6), 2]]
NOT_OF_THE_RATIO = ("none", "none-inference", "text-only")
TRAINED = [name for name, method in METHODS.items() if method.trained]
OF_THE_RATIO = [name for name in METHODS if name not in NOT_OF_THE_RATIO]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_model().save_pretrained(folder)
    return folder


def answer(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    return model.generate(**inputs, max_new_tokens=4, do_sample=False, eos_token_id=None)


@pytest.mark.parametrize(
    "name",
    [name if name in ("stts-answers", "tome") else pytest.param(name, marks=pytest.mark.study) for name in TRAINED],
)
def test_a_method_trains_with_drawn_ratios_and_answers(checkpoint, tmp_path, name):
    model = load_method(name, checkpoint, 0.5)
    model.config.worth_unit = 1e-3  # as after `scorer_only`
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    draws: dict[str, Any] = {} if name in NOT_OF_THE_RATIO else {"pruning_ratio_range": [0.1, 0.95], "num_masks": 4}
    run = trainer(
        tmp_path, model=model, data=Rows(ROWS), max_steps=1, per_device_train_batch_size=2, learning_rate=1e-3, **draws
    )
    run.train()
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert "lm_head.weight" in changed
    assert any("vision_tower.layers" in name for name in changed) == (name != "text-only")
    assert any("scorer" in name for name in changed) == name.startswith("stts")
    run.save_model(str(tmp_path / "trained"))

    model = load_method(name, tmp_path / "trained", 0.5)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), run.model.parameters(), strict=True))
    inputs = build_inputs(ROWS)
    assert torch.equal(answer(model, inputs), answer(model, inputs))


@pytest.mark.parametrize("ratio", [0.0, 0.9])
def test_all_methods_hand_equally_many_tokens_to_the_language_model(checkpoint, ratio):
    inputs = build_inputs(ROWS)
    found = set()
    for name in OF_THE_RATIO:
        model = load_method(name, checkpoint, ratio)
        with torch.no_grad():
            output = model(**inputs)
        kept = tuple(int(mask.sum()) for mask in output.keep_mask)
        found.add((kept, (output.kept_indices >= 0).sum(-1).tolist()[0], output.logits.shape[1]))
    assert len(found) == 1


def test_no_two_methods_keep_the_same_blocks(checkpoint):
    inputs = build_inputs(ROWS)
    masks = {}
    for name in ("random", "cosine", "stts", "tome"):
        with torch.no_grad():
            masks[name] = load_method(name, checkpoint, 0.5)(**inputs).keep_mask[0]
    names = list(masks)
    assert all(not torch.equal(masks[a], masks[b]) for a in names for b in names if a < b)


def test_only_the_temporal_loss_is_missing_without_it(checkpoint):
    inputs = build_inputs(ROWS, labels=True)
    with torch.no_grad():
        whole, without = (load_method(name, checkpoint, 0.5)(**inputs) for name in ("stts", "stts-no-temporal"))
    assert torch.equal(whole.logits, without.logits)
    assert without.loss == without.task_loss == whole.task_loss
    assert whole.loss > whole.task_loss


def test_a_scorer_that_a_checkpoint_lacks_is_drawn_by_the_seed(checkpoint, tmp_path):
    model = tiny_model()
    state = {name: tensor for name, tensor in model.state_dict().items() if "scorer" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    drawn = [load_method("stts", tmp_path, 0.5, seed=seed).state_dict() for seed in (0, 0, 1)]
    name = "model.vision_tower.scorer.hidden_layer.weight"
    assert torch.equal(drawn[0][name], drawn[1][name])
    assert not torch.equal(drawn[0][name], drawn[2][name])


def test_a_selector_that_is_registered_is_two_methods_with_runs(monkeypatch):
    monkeypatch.setitem(SELECTORS, "last", Selector(by_change))
    found = all_methods()
    assert found.keys() - METHODS.keys() == {"last", "last-inference"}
    monkeypatch.setattr("examples.study.study.METHODS", found)
    settings = Settings(dataset="d", base="b", base_layer=3, seeds=(0,))
    assert [run.name for run in plan(settings, ["last"])] == ["last-layer3-seed0"]
    assert {one.method for one in evaluations(Run(FROZEN, 3, 0), settings)} >= {"last-inference", "cosine-inference"}
