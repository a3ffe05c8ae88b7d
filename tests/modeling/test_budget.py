"""A threshold on scores and budgets of tokens, on every backbone: how many blocks stay, and what comes of those."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import GenerationConfig

from stts_hf.modeling.budget_stts import KeepRule
from stts_hf.modeling.plan_stts import TowerCache
from tests.backbones import DAILY, LATER, Backbone, Clip, Inputs, Picture, Rows, longer, prompt
from tests.modeling.reference import (
    CLOSE,
    assert_gradients_equal,
    call_of,
    gradients,
    kept_of_row,
    logits_of_row,
)
from tests.naive import NaiveThreshold
from tests.version_marks import since_transformers_5_23

ROWS: Rows = [[3, Clip(4), 5], [2, Clip(3), 3, Clip(2), 9], [6]]
MIXED: Rows = [[2, Picture(), 2, Clip(3), 4], [2, Clip(2), 3, Picture(), 3], [7]]
ADJACENT: Rows = [[2, Clip(1), Clip(3), 4], [3, Clip(1), 4]]
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 4, "eos_token_id": None, "pad_token_id": 0}
SELECTORS = ("scorer", "cosine")


def level(model: Any, inputs: Inputs, share: float) -> float:
    """A threshold over about this share of the later frames' scores, in the widest gap near it."""
    with torch.no_grad():
        scores = model(**inputs, pruning_ratio=0.0).token_scores
    ordered = torch.cat([video[1:].flatten() for video in scores]).sort().values.tolist()
    middle = round(share * len(ordered))
    low, high = max(pairwise(ordered[max(middle - 2, 0) : middle + 3]), key=lambda pair: pair[1] - pair[0])
    return (low + high) / 2


def ratios_of(keep_mask) -> list[float]:
    """A ratio for each video that keeps as many blocks."""
    return [float((~mask).sum()) / mask.numel() for mask in keep_mask]


@pytest.fixture(scope="module", params=[*DAILY, *LATER], ids=lambda backbone: backbone.name)
def backbone(request) -> Backbone:
    return request.param


@pytest.fixture(params=SELECTORS)
def selector(request, any_model, monkeypatch) -> str:
    monkeypatch.setattr(any_model.config.vision_config, "selector", request.param)
    return request.param


@pytest.mark.parametrize("rows", [ROWS, MIXED, ADJACENT], ids=["videos", "mixed", "adjacent"])
@torch.no_grad()
def test_rows_of_a_batch_equal_the_naive_construction(backbone, any_model, selector, rows):
    batches = [backbone.batch(rows, padding_side) for padding_side in ("left", "right")]
    low, middle, high = (level(any_model, batches[0], share) for share in (0.2, 0.5, 0.8))
    rules = [
        NaiveThreshold(middle),
        NaiveThreshold(0.0),
        NaiveThreshold(1.0),
        NaiveThreshold(low, lowest=0.4),
        NaiveThreshold(high, highest=0.3),
        NaiveThreshold(low, budget=13),
    ]
    for rule in rules:
        found = [(any_model(**inputs, **call_of(rule)), inputs) for inputs in batches]
        for index, row in enumerate(backbone.alone(rows)):
            expected = backbone.naive(any_model, row, rule)
            for outputs, inputs in found:
                assert kept_of_row(outputs, inputs, index) == expected.kept, rule
                logits = logits_of_row(outputs, inputs, index)
                torch.testing.assert_close(logits, expected.logits, atol=backbone.naive_rounding, rtol=0)


def test_losses_and_gradients_equal_those_of_separate_rows(backbone, any_model):
    """The scorer learns through the bias, in videos that lose nothing too."""
    rows: Rows = [*ROWS, [2, Picture(), 3]]
    forms = [backbone.batch(rows, "left"), backbone.batch(rows, "right")]
    if not any_model.model.refuses_packed_rows:
        forms.append(backbone.pack(rows))
    for share in (0.0, 0.5):
        rule = NaiveThreshold(level(any_model, forms[0], share) if share else 0.0)
        separate = backbone.alone(rows)
        task_loss = torch.cat([backbone.naive(any_model, row, rule).task_losses for row in separate]).mean()
        expected = gradients(any_model, task_loss)
        scorer = [name for name in expected if ".scorer." in name and not name.endswith("k_proj.bias")]
        assert len(scorer) == 13
        assert all(expected[name].abs().max() > 0 for name in scorer)
        for inputs in forms:
            outputs = any_model(**inputs, **call_of(rule))
            torch.testing.assert_close(outputs.task_loss, task_loss, atol=1e-5, rtol=0)
            torch.testing.assert_close(outputs.loss, outputs.task_loss + outputs.temporal_loss)
            assert_gradients_equal(gradients(any_model, outputs.task_loss), expected, backbone.naive_rounding)


