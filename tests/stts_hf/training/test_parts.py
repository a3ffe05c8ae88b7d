"""The learning rate of a part, and frozen parts."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from stts_hf.model_parts import PARTS, parts_of
from stts_hf.training.arguments import is_adapter
from tests.stts_hf.training.runs import arguments, trainer
from tests.tiny import tiny_model

LORA: dict[str, Any] = {"r": 2, "target_modules": r".*language_model.*\.q_proj"}


def rates(run) -> dict[str, set[float]]:
    """Learning rates that the optimizer gives to the parameters of each part."""
    names, parts = {id(parameter): name for name, parameter in run.model.named_parameters()}, parts_of(run.model)
    found: dict[str, set[float]] = {}
    for group in run.create_optimizer().param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            found.setdefault("adapter" if is_adapter(name) else parts[name], set()).add(group["lr"])
    return found


def test_rates_are_the_papers_but_for_the_language_models(tmp_path):
    papers = {"language_model": {1e-5}, "vision_tower": {5e-6}, "connector": {5e-6}, "scorer": {1e-4}}
    assert rates(trainer(tmp_path)) == papers
    run = trainer(tmp_path, learning_rate=2e-5)
    assert rates(run) == papers | {"language_model": {2e-5}}
    run.train()
    assert run.state.log_history[0]["learning_rate"] == 2e-5
    assert arguments(tmp_path, learning_rates={"language_model": 3e-5}).learning_rate == 3e-5


@pytest.mark.parametrize(("given", "expected"), [({}, 1e-5), ({"adapter": 2e-4}, 2e-4)], ids=["its_parts", "its_own"])
def test_rate_of_adapters(tmp_path, given, expected):
    model = get_peft_model(tiny_model(), LoraConfig(modules_to_save=["scorer"], **LORA))
    assert rates(trainer(tmp_path, model=model, learning_rates=given)) == {"adapter": {expected}, "scorer": {1e-4}}


@pytest.mark.parametrize("parts", [["scorer"], ["vision_tower", "connector"]], ids="_".join)
def test_frozen_parts_stay_and_the_others_learn(tmp_path, parts):
    run = trainer(tmp_path, freeze=parts, learning_rates=dict.fromkeys(PARTS, 1e-3))
    before = {name: parameter.detach().clone() for name, parameter in run.model.named_parameters()}
    run.train()
    parts_by_name = parts_of(run.model)
    changed = {parts_by_name[n] for n, p in run.model.named_parameters() if not torch.equal(p.detach(), before[n])}
    assert changed == set(PARTS) - set(parts)


@pytest.mark.parametrize(
    ("part", "options"),
    [("language_model", {}), ("scorer", {"modules_to_save": ["scorer"]})],
    ids=["adapted", "saved_in_full"],
)
def test_freezing_what_peft_trains_is_refused(tmp_path, part, options):
    model = get_peft_model(tiny_model(), LoraConfig(**LORA, **options))
    with pytest.raises(ValueError, match=f"`freeze` freezes '{part}', but PEFT trains 'base_model"):
        trainer(tmp_path, model=model, freeze=[part])


def test_settings_that_are_refused_beside_scorer_only_are_named(tmp_path):
    with pytest.raises(ValueError, match="`scorer_only` freezes 'language_model', but PEFT trains"):
        trainer(tmp_path, model=get_peft_model(tiny_model(), LoraConfig(**LORA)), scorer_only=True)
    with pytest.raises(ValueError, match="Change `freeze` or `scorer_only`"):
        trainer(tmp_path, scorer_only=True, freeze=["scorer"])


def test_a_rate_for_adapters_that_are_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="names 'adapter', but no LoRA is trained"):
        trainer(tmp_path, learning_rates={"adapter": 1e-4}).train()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rates": {"score": 1e-4}}, "names 'score'"),
        ({"learning_rates": {"scorer": "1e-4"}}, "gives 'scorer' the rate '1e-4'"),
        ({"learning_rates": 1e-4}, "must map parts to rates"),
        ({"learning_rates": {"language_model": 1e-4}, "learning_rate": 2e-4}, "Give one of the two"),
        ({"freeze": "scorer"}, r"such as \['scorer'\], not a string"),
        ({"enable_jit_checkpoint": True}, "STTSTrainer itself saves and ends on SIGTERM"),
        ({"label_smoothing_factor": 0.1}, "`label_smoothing_factor` must be left at 0.0, not 0.1"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "_".join(value),
)
def test_arguments_that_cannot_be(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, **options)
