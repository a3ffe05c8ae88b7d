"""Whether the blocks that a selector keeps are those that move, on clips that are drawn, so that their motion is known.

Drift of the camera, flicker and snow are nobody's motion: they are what a heuristic that goes by change falls for.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from stts_hf.evaluation.questions import compose_short
from stts_hf.evaluation.statistics import rank_correlation
from stts_hf.modeling.scoring_stts import num_kept_blocks, select_blocks

FPS = 4.0  # at which the study looks at its clips


@dataclass(frozen=True)
class Clip:
    """frames: uint8 (T, side, side, 3). moving: bool (T, cells, cells), as `Scene.motion`."""

    frames: np.ndarray
    moving: np.ndarray


def draw_clips(number: int, num_frames: int, side: int, cells: int, seed: int = 0) -> Iterator[Clip]:
    """Clips of the study's kind, at 4 frames per second, with motion per cell of the frame's `cells` x `cells`."""
    for index in range(number):
        scene, _ = compose_short(seed + index, busy=True)
        times = [frame / FPS for frame in range(num_frames)]
        yield Clip(scene.draw(times, side), scene.motion(times, cells))


def share_of_blocks(moving: np.ndarray, grid: tuple[int, ...]) -> np.ndarray | None:
    """
    Which patches (T, rows, columns) move, as the share of each block's, (T, n). grid: frames, and rows and columns of
    blocks, as the model sees them. None where the model sees other frames, or blocks that do not hold whole patches.
    """
    frames, rows, columns = grid
    if len(moving) != frames or moving.shape[1] % rows or moving.shape[2] % columns:
        return None
    blocks = moving.reshape(frames, rows, moving.shape[1] // rows, columns, -1)
    return blocks.mean(axis=(2, 4)).reshape(frames, rows * columns)


def correlate(scores: torch.Tensor, moving: np.ndarray) -> float:
    """Spearman's correlation of scores and motion, (T, n) both, over the frames `t >= 1`; NaN where one is constant."""
    return rank_correlation(scores[1:].numpy(), moving[1:])


def share_kept(scores: torch.Tensor, moving: np.ndarray, pruning_ratio: float) -> float:
    """
    How much of what moves, (T, n), is in blocks that stay when scores (T, n) rank them, over the frames `t >= 1`; NaN
    where nothing moves.
    """
    frames, blocks = scores.shape
    kept = [num_kept_blocks(frames, blocks, pruning_ratio)]
    keep_mask, _ = select_blocks(scores.flatten(), [(frames, 1, blocks)], kept)
    total = moving[1:].sum()
    return float((moving * keep_mask.view_as(scores).numpy())[1:].sum() / total) if total else float("nan")
