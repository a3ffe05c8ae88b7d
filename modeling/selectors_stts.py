"""The selectors: a selector is one function that ranks blocks, registered here.

Names are read without PyTorch, by commands, so a function imports what it computes with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


class Selector(NamedTuple):
    """
    rank: takes the tower, blocks (G, S, D) with zeros in padding slots, their grids, and `valid` (G, S) bool or None;
    returns scores (G,), higher for blocks to keep. The first line of its docstring describes it to users. is_learned:
    whether the scores come from the tower's `scorer`; then they bias layer `l + 1` and have a temporal loss. levels:
    lowest and highest score, where a score means the same in every video, as a threshold needs; else None.
    """

    rank: Callable[..., torch.Tensor]
    is_learned: bool = False
    levels: tuple[float, float] | None = None


def by_scorer(tower: Any, blocks: torch.Tensor, grids: list[tuple[int, int, int]], valid: Any) -> torch.Tensor:
    """learned: the scorer in the vision tower rates each block"""
    scores: torch.Tensor = tower.scorer(blocks, grids, valid)
    return scores


def by_change(tower: Any, blocks: torch.Tensor, grids: list[tuple[int, int, int]], valid: Any) -> torch.Tensor:
    """heuristic: blocks most similar to the previous frame are dropped first"""
    from .scoring_stts import temporal_similarity

    return 1 - temporal_similarity(blocks.detach(), grids)


def at_random(tower: Any, blocks: torch.Tensor, grids: list[tuple[int, int, int]], valid: Any) -> torch.Tensor:
    """baseline: blocks are drawn at random"""
    from .scoring_stts import random_ranking

    return random_ranking(grids, blocks.device, None if tower.training else tower.config.selector_seed)


SELECTORS = {
    "scorer": Selector(by_scorer, is_learned=True, levels=(0.0, 1.0)),
    "cosine": Selector(by_change, levels=(0.0, 2.0)),
    "random": Selector(at_random),
}
