"""Rounds in which variants of one measurement take turns."""

from collections.abc import Callable, Sequence
from typing import Any

from tqdm import tqdm

Variant = dict[str, Any]


def take_turns(
    title: str,
    variants: Sequence[Variant],
    repeats: int,
    warm_up: Callable[[Variant], object],
    run: Callable[[Variant], object],
) -> list[list[str]]:
    """
    Calls `warm_up` with each variant, then `run` in `repeats` rounds with each whose "status" is still "ok". Every
    round begins with another variant, so that drift of the machine affects all alike. Returns the variants' names in
    the order in which they ran in each round.
    """
    order = []
    with tqdm(total=len(variants) * (1 + repeats), desc=title, unit="pass", leave=False, disable=None) as bar:
        for variant in variants:
            warm_up(variant)
            bar.update()
        for number in range(repeats):
            turn = [variant for variant in variants if variant["status"] == "ok"]
            first = number % max(len(turn), 1)
            turn = turn[first:] + turn[:first]
            for variant in turn:
                run(variant)
                bar.update()
            if turn:
                order.append([variant["name"] for variant in turn])
    return order
