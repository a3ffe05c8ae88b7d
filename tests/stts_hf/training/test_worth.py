"""What blocks are worth: measured losses, drawn masks, the scorer's loss, and a run that finds what matters."""

import copy
import json
from typing import Any

import pytest
import torch

from stts_hf.modeling.scoring_stts import FIRST_LOGIT, block_worth
from stts_hf.training.answer_loss import AnswerLoss
from stts_hf.training.masks import FILES, Masks, MaskStore
from stts_hf.training.worth import AnswersTarget, draw_ratios, draw_scores, measure, measure_unit, worth_loss
from tests.backbones import Clip, Picture, Rows
from tests.modeling.reference import gradients
from tests.stts_hf.training.runs import Rows as TrainingRows
from tests.stts_hf.training.runs import logged, trainer
from tests.tiny import Video, tiny_config, tiny_model

ROWS: Rows = [[3, Clip(4), 5], [2, Clip(3), 3, Clip(2), 9], [6]]
MIXED: Rows = [[2, Picture(), 2, Clip(3), 4], [7], [2, Clip(2), 3, Picture(), 3]]
OPTIONS: dict[str, Any] = {"num_masks": 3, "ratios": (0.3, 0.9)}


def batch_of(backbone, rows: Rows = ROWS, side: str = "left") -> dict[str, Any]:
    """A batch whose first labels nothing predicts, as a collator makes them."""
    inputs = backbone.batch(rows, side)
    inputs["labels"][torch.arange(len(rows)), inputs["attention_mask"].argmax(-1)] = -100
    return inputs


def naive_losses(model: Any, row: dict[str, Any], kind: str, **call: Any) -> float:
    """One row, token by token, in float64: mean KL of the unpruned from the pruned model's, or rise of -log p."""
    labels = row.pop("labels")[0].tolist()
    with torch.no_grad():
        unpruned = model(**row, pruning_ratio=0.0)
        pruned = model(**row, **call)
    column_of = {place: column for column, place in enumerate(pruned.kept_indices[0].tolist())}
    found = []
    for place, label in enumerate(labels):
        if place and label != -100:
            p = unpruned.logits[0, place - 1].double().softmax(-1)
            q = pruned.logits[0, column_of[place] - 1].double().softmax(-1)
            found.append((p * (p / q).log()).sum() if kind == "divergence" else (p[label] / q[label]).log())
    return float(sum(found) / len(found))


