"""Matching the unpruned model: its divergence, whom the gradient reaches, and what cannot be matched."""

from typing import Any

import pytest
import torch

from stts_hf.training.distillation import divergence, teach
from tests.modeling.reference import assert_gradients_equal, gradients, one_by_one, pack
from tests.stts_hf.training.runs import trainer
from tests.tiny import Image, Part, Video, build_inputs, randomise, tiny_config, tiny_model

SCORER_ONLY: dict[str, Any] = {"distillation_weight": 1.0}
# Mixed lengths; a row of text, one of an image, one of both kinds.
MIXED: list[list[Part]] = [[3, Video(2), 4], [9], [2, Image(), 5], [3, Video(4), 12], [2, Image(), Video(3), 7]]


def mixed_inputs(rows: list[list[Part]] = MIXED, **options: Any) -> dict[str, Any]:
    """A batch whose first labels nothing predicts, as a collator makes them."""
    inputs = build_inputs(rows, labels=True, **options)
    first = inputs["attention_mask"].argmax(-1)
    inputs["labels"][torch.arange(len(rows)), first] = -100
    return inputs


def naive_divergence(model: Any, inputs: dict[str, Any], rows: list[list[Part]], temperature: float) -> torch.Tensor:
    """Row by row and token by token: T^2 * sum of p * (log p - log q), p of the unpruned model, q of the pruned."""
    total = torch.zeros((), dtype=torch.float64)
    for row in one_by_one(inputs, rows):
        labels = row.pop("labels")[0].tolist()
        with torch.no_grad():
            unpruned = model(**row, pruning_ratio=0.0).logits[0].double()
        pruned = model(**row)
        column_of = {place: column for column, place in enumerate(pruned.kept_indices[0].tolist())}
        for place, label in enumerate(labels):
            if place and label != -100:
                p = (unpruned[place - 1] / temperature).softmax(-1)
                q = (pruned.logits[0, column_of[place] - 1].double() / temperature).softmax(-1)
                total = total + temperature**2 * (p * (p.log() - q.log())).sum()
    return total


@pytest.mark.parametrize(("side", "temperature"), [("left", 1.0), ("right", 2.5)])
def test_divergence_of_a_mixed_batch(side, temperature):
    model, inputs = tiny_model(), mixed_inputs(padding_side=side)
    expected = naive_divergence(model, inputs, MIXED, temperature)
    assert expected > 1
    # float32 logits of about 5 and some 40 tokens against float64 sums.
    assert divergence(model, inputs, model(**inputs), temperature).item() == pytest.approx(expected.item(), rel=1e-4)


def test_divergence_of_packed_rows():
    model, inputs = tiny_model(), mixed_inputs(padding_side="right")
    packed = pack(inputs, MIXED)
    expected = naive_divergence(model, inputs, MIXED, 1.0)
    assert divergence(model, packed, model(**packed), 1.0).item() == pytest.approx(expected.item(), rel=1e-4)


def test_the_teacher_is_the_model_at_ratio_0():
    """Exactly, without the dropout of training, and whatever its scorer says."""
    model = tiny_model(tiny_config(text_overrides={"attention_dropout": 0.5}))
    inputs = mixed_inputs([[3, Video(4), 6]])
    with torch.no_grad():
        logits = model(**inputs, pruning_ratio=0.0).logits
    rows, columns, _, taught = teach(model.train(), inputs)
    assert model.training
    assert model.model.vision_tower.training
    assert torch.equal(taught, logits[rows, columns - 1])
    randomise(model.model.vision_tower.scorer, seed=5)
    assert torch.equal(teach(model, inputs)[-1], taught)
    assert not taught.requires_grad


def test_the_loss_is_the_mean_over_labels_and_the_temporal_loss(tmp_path):
    model = tiny_model(tiny_config(model_overrides={"temporal_loss_weight": 0.5}))
    options = SCORER_ONLY | {"distillation_weight": 2.0, "distillation_temperature": 1.5}
    run = trainer(tmp_path, model=model, **options)
    inputs = mixed_inputs()
    with torch.no_grad():
        labels = (inputs["labels"][:, 1:] != -100).sum()
        mean = naive_divergence(model, inputs, MIXED, 1.5) / labels
        expected = 2.0 * mean + 0.5 * model(**inputs).temporal_loss
        assert run.compute_loss(model.eval(), inputs).item() == pytest.approx(expected.item(), rel=1e-4)


def test_the_gradient_reaches_the_scorer_alone_and_is_that_of_the_divergence(tmp_path):
    model = tiny_model(tiny_config(model_overrides={"temporal_loss_weight": 0.0}))
    inputs = mixed_inputs()
    run = trainer(tmp_path, model=model, **SCORER_ONLY)
    labels = (inputs["labels"][:, 1:] != -100).sum()
    found = gradients(model, run.compute_loss(model, inputs))
    expected = gradients(model, naive_divergence(model, inputs, MIXED, 1.0) / labels)
    assert {name.rpartition("scorer.")[0] for name in found} == {"model.vision_tower."}
    assert all(gradient.abs().max() > 1e-6 for name, gradient in found.items() if not name.endswith("k_proj.bias"))
    assert_gradients_equal(found, expected, tolerance=1e-3)  # float32 through the whole model, against rows alone


@pytest.mark.parametrize(
    ("vision", "options", "message"),
    [
        ({}, {"freeze": ["scorer"]}, "Nothing is left to train"),
        ({"pruning_ratio": 0.0}, {}, "`pruning_ratio` is 0.0"),
        ({"selector": "cosine"}, {}, "`selector` is 'cosine'"),
    ],
    ids=["scorer_frozen", "ratio_0", "cosine"],
)
def test_what_cannot_be_matched(tmp_path, vision, options, message):
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, model=tiny_model(tiny_config(**vision)), **SCORER_ONLY | options)