@pytest.mark.parametrize("rows", [ROWS, MIXED], ids=["videos", "mixed"])
def test_survivors_are_to_the_bit_those_of_a_fixed_ratio_with_the_same_count(backbone, any_model, selector, rows):
    inputs = backbone.batch(rows, "left")
    threshold = level(any_model, inputs, 0.5)
    found = any_model(**inputs, score_threshold=threshold)
    ratios = ratios_of(found.keep_mask)
    assert min(ratios) > 0
    assert len({round(ratio, 3) for ratio in ratios}) > 1  # each video has another count
    fixed = any_model(**inputs, pruning_ratio=ratios)
    assert torch.equal(found.kept_indices, fixed.kept_indices)
    assert torch.equal(found.logits, fixed.logits)
    assert torch.equal(found.loss, fixed.loss)
    ours, theirs = gradients(any_model, found.loss), gradients(any_model, fixed.loss)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(gradient, ours[name]) for name, gradient in theirs.items())


@torch.no_grad()
def test_a_cosine_that_keeps_all_is_no_pruning(backbone, any_model, monkeypatch):
    monkeypatch.setattr(any_model.config.vision_config, "selector", "cosine")
    inputs = backbone.batch(ROWS, "left")
    found, unpruned = any_model(**inputs, score_threshold=0.0), any_model(**inputs, pruning_ratio=0.0)
    assert all(mask.all() for mask in found.keep_mask)
    for index in range(len(ROWS)):
        # Qwen's patches are embedded by a matrix product instead of a convolution: 5.3e-6 was measured.
        ours, theirs = (logits_of_row(some, inputs, index) for some in (found, unpruned))
        torch.testing.assert_close(ours, theirs, atol=backbone.naive_rounding, rtol=0)


@torch.no_grad()
def test_the_bias_does_not_jump_where_nothing_falls(backbone, any_model):
    """A video that keeps all has the scorer's bias, like one that loses a single block."""
    [inputs] = backbone.alone([[3, Clip(3), 5]])
    scores = any_model(**inputs, pruning_ratio=0.0).token_scores[0][1:].flatten().sort().values
    keeps_all = any_model(**inputs, score_threshold=0.0)
    loses_one = any_model(**inputs, score_threshold=float(scores[:2].mean()))
    unpruned = any_model(**inputs, pruning_ratio=0.0)
    assert int((~loses_one.keep_mask[0]).sum()) == 1
    assert torch.equal(keeps_all.kept_indices, unpruned.kept_indices)
    assert (keeps_all.logits[:, -1] - unpruned.logits[:, -1]).abs().max() > 1e-3
    all_of, one_of = (
        any_model.model.get_video_features(**videos_of(any_model, inputs), score_threshold=threshold)
        for threshold in (0.0, float(scores[:2].mean()))
    )
    whole_frames = one_of.keep_mask[0].all(-1).nonzero().flatten().tolist()
    assert len(whole_frames) > 1
    for frame in whole_frames:  # of which nothing fell: their features are the same
        torch.testing.assert_close(of_frame(all_of, frame), of_frame(one_of, frame), atol=1e-6, rtol=0)


def videos_of(model: Any, inputs: Inputs) -> Inputs:
    return {name: inputs[name] for name in model.model.video_inputs if name in inputs}


def of_frame(features: Any, frame: int) -> torch.Tensor:
    """What is left of a frame of the first video, (kept, text width)."""
    mask = features.keep_mask[0]
    before = int(mask[:frame].sum())
    return features.pooler_output[0][before : before + int(mask[frame].sum())]