@pytest.mark.parametrize("kind", ["divergence", "cross_entropy"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_the_answer_loss_is_that_of_rows_alone_token_by_token(backbone, any_model, kind, side):
    inputs, rows = batch_of(backbone, MIXED, side), backbone.alone(MIXED)
    loss = AnswerLoss(any_model, inputs, kind)
    found = loss.of(loss.run(pruning_ratio=0.7))
    expected = [naive_losses(any_model, row, kind, pruning_ratio=0.7) for row in rows]
    assert max(map(abs, expected)) > 1e-2
    # float32 logits of about 5 against float64 sums.
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-5)
    assert loss.of(loss.whole).abs().max() < 1e-6


@pytest.mark.parametrize("on_policy", [False, True])
def test_measured_masks_are_those_of_a_call_that_drops_these_blocks(backbone, any_model, on_policy):
    """Each mask's loss is that of its row alone, with scores that keep the same blocks."""
    inputs, rows = batch_of(backbone), backbone.alone(ROWS)
    found = measure(any_model, inputs, [5, 6, 7], **OPTIONS, on_policy=on_policy)
    assert found[2].dropped.numel() == 0  # no video
    for row, masks in zip(rows[:2], found[:2], strict=True):
        assert masks.dropped.shape[:2] == masks.losses.shape == (2, 3)
        sizes = [scores.numel() for scores in any_model(**row).token_scores]
        for dropped, loss in zip(masks.dropped.flatten(0, 1), masks.losses.flatten(), strict=True):
            ratios = [part.float().mean().item() + 1e-6 for part in dropped.split(sizes)]
            call = {"block_scores": (~dropped).float(), "pruning_ratio": ratios}
            expected = naive_losses(any_model, copy.copy(row), "divergence", **call)
            assert loss.item() == pytest.approx(expected, rel=1e-3, abs=1e-5)
    again, others = (
        measure(any_model, inputs, seeds, **OPTIONS, on_policy=on_policy)[0] for seeds in ([5, 6, 7], [8, 9, 7])
    )
    dropped = [masks.dropped for masks in (found[0], again, others)]
    assert torch.equal(dropped[1], dropped[0])  # a row's draws are its seed's
    assert not torch.equal(dropped[2], dropped[0])


def test_measuring_changes_nothing_and_takes_no_gradients(backbone, any_model):
    inputs = batch_of(backbone)
    any_model.train()
    before = {name: tensor.clone() for name, tensor in any_model.state_dict().items()}
    try:
        found = measure(any_model, inputs, [1, 2, 3], **OPTIONS)
        assert all(module.training for module in any_model.modules())
    finally:
        any_model.eval()
    assert not any(mask.losses.requires_grad for mask in found)
    assert all(torch.equal(before[name], tensor) for name, tensor in any_model.state_dict().items())


def test_a_random_order_keeps_all_blocks_equally_often():
    """Four masks that keep 5 of 20 later blocks each are one partition of them."""
    scores = draw_scores(torch.rand(24), 4, [9, 9], 4, torch.Generator().manual_seed(0))
    kept = torch.zeros(20)
    for row in scores[0, :, 4:]:
        kept[row.topk(5).indices] += 1
    assert (kept == 1).all()


def test_the_policy_mostly_keeps_what_it_values():
    values = torch.cat([torch.zeros(4), torch.arange(40.0)])
    scores = draw_scores(values, 4, [14, 14], 500, torch.Generator().manual_seed(0))
    often = torch.zeros(40)
    for row in scores[1, :, 4:]:
        often[row.topk(10).indices] += 1
    assert often[-10:].mean() > 3 * often[:10].mean()
    assert (often > 0).all()  # and gives every block a chance


def test_ratios_are_drawn_evenly_over_the_logarithm_of_what_is_kept():
    kept = 1 - torch.tensor(draw_ratios((0.5, 0.95), torch.linspace(0, 1, 1001).tolist()))
    assert 0.05 <= kept.min() <= kept.max() <= 0.5
    assert kept.median().item() == pytest.approx((0.05 * 0.5) ** 0.5, rel=0.05)


def masks_of(worth: torch.Tensor, num_masks: int = 64, seed: int = 0) -> Masks:
    """Random masks of blocks whose losses are exactly the sums of `worth`."""
    dropped = torch.rand(2, num_masks, len(worth), generator=torch.Generator().manual_seed(seed)) > 0.5
    return Masks(dropped, dropped.float() @ worth)


def test_the_loss_is_zero_for_the_true_worth_and_its_gradient_points_there():
    worth, unit = torch.rand(12) * 0.1 - 0.02, 0.03
    masks = [masks_of(worth[:8]), Masks.none(), masks_of(worth[8:], seed=1)]
    true = (worth / unit + FIRST_LOGIT).sigmoid()
    torch.testing.assert_close(block_worth(true, unit), worth)
    scores = [true[:8].view(2, 4), true[8:].view(2, 2)]
    assert worth_loss(scores, masks, unit).item() == pytest.approx(0, abs=1e-6)
    logits = torch.full((12,), FIRST_LOGIT, requires_grad=True)
    for _ in range(400):
        score = logits.sigmoid()
        loss = worth_loss([score[:8].view(2, 4), score[8:].view(2, 2)], masks, unit)
        (gradient,) = torch.autograd.grad(loss, logits)
        logits = (logits - 0.3 * gradient).detach().requires_grad_()
    torch.testing.assert_close(block_worth(logits.detach().sigmoid(), unit), worth, atol=1e-3, rtol=0)


def test_the_unit_makes_the_loss_of_equal_scores_about_one():
    worth = torch.randn(60, generator=torch.Generator().manual_seed(3)) * 0.07
    masks = [masks_of(worth, seed=seed) for seed in range(20)]
    unit = measure_unit(masks)
    found = worth_loss([torch.full((1, 60), 0.2)] * 20, masks, unit) / 20
    level = 0.1 * torch.stack([m.losses.mean() for m in masks]).square().mean()  # not within groups
    assert found.item() < 2 + level / unit**2
    assert worth_loss([torch.full((1, 60), 0.5)] * 20, masks, 10 * unit).isfinite()


def test_masks_of_other_videos_are_refused():
    with pytest.raises(ValueError, match="The masks are of 8 blocks, but the videos have 6"):
        worth_loss([torch.rand(2, 3)], [masks_of(torch.rand(8))], 0.1)


def test_a_store_gives_back_what_was_measured_and_passes_over_other_models(tmp_path):
    store, first, second = MaskStore(tmp_path, "a"), masks_of(torch.rand(9)), masks_of(torch.rand(9), seed=2)
    store.add("row", first)
    store.add("row", second)
    store.add("text", Masks.none())
    store.set_unit(0.25)
    again = MaskStore(tmp_path, "a")
    found = again.get("row", 1)
    assert torch.equal(found.dropped, torch.cat([first.dropped, second.dropped]))
    torch.testing.assert_close(found.losses, torch.cat([first.losses, second.losses]))
    assert again.unit == 0.25
    assert [again.lacks("row", number) for number in range(3)] == [False, False, True]
    other = MaskStore(tmp_path, "b")
    assert (other.lacks("row", 0), other.unit) == (True, None)


@pytest.mark.parametrize("line", ['{"identity": "a", "key": 1}', '{"id": 3}', "[]", '{"identity": "a", "unit": "x"}'])
def test_a_file_of_something_else_is_refused_by_name(tmp_path, line):
    (tmp_path / FILES.format(0)).write_text(line + "\n")
    with pytest.raises(ValueError, match=r"_masks_0.jsonl is damaged .* Delete it"):
        MaskStore(tmp_path, "a")


ANSWERS: dict[str, Any] = {"model_overrides": {"scorer_target": "answers"}}
CLIPS = TrainingRows([[3, Video(4), 6], [3, Video(5), 9], [4, Video(3), 7]], length=6)


def run_of(folder: Any, model: Any = None, **options: Any) -> Any:
    model = tiny_model(tiny_config(**ANSWERS), trained_scorer=False) if model is None else model
    settings: dict[str, Any] = {"scorer_only": True, "num_masks": 8, "per_device_train_batch_size": 3, "max_steps": 8}
    return trainer(folder, model=model, data=CLIPS, **settings | options)


def test_the_scorer_learns_what_masks_cost_and_nothing_else_changes(tmp_path):
    run = run_of(tmp_path, max_steps=60, learning_rates={"scorer": 3e-3}, mask_rounds=1, eval_dataset=CLIPS)
    before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    run.train()
    losses = logged(run, "worth_loss")
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
    changed = {name for name, tensor in run.model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if ".scorer." in name}
    assert run.model.config.worth_unit > 0
    assert run.evaluate()["eval_worth_loss"] > 0
    assert len((tmp_path / FILES.format(0)).read_text().splitlines()) == 1 + len(CLIPS)


@pytest.mark.slow
def test_a_second_run_measures_nothing_again(tmp_path, monkeypatch):
    first = run_of(tmp_path)
    first.train()
    written = (tmp_path / FILES.format(0)).read_text()
    assert [json.loads(line).get("round") for line in written.splitlines()].count(1) == len(CLIPS)  # two rounds
    monkeypatch.setattr("stts_hf.training.worth.measure", None)  # would fail if it were called
    second = run_of(tmp_path)
    second.train()
    assert (tmp_path / FILES.format(0)).read_text() == written
    assert logged(second, "worth_loss")[0] == pytest.approx(logged(first, "worth_loss")[0], rel=0.5)


def test_masks_of_a_later_round_are_not_of_an_earlier_one(tmp_path):
    """A run that goes on from a checkpoint before its middle finds them in the file, and must not use them yet."""
    store = MaskStore(tmp_path, "a")
    rounds = [Masks(torch.full((2, 6), bool(number)), torch.full((2,), float(number))) for number in (0, 1)]
    for masks in rounds:
        store.add("row", masks)
    assert store.get("row", 0).losses.tolist() == [0, 0]
    assert store.get("row", 1).losses.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(("trained", "fitted"), [(True, True), (False, False)])
def test_a_scorer_with_a_unit_was_fitted_only_if_it_was_trained(tmp_path, trained, fitted):
    config = tiny_config(model_overrides={"scorer_target": "answers", "worth_unit": 0.05})
    run = run_of(tmp_path, tiny_model(config, trained_scorer=trained))
    assert AnswersTarget(run.model, run.args).was_fitted == fitted


def test_whole_training_draws_masks_in_every_step(tmp_path):
    model = tiny_model(tiny_config(model_overrides={"scorer_target": "answers", "worth_unit": 0.05}))
    run = trainer(tmp_path, model=model, data=CLIPS, num_masks=4, max_steps=3, pruning_ratio_range=[0.1, 0.9])
    run.train()
    assert all(loss > 0 for loss in logged(run, "worth_loss"))
    total = [w + t for w, t in zip(logged(run, "worth_loss"), logged(run, "task_loss"), strict=True)]
    assert logged(run, "loss") == pytest.approx(total, rel=1e-4)
    assert len(set(logged(run, "kept_share"))) == 3  # other ratios in every step
    assert not list(tmp_path.glob("_masks*"))


def test_a_frozen_scorer_measures_no_masks(tmp_path, monkeypatch):
    monkeypatch.setattr("stts_hf.training.worth.measure", None)  # would fail if it were called
    model = tiny_model(tiny_config(model_overrides={"scorer_target": "answers", "worth_unit": 0.05}))
    run = trainer(tmp_path, model=model, data=CLIPS, freeze=["scorer"], max_steps=2, eval_dataset=CLIPS)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    run.train()
    assert logged(run, "loss") == pytest.approx(logged(run, "task_loss"), rel=1e-5)
    assert "eval_worth_loss" not in run.evaluate()
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed
    assert not any(".scorer." in name for name in changed)


def test_the_loss_reaches_the_scorer(tmp_path):
    model = tiny_model(tiny_config(**ANSWERS))
    run, batch = run_of(tmp_path, model), CLIPS[0]
    batch.pop("id")
    run._keys = ["row"]
    run.model.train()
    found = gradients(model, run.compute_loss(model, batch))
    assert found
    assert all(".scorer." in name for name in found)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({**ANSWERS, "selector": "cosine"}, {"scorer_only": True}, "`selector` is 'cosine'"),
        (ANSWERS, {}, "the scorer was never fitted"),
        (ANSWERS, {"scorer_only": True, "num_masks": 1}, "`num_masks` must be at least 4, not 1"),
        (ANSWERS, {"scorer_only": True, "answer_loss": "regret"}, "`answer_loss` must be one of"),
        ({}, {"pruning_ratio_range": [0.9, 0.1]}, r"`pruning_ratio_range` must be .* not \[0.9, 0.1\]"),
    ],
    ids=["cosine", "never_fitted", "one_mask", "regret", "range"],
)
def test_what_does_not_go_together(tmp_path, config, options, message):
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, model=tiny_model(tiny_config(**config)), **options)


def test_a_collator_without_ids_is_refused(tmp_path):
    run = run_of(tmp_path, data_collator=lambda items: {k: v for k, v in items[0].items() if k != "id"})
    with pytest.raises(ValueError, match="a batch of 1 rows has no `sample_ids`"):
        run.train()
