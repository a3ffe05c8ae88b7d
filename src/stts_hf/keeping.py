"""How many blocks of each video stay, as calls, commands and pages hand it on: a `KeepRule`."""

from collections.abc import Mapping, Sequence
from typing import Any

from stts_hf.modeling.budget_stts import KEEP_ARGUMENTS, REPLACED, KeepRule
from stts_hf.modeling.settings_stts import take_given
from stts_hf.wording import percent


def take_rule(model_config: Any, options: dict[str, Any], *others: Mapping[str, Any]) -> KeepRule:
    """What a call says, whose options are taken out, and `others`, else the model. Refuses lists with `ValueError`."""
    given = take_given(options, KEEP_ARGUMENTS)
    for name, value in [*given.items(), *(item for other in others for item in other.items())]:
        if isinstance(value, list | tuple):
            raise ValueError(f"`{name}` is {value!r}, but must be one number for all videos. Use one call for each.")
    rule: KeepRule = model_config.keep_rule(given, *others)
    return rule


def own_rule(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a row, or the like, says of how many blocks stay; empty where it leaves that to others."""
    return {name: row[name] for name in KEEP_ARGUMENTS if row.get(name) is not None}


def rule_arguments(rule: KeepRule) -> dict[str, Any]:
    """The arguments of a model's call that say the same."""
    values = (rule.ratio, rule.threshold, *(rule.bounds if rule.threshold is not None else (None, None)), rule.budget)
    return {name: value for name, value in zip(KEEP_ARGUMENTS, values, strict=True) if value is not None}


def share_budget(budget: int, grids: Sequence[tuple[int, int, int]]) -> list[int]:
    """
    A request's budget for each of its videos `(T, rows, columns)`: its first frame, and by its other blocks a share of
    what is left. Raises `ValueError` where it is less than the first frames.
    """
    first = [rows * columns for _, rows, columns in grids]
    rest = [(frames - 1) * blocks for (frames, _, _), blocks in zip(grids, first, strict=True)]
    if budget < sum(first):
        raise ValueError(
            f"`video_token_budget` is {budget}, but the first frames of the videos, which stay, have {sum(first)} "
            "tokens. Pass at least as many, or make frames smaller."
        )
    left = min(budget - sum(first), sum(rest))
    return [blocks + left * others // max(sum(rest), 1) for blocks, others in zip(first, rest, strict=True)]


def set_rule(vision_config: Any, given: Mapping[str, Any]) -> None:
    """Puts what `given` says of it into a vision config; a ratio takes the place of a threshold and a budget."""
    KeepRule.of(vision_config, given)
    others = dict.fromkeys(REPLACED) if given.get("pruning_ratio") is not None else {}
    for name, value in (others | {name: value for name, value in given.items() if value is not None}).items():
        setattr(vision_config, name, value)


def in_words(rule: KeepRule) -> str:
    """Such as "50% dropped", or "scores from 0.05 kept, at most 512 tokens"."""
    if rule.ratio is not None:
        return f"{percent(rule.ratio)} dropped"  # type: ignore[arg-type]  # one number
    words = [] if rule.threshold is None else [f"scores from {rule.threshold:g} kept"]
    if rule.threshold is not None and rule.bounds != (0.0, 1.0):
        words.append(f"{percent(rule.bounds[0])} to {percent(rule.bounds[1])} dropped")
    return ", ".join([*words, *([] if rule.budget is None else [f"at most {rule.budget} tokens"])])