@torch.no_grad()
def test_a_frame_depends_on_no_later_frame(backbone, any_model, selector):
    """Without bounds and budget; at a fixed ratio it does."""
    inputs = videos_of(any_model, backbone.alone([[3, Clip(4), 5]])[0])
    scores = any_model.model.get_video_features(**inputs, pruning_ratio=0.0).token_scores[0]
    threshold = float(scores[1:].median())
    name = any_model.model.video_inputs[0]
    pixels = inputs[name]
    changed = pixels.clone()
    start = len(pixels) * 3 // 4  # the last frame
    changed[start:] = torch.randn(changed[start:].shape, generator=torch.Generator().manual_seed(5)) * 3
    call = any_model.model.get_video_features
    before, after = (call(**(inputs | {name: some}), score_threshold=threshold) for some in (pixels, changed))
    assert not torch.equal(before.token_scores[0][3], after.token_scores[0][3])
    assert torch.equal(before.keep_mask[0][:3], after.keep_mask[0][:3])
    for frame in range(3):
        torch.testing.assert_close(of_frame(before, frame), of_frame(after, frame), atol=2e-6, rtol=0)


@torch.no_grad()
def test_a_budget_in_place_of_a_share(backbone, any_model):
    """It equals the ratio with that count, and a video that fits it is left as it is."""
    inputs = backbone.batch(ROWS, "left")
    sizes = [mask.numel() for mask in any_model(**inputs, pruning_ratio=0.0).keep_mask]
    for budget in (13, [14, 13, 1000], 1000):
        budgets = budget if isinstance(budget, list) else [budget] * 3
        found = any_model(**inputs, video_token_budget=budget)
        kept = [int(mask.sum()) for mask in found.keep_mask]
        assert kept == [min(size, most) for size, most in zip(sizes, budgets, strict=True)]
        fixed = any_model(**inputs, pruning_ratio=ratios_of(found.keep_mask))
        assert torch.equal(found.logits, fixed.logits)


@torch.no_grad()
def test_settings_of_the_config_and_of_calls(backbone, any_model, monkeypatch):
    """A call's rule takes the place of the config's; its bounds and budget go with either threshold."""
    inputs, vision = backbone.batch(ROWS, "left"), any_model.config.vision_config

    def kept(**call: Any) -> list[int]:
        return [int(mask.sum()) for mask in any_model(**inputs, **call).keep_mask]

    low, high = level(any_model, inputs, 0.3), level(any_model, inputs, 0.7)
    by_low, by_high, by_ratio = kept(score_threshold=low), kept(score_threshold=high), kept(pruning_ratio=0.5)
    by_budget, capped = kept(video_token_budget=13), kept(score_threshold=low, video_token_budget=13)
    bounded = kept(score_threshold=low, min_pruning_ratio=0.5)
    assert by_low > by_high
    monkeypatch.setattr(vision, "score_threshold", low)
    assert kept() == by_low
    assert kept(score_threshold=high) == by_high
    assert kept(pruning_ratio=0.5) == by_ratio
    assert kept(video_token_budget=13) == capped
    assert kept(min_pruning_ratio=0.5) == bounded
    monkeypatch.setattr(vision, "video_token_budget", 13)
    assert kept() == capped
    assert kept(pruning_ratio=0.5) == by_ratio
    monkeypatch.setattr(vision, "score_threshold", None)
    assert kept() == by_budget
    assert kept(score_threshold=low) == capped


def test_from_pretrained_takes_them(backbone, any_model, tmp_path):
    any_model.save_pretrained(tmp_path)
    load = type(any_model).from_pretrained
    given = {"score_threshold": 0.25, "max_pruning_ratio": 0.9, "video_token_budget": 40}
    loaded = load(tmp_path, **given)
    assert {name: getattr(loaded.config.vision_config, name) for name in given} == given
    loaded.save_pretrained(tmp_path)
    assert KeepRule.of(load(tmp_path).config.vision_config) == KeepRule(None, 0.25, (0.0, 0.9), 40)
    by_ratio = load(tmp_path, pruning_ratio=0.5)  # in place of what is saved
    assert KeepRule.of(by_ratio.config.vision_config) == KeepRule(0.5, None, (0.0, 0.9), None)
    inputs = prompt(backbone.batch(ROWS, "left"))
    settings = GREEDY | {"return_dict_in_generate": True}
    kept = [mask.sum() for mask in by_ratio.generate(**inputs, **settings).keep_mask]
    assert kept == [mask.sum() for mask in by_ratio(**inputs).keep_mask]
    with pytest.raises(ValueError, match=r"`pruning_ratio` is 0.5 and `score_threshold` is 0.3"):
        load(tmp_path, pruning_ratio=0.5, score_threshold=0.3)


