"""Batches of any shape under a threshold, bounds and a budget: each row is the row alone, and counts are the rule's."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.backbones import Backbone, Rows, prompt, shared_model
from tests.fuzz.test_models import by_backbone, continues_as_alone, rows
from tests.modeling.reference import CLOSE, call_of, logits_of_row
from tests.naive import NaiveThreshold, naive_keep_mask

# Scores of a batch and of a row alone differ in the last digits, so the threshold lies in a gap between two.
SMALLEST_GAP = 1e-4


@dataclass(frozen=True)
class Drawn:
    """share: about how many scores are below the threshold. above_frame: a budget's tokens beyond one frame."""

    share: float
    bounds: tuple[float, float]
    above_frame: int | None
    selector: str
    padding_side: str


cases = st.builds(
    Drawn,
    share=st.floats(0, 1),
    bounds=st.one_of(
        st.just((0.0, 1.0)),
        st.tuples(st.floats(0, 1), st.floats(0, 1)).map(lambda pair: (min(pair), max(pair))),
    ),
    above_frame=st.one_of(st.none(), st.integers(0, 40)),
    selector=st.sampled_from(["scorer", "cosine"]),
    padding_side=st.sampled_from(["left", "right"]),
)


def threshold_at(scores: list[torch.Tensor], share: float) -> float:
    """In the gap nearest to this share of the scores, below all of them, or above."""
    ordered = torch.cat([torch.zeros(1), *(video[1:].flatten() for video in scores), torch.ones(1)]).sort().values
    gaps = [(low + high) / 2 for low, high in pairwise(ordered.tolist()) if high - low > SMALLEST_GAP and high <= 1]
    return gaps[round(share * (len(gaps) - 1))]


@by_backbone
@given(rows=rows, drawn=cases)
@torch.no_grad()
def test_a_batch_is_its_rows(backbone: Backbone, rows: Rows, drawn: Drawn):
    model, inputs = shared_model(backbone), backbone.batch(rows, drawn.padding_side)
    model.config.vision_config.selector = drawn.selector
    scores = list(model(**inputs, pruning_ratio=0.0).token_scores or [])
    assume(scores)
    first = max(video.shape[1] for video in scores)
    budget = None if drawn.above_frame is None else first + drawn.above_frame
    rule = NaiveThreshold(threshold_at(scores, drawn.share), *drawn.bounds, budget)
    together = model(**inputs, **call_of(rule))
    for mask, video in zip(together.keep_mask, scores, strict=True):
        assert torch.equal(mask.sum(), naive_keep_mask(video, rule).sum())
    for index, row in enumerate(backbone.alone(rows)):
        alone = model(**row, **call_of(rule))
        torch.testing.assert_close(logits_of_row(together, inputs, index), alone.logits[0], **CLOSE)
    ratios = [float((~mask).sum()) / mask.numel() for mask in together.keep_mask]
    if all(ratios):  # bit for bit the fixed ratio with the same count
        assert torch.equal(together.logits, model(**inputs, pruning_ratio=ratios).logits)


@by_backbone
@given(rows=rows, drawn=cases)
@torch.no_grad()
def test_generate_continues_rows_as_alone(backbone: Backbone, rows: Rows, drawn: Drawn):
    model = shared_model(backbone)
    model.config.vision_config.selector = drawn.selector
    scores = list(model(**prompt(backbone.batch(rows, "left")), pruning_ratio=0.0).token_scores or [])
    continues_as_alone(backbone, rows, call_of(NaiveThreshold(threshold_at(scores, drawn.share), *drawn.bounds)))
