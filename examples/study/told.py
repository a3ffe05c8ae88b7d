"""
The ceiling of every ranking: one that is told what matters, of true masks. What a question is about, or what all
questions about a clip are about, stays first: what moves, what flashes up, and what stands still.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from stts_hf.modeling.scoring_stts import select_blocks

from .motion import share_of_blocks


def tell(tower: Any, covers: np.ndarray, things: Iterable[int], grid: tuple[int, ...]) -> None:
    """Ranks the blocks of the tower's next videos, which must all be this one, by `rank_things`, whatever they show."""
    scores = torch.from_numpy(rank_things(covers, things, grid).ravel())

    def rank_blocks(blocks: torch.Tensor, pruning: Any, *_: Any) -> tuple[dict[str, Any], torch.Tensor, None]:
        told = scores.to(blocks.device).repeat(len(pruning.grids))
        keep_mask, kept_blocks = select_blocks(told, pruning.grids, pruning.num_kept)
        return {"token_scores": pruning.per_video(told), "keep_mask": pruning.per_video(keep_mask)}, kept_blocks, None

    tower.rank_blocks = rank_blocks


def rank_things(covers: np.ndarray, things: Iterable[int], grid: tuple[int, ...]) -> np.ndarray:
    """
    Scores (T, n) of blocks. covers: (things, T, rows, columns), in percent of patches, as `make-dataset` counts them.
    things: those that matter. grid: frames, rows and columns of blocks.

    Of each thing the blocks that it covers most come first, in the frames where it is first and last seen (what
    comes, goes or changes shows there) before the others; things take turns. Raises `ValueError` where the model sees
    other frames.
    """
    scores: np.ndarray | None = None
    for thing in things:
        share = share_of_blocks(covers[thing], grid)
        if share is None:
            raise ValueError(f"masks {covers.shape} are not of the frames and blocks {grid} that the model sees")
        seen = np.flatnonzero(share.any(1))
        worth = share / 100
        worth[seen[[0, -1]] if len(seen) else []] *= 2
        turn = np.empty(worth.size)
        turn[np.argsort(-worth.ravel(), kind="stable")] = np.arange(worth.size)
        found = np.where(share > 0, 1 / (1 + turn.reshape(share.shape)), 0)
        scores = found if scores is None else np.maximum(scores, found)
    return np.zeros(grid[0] * grid[1] * grid[2]) if scores is None else scores


def together(rows: Sequence[dict[str, Any]], by_clip: bool) -> list[tuple[list[int], list[dict[str, Any]]]]:
    """Questions that are told the same, with the things that matter to them: those about a clip, or each by itself."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["clip"] if by_clip else row["id"], []).append(row)
    return [(sorted({thing for row in some for thing in row["things"]}), some) for some in groups.values()]
