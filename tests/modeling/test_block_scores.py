"""Scores that the caller gives, a ratio for each video, and layers `0..l` that calls share, on every backbone."""

import pytest
import torch

from stts_hf.modeling.plan_stts import TowerCache
from tests.backbones import Clip, Rows

ROWS: Rows = [[3, Clip(4), 5], [2, Clip(3), 3, Clip(2), 9], [6]]
RATIOS = [0.3, 0.8, 0.5]


def given_scores(model, inputs, seed=3):
    """(G,) scores that no selector would give."""
    grids = inputs[model.model.video_inputs[-1]]
    side = getattr(model.config.vision_config, "spatial_merge_size", 1)
    num_blocks = sum(int(t * (rows // side) * (cols // side)) for t, rows, cols in grids.tolist())
    return torch.rand(num_blocks, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_given_scores_rank_the_blocks_as_a_selector_without_bias_would(backbone, any_model, monkeypatch):
    """Those of cosine, given by hand, drop what cosine drops, with the same logits."""
    inputs = backbone.batch(ROWS, "left")
    monkeypatch.setattr(any_model.config.vision_config, "selector", "cosine")
    expected = any_model(**inputs, pruning_ratio=0.5)
    monkeypatch.undo()
    scores = torch.cat([scores.flatten() for scores in expected.token_scores])
    found = any_model(**inputs, pruning_ratio=0.5, block_scores=scores)
    assert torch.equal(found.kept_indices, expected.kept_indices)
    assert torch.equal(found.logits, expected.logits)
    assert found.temporal_loss is None
    others = any_model(**inputs, pruning_ratio=0.5, block_scores=given_scores(any_model, inputs))
    assert not torch.equal(others.kept_indices, expected.kept_indices)


@torch.no_grad()
def test_each_video_may_have_its_ratio(backbone, any_model):
    """A video's blocks are those of a call at its ratio."""
    inputs = backbone.batch(ROWS, "left")
    found = any_model(**inputs, pruning_ratio=RATIOS).keep_mask
    for video, ratio in enumerate(RATIOS):
        expected = any_model(**inputs, pruning_ratio=ratio).keep_mask[video]
        assert found[video].sum() == expected.sum()
        assert torch.equal(found[video], expected)


@torch.no_grad()
def test_calls_that_share_a_cache_equal_calls_without_one(backbone, any_model, monkeypatch):
    """The first fills it; later ones skip layers `0..l`, whatever they drop, and give the same logits to the bit."""
    inputs = backbone.batch(ROWS, "left")
    monkeypatch.setattr(any_model.config.vision_config, "score_bias", False)
    scores = given_scores(any_model, inputs)
    ran: list[int] = []
    tower = any_model.model.get_submodule(backbone.tower)
    layers = next(
        module for name, module in tower.named_modules() if name.endswith(("layers", "blocks", "encoder.layer"))
    )
    for index, layer in enumerate(layers):
        layer.register_forward_hook(lambda *_, index=index: ran.append(index))
    cache = TowerCache()
    calls = [{"pruning_ratio": 0.2}, {"pruning_ratio": 0.7}, {"pruning_ratio": RATIOS, "block_scores": scores}]
    for number, call in enumerate(calls):
        expected = any_model(**inputs, **call)
        ran.clear()
        found = any_model(**inputs, **call, tower_cache=cache)
        first = 0 if number == 0 else any_model.config.vision_config.pruning_layer + 1
        assert ran == list(range(first, len(layers)))
        assert torch.equal(found.kept_indices, expected.kept_indices)
        assert torch.equal(found.logits, expected.logits)
    assert cache.blocks is not None
    assert cache.blocks.shape[0] == len(scores)


@torch.no_grad()
def test_generate_takes_given_scores(backbone, any_model):
    inputs = {name: value for name, value in backbone.batch(ROWS, "left").items() if name != "labels"}
    scores = given_scores(any_model, inputs)
    whole = any_model(**inputs, pruning_ratio=0.5, block_scores=scores)
    options = {"max_new_tokens": 2, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    output = any_model.generate(**inputs, pruning_ratio=0.5, block_scores=scores, **options)
    assert torch.equal(output.kept_indices, whole.kept_indices)
    torch.testing.assert_close(output.logits[0], whole.logits[:, -1], atol=1e-5, rtol=0)


@torch.no_grad()
def test_without_bias_scores_only_rank(backbone, any_model, monkeypatch):
    """The same blocks stay, and the logits are those of given scores of the same order."""
    inputs = backbone.batch(ROWS, "left")
    biased = any_model(**inputs, pruning_ratio=0.5)
    monkeypatch.setattr(any_model.config.vision_config, "score_bias", False)
    plain = any_model(**inputs, pruning_ratio=0.5)
    scores = torch.cat([scores.flatten() for scores in plain.token_scores])
    ranked = any_model(**inputs, pruning_ratio=0.5, block_scores=scores)
    assert torch.equal(plain.kept_indices, biased.kept_indices)
    assert torch.equal(plain.logits, ranked.logits)
    assert (plain.logits - biased.logits).abs().max() > 1e-3


@torch.no_grad()
def test_a_scorer_of_answers_has_no_temporal_loss(backbone, any_model, monkeypatch):
    inputs = backbone.batch(ROWS, "left")
    monkeypatch.setattr(any_model.config, "scorer_target", "answers")
    outputs = any_model(**inputs, pruning_ratio=0.5)
    assert outputs.temporal_loss is None
    assert torch.equal(outputs.loss, outputs.task_loss)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"pruning_ratio": [0.5, 0.5]}, "`pruning_ratio` holds 2 ratios, but the call has 3 videos"),
        ({"pruning_ratio": [0.5, 1.5, 0.5]}, "`pruning_ratio` is 1.5"),
        ({"block_scores": torch.zeros(5)}, r"`block_scores` has shape \(5,\)"),
        ({"block_scores": (torch.zeros(5),)}, r"`block_scores` has shape tuple, but must be a tensor"),
    ],
    ids=["two_ratios", "ratio", "five_scores", "a_tuple"],
)
def test_what_does_not_fit_the_videos_is_refused(backbone, any_model, call, message):
    with pytest.raises(ValueError, match=message):
        any_model(**backbone.batch(ROWS, "left"), **call)
