"""The temporal loss alone: whose gradient it is, what runs and what changes for it, and what does not go with it."""

import re
from typing import Any

import pytest
import torch

from stts_hf.model_parts import LANGUAGE_MODEL, PARTS, SCORER, module_of, parts_of
from stts_hf.modeling.plan_stts import TowerCache
from stts_hf.training.scorer_alone import StateCache, score_videos
from tests.backbones import BACKBONES, LATER, Clip
from tests.modeling.reference import assert_gradients_equal, gradients
from tests.stts_hf.training.runs import BESIDE, KeepGradients, Rows, collate, logged, trainer, without_ids
from tests.tiny import Video, tiny_config, tiny_model

FROZEN = [part for part in PARTS if part != SCORER]
ALONE: dict[str, Any] = {"scorer_only": True, "freeze": FROZEN}
VIDEOS = Rows([[3, Video(2), 2], [3, Video(5), 30], [2, Video(3), 7]])


def scorer_gradients(model: Any, loss: Any) -> dict[str, torch.Tensor]:
    return {name: gradient for name, gradient in gradients(model, loss).items() if ".scorer." in name}


def modules_that_give(model: Any) -> list[str]:
    """A list that fills with the names of the modules that return a tensor of anything."""
    names: list[str] = []

    def note(name: str, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.numel():
            names.append(name)

    for name, module in model.named_modules():
        module.register_forward_hook(lambda *given, name=name: note(name, given[-1]))
    return names


@pytest.mark.parametrize("backbone", [*BACKBONES, *LATER], ids=lambda backbone: backbone.name)
def test_loss_and_gradients_are_those_of_the_whole_model(backbone):
    model = backbone.model(pruning_ratio=0.5).train()
    inputs = backbone.batch([[3, Clip(3), 4], [2, Clip(4), 3]], "left")
    whole = model(**inputs).temporal_loss
    expected = scorer_gradients(model, whole)
    alone = score_videos(model, inputs).temporal_loss
    torch.testing.assert_close(alone, whole, rtol=1e-6, atol=0)
    assert_gradients_equal(scorer_gradients(model, alone), expected)
    assert max(gradient.abs().max() for gradient in expected.values()) > 1e-3


@pytest.mark.parametrize("backbone", [*BACKBONES, *LATER], ids=lambda backbone: backbone.name)
def test_layers_run_once_for_a_row_where_there_is_room(backbone):
    model = backbone.model().train()
    parts = parts_of(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parts[name] == SCORER)
    rows: Any = [[3, Clip(3), 4, Clip(2)], [5], [2, Clip(4), 3]]
    keys, batch, last = ["a", "text", "b"], backbone.batch(rows, "left"), backbone.alone(rows)[2]
    expected = [scorer_gradients(model, score_videos(model, given).temporal_loss) for given in (batch, last)]
    states, full = StateCache(1.0), StateCache(1e-9)
    for cache in (states, full):
        score_videos(model, batch, cache, keys)
    assert [list(cache.rows) for cache in (states, full)] == [keys, ["text"]]
    called = modules_that_give(model)
    found = [score_videos(model, *given).temporal_loss for given in ((batch, states, keys), (last, states, ["b"]))]
    assert not [name for name in called if re.search(r"\.(?:layers?|blocks)\.\d+\b", name)]
    for loss, gradient in zip(found, expected, strict=True):
        assert_gradients_equal(scorer_gradients(model, loss), gradient)


def test_states_that_hold_more_than_blocks_are_cut_by_frames():
    """A class token in each frame of 3 blocks of 4 patches: 13 places a frame; videos of 2 and 3 frames in two rows."""
    states, cache = StateCache(1.0), TowerCache()
    cache.states = {0: torch.randn(5 * 13, 8)}
    states.write(["a", "b"], [[0], [1]], cache, [2 * 3, 3 * 3])
    assert torch.equal(states.read(["b", "a"], torch.device("cpu"))[0], cache.states[0].roll(-2 * 13, 0))


@pytest.mark.parametrize("backbone", [*BACKBONES, *LATER], ids=lambda backbone: backbone.name)
def test_nothing_runs_but_the_tower_up_to_its_layer(backbone):
    model = backbone.model(pruning_ratio=0.5).train()
    called = modules_that_give(model)
    score_videos(model, backbone.batch([[3, Clip(3), 4]], "left"))
    of = {name.rpartition(".")[0]: part for name, part in parts_of(model).items()}
    assert {of[name] for name in called if name in of} == {"vision_tower", "scorer"}
    layers = {int(found[1]) for name in called if (found := re.search(r"\.(?:layers?|blocks)\.(\d+)\b", name))}
    assert layers == set(range(model.config.vision_config.pruning_layer + 1))


def test_the_trainers_gradients_are_those_of_the_whole_model(tmp_path):
    """Of four rows, one of them text alone, and of different numbers of blocks."""
    kept, rows = KeepGradients(), Rows()
    options: dict[str, Any] = {"max_steps": 1, "train_sampling_strategy": "sequential", "max_grad_norm": 0}
    sizes: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    run = trainer(tmp_path, model=tiny_model(), **ALONE, **options, **sizes)
    run.add_callback(kept)
    run.train()
    model = tiny_model().train()
    batch = without_ids([rows[index] for index in range(4)])
    assert_gradients_equal(kept.gradients, scorer_gradients(model, model(**batch).temporal_loss))


@pytest.mark.slow
def test_it_falls_and_nothing_else_changes(tmp_path):
    """Of batches without labels; the language model is never called, in training and evaluation."""
    model = tiny_model(tiny_config(model_overrides={"temporal_loss_weight": 0.5}), trained_scorer=False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    called: list[Any] = []
    module_of(model, LANGUAGE_MODEL).register_forward_hook(lambda *_: called.append(_))

    def videos_alone(items: Any) -> dict[str, Any]:
        return {name: value for name, value in collate(items).items() if name in (*BESIDE, "sample_ids")}

    options: dict[str, Any] = {"max_steps": 25, "per_device_train_batch_size": 3, "learning_rates": {"scorer": 3e-3}}
    run = trainer(
        tmp_path, model=model, data=VIDEOS, data_collator=videos_alone, **ALONE, eval_dataset=VIDEOS, **options
    )
    run.train()
    losses = logged(run, "temporal_loss")
    assert losses[-1] < 0.2 * losses[0]
    assert logged(run, "loss") == pytest.approx([0.5 * loss for loss in losses], rel=1e-5)
    names = {name for logs in run.state.log_history for name in logs}
    assert {"mean_score", "video_tokens_per_second"} < names
    assert not names & {"task_loss", "kept_share"}
    evaluated = run.evaluate()
    assert called == []
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if ".scorer." in name}
    with torch.no_grad():
        whole = model.eval()(**without_ids([VIDEOS[index] for index in range(3)]))
    assert evaluated["eval_temporal_loss"] == pytest.approx(whole.temporal_loss.item(), rel=1e-5)
    assert evaluated["eval_loss"] == pytest.approx(0.5 * whole.temporal_loss.item(), rel=1e-5)
    assert len(called) == 1  # the model's own call is its own again


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({"selector": "cosine"}, {}, "`selector` is 'cosine'"),
        ({"model_overrides": {"temporal_loss_weight": 0.0}}, {}, "`temporal_loss_weight` is 0"),
    ],
    ids=["cosine", "no_weight"],
)
def test_what_does_not_go_with_it(tmp_path, config, options, message):
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, model=tiny_model(tiny_config(**config)), **ALONE | options)