WAYS: dict[str, Any] = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "without_cache": {"use_cache": False},
    "static": pytest.param({"cache_implementation": "static"}, marks=since_transformers_5_23),
    "sampled": {"do_sample": True, "num_return_sequences": 2},
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@torch.no_grad()
def test_generate_continues_what_stays(backbone, any_model, selector, way):
    inputs = prompt(backbone.batch(ROWS, "left"))
    threshold = level(any_model, inputs, 0.5)
    expected = any_model(**inputs, score_threshold=threshold)
    sequences = []
    for rule in ({"score_threshold": threshold}, {"pruning_ratio": ratios_of(expected.keep_mask)}):
        torch.manual_seed(0)
        output = any_model.generate(**inputs, **(GREEDY | way), **rule, return_dict_in_generate=True)
        assert all(torch.equal(*masks) for masks in zip(output.keep_mask, expected.keep_mask, strict=True))
        sequences.append(output.sequences)
    assert torch.equal(*sequences)
    torch.manual_seed(0)
    config = GenerationConfig(score_threshold=threshold)
    assert torch.equal(any_model.generate(**inputs, **(GREEDY | way), generation_config=config), sequences[0])


@torch.no_grad()
def test_a_second_turn_over_the_cache(backbone, any_model, selector):
    """Whether or not something fell."""
    inputs = prompt(backbone.batch(ROWS, "left"))
    for threshold in (0.0, level(any_model, inputs, 0.5)):
        options = GREEDY | {"score_threshold": threshold}
        first = any_model.generate(**inputs, **options, return_dict_in_generate=True)
        turn = longer(inputs, first.sequences)
        expected = any_model.generate(**turn, **options)
        text = {name: turn[name] for name in ("attention_mask", "mm_token_type_ids")}
        reused = any_model.generate(turn["input_ids"], **text, past_key_values=first.past_key_values, **options)
        assert torch.equal(reused, expected)


@torch.no_grad()
def test_rows_of_one_length(backbone, any_model):
    inputs = backbone.batch(ROWS, "right")
    threshold = level(any_model, inputs, 0.5)
    expected = any_model(**inputs, score_threshold=threshold)
    longest = expected.logits.shape[1]
    found = any_model(**inputs, score_threshold=threshold, pruned_length=longest + 7)
    assert found.logits.shape[1] == longest + 7
    for index in range(len(ROWS)):
        torch.testing.assert_close(logits_of_row(found, inputs, index), logits_of_row(expected, inputs, index), **CLOSE)
    with pytest.raises(ValueError, match=f"`pruned_length` is {longest - 1}, but row"):
        any_model(**inputs, score_threshold=threshold, pruned_length=longest - 1)


@torch.no_grad()
def test_calls_that_share_layers_count_for_themselves(backbone, any_model):
    inputs, cache = backbone.batch(ROWS, "left"), TowerCache()
    for share in (0.3, 0.7):
        threshold = level(any_model, inputs, share)
        expected = any_model(**inputs, score_threshold=threshold)
        found = any_model(**inputs, score_threshold=threshold, tower_cache=cache)
        assert torch.equal(found.logits, expected.logits)


