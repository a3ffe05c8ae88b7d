"""Batches of any shape: each row's logits are those of the row alone, and the budget is kept to the block."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.backbones import BACKBONES, Backbone, Clip, Picture, Rows, prompt, shared_model
from tests.modeling.reference import CLOSE, logits_of_row
from tests.naive import naive_budget

by_backbone = pytest.mark.parametrize("backbone", BACKBONES, ids=lambda backbone: backbone.name)

parts = st.one_of(st.integers(1, 6), st.integers(1, 6).map(Clip), st.just(Picture()))
rows = st.lists(st.lists(parts, min_size=1, max_size=5).map(lambda row: [*row, 2]), min_size=1, max_size=4)
ratios = st.one_of(st.sampled_from([0, 0.0, 0.5, 1, 1.0]), st.floats(0, 1))


@dataclass(frozen=True)
class Settings:
    """Of a tower, beside the ratio."""

    selector: str
    score_rescaling: str


tower_settings = st.builds(
    Settings,
    selector=st.sampled_from(["scorer", "cosine", "random"]),
    score_rescaling=st.sampled_from(["row", "frame", "none"]),
)


def apply(model: Any, settings: Settings) -> None:
    for name, value in vars(settings).items():
        setattr(model.config.vision_config, name, value)


@by_backbone
@given(rows=rows, ratio=ratios, padding_side=st.sampled_from(["left", "right"]), settings=tower_settings)
@torch.no_grad()
def test_a_batch_is_its_rows(backbone: Backbone, rows: Rows, ratio: float, padding_side: str, settings: Settings):
    model, inputs = shared_model(backbone), backbone.batch(rows, padding_side)
    apply(model, settings)
    together = model(**inputs, pruning_ratio=ratio)
    masks = together.keep_mask or []
    assert len(masks) == sum(isinstance(part, Clip) for row in rows for part in row)
    for mask in masks:
        frames, blocks = mask.shape
        assert int((~mask).sum()) == naive_budget(ratio, frames, blocks)
    for index, row in enumerate(backbone.alone(rows)):
        alone = model(**row, pruning_ratio=ratio)
        torch.testing.assert_close(logits_of_row(together, inputs, index), alone.logits[0], **CLOSE)


@by_backbone
@given(rows=rows, ratio=ratios, settings=tower_settings)
def test_training_stays_finite(backbone: Backbone, rows: Rows, ratio: float, settings: Settings):
    model = shared_model(backbone)
    apply(model, settings)
    model.train()
    try:
        outputs = model(**backbone.batch(rows, "right"), pruning_ratio=ratio)
        outputs.loss.backward()
    finally:
        model.eval()
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    assert outputs.loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in found)


@torch.no_grad()
def continues_as_alone(backbone: Backbone, rows: Rows, rule: dict[str, Any]) -> None:
    """Compares logits of the second step, which reads the cache; tokens could differ by a tie. rule: what stays."""
    model = shared_model(backbone)
    options = rule | {"max_new_tokens": 2, "do_sample": False, "output_logits": True}
    options |= {"return_dict_in_generate": True, "eos_token_id": None}
    together = model.generate(**prompt(backbone.batch(rows, "left")), **options)
    for index, row in enumerate(backbone.alone(rows)):
        alone = model.generate(**prompt(row), **options)
        torch.testing.assert_close(together.logits[0][index], alone.logits[0][0], **CLOSE)
        if together.sequences[index, -2] == alone.sequences[0, -2]:
            torch.testing.assert_close(together.logits[1][index], alone.logits[1][0], **CLOSE)


@by_backbone
@given(rows=rows, ratio=ratios, settings=tower_settings)
def test_generate_continues_rows_as_alone(backbone: Backbone, rows: Rows, ratio: float, settings: Settings):
    apply(shared_model(backbone), settings)
    continues_as_alone(backbone, rows, {"pruning_ratio": ratio})
