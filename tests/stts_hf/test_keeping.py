"""How many blocks stay, as it goes from commands and calls to the model."""

from types import SimpleNamespace
from typing import Any

import pytest

from stts_hf.keeping import in_words, rule_arguments, set_rule, share_budget, take_rule
from stts_hf.modeling.budget_stts import KEEP_ARGUMENTS, KeepRule
from tests.checkpoints import load_tiny

RULES = {
    "50% dropped": KeepRule(0.5),
    "scores from 0.05 kept": KeepRule(threshold=0.05),
    "scores from 0.05 kept, 10% to 90% dropped": KeepRule(threshold=0.05, bounds=(0.1, 0.9)),
    "scores from 0.05 kept, at most 64 tokens": KeepRule(threshold=0.05, budget=64),
    "at most 64 tokens": KeepRule(budget=64),
}


@pytest.fixture(scope="module")
def config() -> Any:
    return load_tiny().config


@pytest.mark.parametrize("words", RULES)
def test_a_rule_in_words_and_back_as_arguments_of_a_call(config, words):
    rule = RULES[words]
    assert in_words(rule) == words
    assert config.keep_rule(rule_arguments(rule)) == rule


def test_a_rule_is_taken_out_of_options(config):
    options = {"score_threshold": 0.1, "max_pruning_ratio": None, "max_new_tokens": 3}
    assert take_rule(config, options) == KeepRule(threshold=0.1)
    assert options == {"max_new_tokens": 3}
    assert take_rule(config, {"score_threshold": 0.1}, {"pruning_ratio": 0.2}) == KeepRule(0.2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pruning_ratio": 0.5, "score_threshold": 0.1}, "leave out one"),
        ({"pruning_ratio": [0.5, 0.6]}, "must be one number for all videos"),
        ({"score_threshold": 1.5}, r"lie in \[0.0, 1.0\]"),
        ({"score_threshold": 0.1, "min_pruning_ratio": 0.9, "max_pruning_ratio": 0.1}, "must be at most"),
        ({"min_pruning_ratio": 0.9}, "pass a `score_threshold` too"),
        ({"video_token_budget": 0}, "must be a positive int"),
    ],
    ids=["both", "a list", "out of range", "bounds", "a bound alone", "budget"],
)
def test_what_does_not_fit_is_one_error(config, given, message):
    with pytest.raises(ValueError, match=message):
        take_rule(config, given)


def test_a_ratio_in_a_config_takes_the_place_of_a_threshold_and_the_other_way_round():
    vision: Any = SimpleNamespace(**dict.fromkeys(KEEP_ARGUMENTS), selector="scorer")
    vision.pruning_ratio, vision.min_pruning_ratio, vision.max_pruning_ratio = 0.5, 0.0, 1.0
    set_rule(vision, {"score_threshold": 0.1, "max_pruning_ratio": 0.9})
    assert KeepRule.of(vision) == KeepRule(threshold=0.1, bounds=(0.0, 0.9))
    set_rule(vision, {"pruning_ratio": 0.3, "score_threshold": None})
    assert KeepRule.of(vision).ratio == 0.3


def test_a_requests_budget_is_shared_by_its_videos_tokens():
    grids = [(5, 2, 2), (9, 2, 2), (1, 2, 2)]
    assert share_budget(1000, grids) == [20, 36, 4]
    assert share_budget(12, grids) == [4, 4, 4]
    assert share_budget(36, grids) == [4 + 8, 4 + 16, 4]
    assert share_budget(37, grids) == [4 + 8, 4 + 16, 4]
    with pytest.raises(ValueError, match=r"`video_token_budget` is 11, .* have 12 tokens"):
        share_budget(11, grids)