BAD_CALLS: list[tuple[dict[str, Any], str]] = [
    (
        {"score_threshold": 1.5},
        r"`score_threshold` is 1.5, but the scores of `selector` = 'scorer' lie in \[0",
    ),
    ({"score_threshold": -0.1}, "`score_threshold` is -0.1, but the scores"),
    ({"score_threshold": True}, "`score_threshold` is True, but must be a number"),
    ({"score_threshold": float("nan")}, "`score_threshold` is nan, but must be a number"),
    ({"score_threshold": "0.5"}, "`score_threshold` is '0.5', but must be a number"),
    ({"score_threshold": [0.5, 0.5, 0.5]}, "`score_threshold` is .*, but must be a number"),
    (
        {"score_threshold": 0.5, "pruning_ratio": 0.5},
        "`pruning_ratio` is 0.5 and `score_threshold` is 0.5",
    ),
    ({"video_token_budget": 50, "pruning_ratio": 0.5}, "`pruning_ratio` is 0.5 and `video_token_budget` is 50"),
    ({"min_pruning_ratio": 0.2, "pruning_ratio": 0.5}, "`pruning_ratio` is 0.5 and `min_pruning_ratio` is 0.2"),
    ({"min_pruning_ratio": 0.5}, "`min_pruning_ratio` is 0.5, `max_pruning_ratio` None: pass a `score_threshold` too"),
    ({"score_threshold": 0.5, "min_pruning_ratio": 0.6, "max_pruning_ratio": 0.4}, "`min_pruning_ratio` is 0.6, but"),
    (
        {"score_threshold": 0.5, "max_pruning_ratio": 1.5},
        r"`max_pruning_ratio` is 1.5, but must be a number in \[0, 1\]",
    ),
    ({"video_token_budget": 2}, "`video_token_budget` is 2, but the first frame of video 0, which always stays, has"),
    ({"video_token_budget": 0}, "`video_token_budget` is 0, but must be a positive int"),
    ({"video_token_budget": True}, "`video_token_budget` is True, but must be a positive int"),
    ({"video_token_budget": 20.0}, "`video_token_budget` is 20.0, but must be a positive int"),
    ({"video_token_budget": [50, 50]}, "`video_token_budget` holds 2 budgets, but the call has 3 videos"),
    ({"score_threshold": 0.5, "block_scores": torch.zeros(81)}, "`block_scores` came with `score_threshold`"),
    ({"video_token_budget": [50, None, 50]}, "`video_token_budget` is None, but must be a positive int"),
]


@pytest.mark.parametrize(("call", "message"), BAD_CALLS, ids=[str(call)[:60] for call, _ in BAD_CALLS])
def test_what_makes_no_sense_is_refused(backbone, any_model, call, message):
    inputs = backbone.batch(ROWS, "left")
    with pytest.raises(ValueError, match=message):
        any_model(**inputs, **call)
    with pytest.raises(ValueError, match=message):
        any_model.generate(**prompt(inputs), **GREEDY, **call)
    settings = {name: value for name, value in call.items() if name != "block_scores"}
    if settings == call:
        with pytest.raises(ValueError, match=message):
            any_model.generate(**prompt(inputs), **GREEDY, generation_config=GenerationConfig(**call))


def test_selectors_without_levels_and_scorers_without_training_are_refused(backbone):
    inputs = backbone.batch(ROWS, "left")
    with pytest.raises(ValueError, match="`selector` = 'random' are not comparable between videos"):
        backbone.model(selector="random")(**inputs, score_threshold=0.5)
    with pytest.raises(StrictDataclassError, match="`selector` = 'random' are not comparable"):
        backbone.model(selector="random", score_threshold=0.5)
    untrained = backbone.model(trained_scorer=False)
    with pytest.raises(ValueError, match=r"all scores are 0.1192: the scorer is untrained"):
        untrained(**inputs, score_threshold=0.5)
    untrained.config.vision_config.selector = "cosine"
    untrained(**inputs, score_threshold=0.5)


def test_scores_without_a_common_unit_are_refused(backbone):
    model, inputs = backbone.model(), backbone.batch(ROWS, "left")
    model.config.scorer_target = "answers"
    with pytest.raises(ValueError, match="`worth_unit` = None"):
        model(**inputs, score_threshold=0.5)
    model(**inputs, video_token_budget=20)
    model.config.worth_unit = 0.01
    model(**inputs, score_threshold=0.5)
    model.config.worth_unit = None
    model.config.vision_config.score_threshold = 0.5
    with pytest.raises(ValueError, match="`worth_unit` = None"):
        model.config.validate_vision_config()
    model.config.vision_config.selector = "cosine"
    model.config.validate_vision_config()


def test_a_config_is_checked_when_it_is_made(backbone):
    for settings, message in (
        ({"score_threshold": 2.5, "selector": "cosine"}, r"`selector` = 'cosine' lie in \[0.0, 2.0\]"),
        ({"score_threshold": float("inf")}, "`score_threshold` is inf"),
        ({"min_pruning_ratio": 0.6, "max_pruning_ratio": 0.4}, "`min_pruning_ratio` is 0.6"),
        ({"max_pruning_ratio": -0.1}, "`max_pruning_ratio` is -0.1"),
        ({"video_token_budget": 0}, "`video_token_budget` is 0"),
    ):
        with pytest.raises(StrictDataclassError, match=message):
            backbone.model(**settings)
