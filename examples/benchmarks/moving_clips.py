"""Drawn clips of known motion, and how well a ranking of blocks keeps what moves."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from stts_hf.modeling.scoring_stts import num_kept_blocks, select_blocks

from ..clips.drawing import COLOURS, draw_background, draw_shape

SHAPES = ("circle", "square", "triangle", "cross", "ring")
SNOW = 60.0  # standard deviation, of 255


@dataclass(frozen=True)
class Clip:
    """frames: uint8 (T, side, side, 3). moving: bool (T, cells, cells), False in frame 0."""

    frames: np.ndarray
    moving: np.ndarray


def draw_clips(number: int, num_frames: int, side: int, cells: int) -> Iterator[Clip]:
    """
    Clips in which two shapes cross a textured background. A region of it is full of snow, which changes all the time
    and counts as no motion.
    """
    for seed in range(number):
        random = np.random.default_rng(seed)
        background = draw_background(random, side, side)
        left, top = random.integers(0, side * 2 // 3, 2)
        snow = np.s_[top : top + side // 3, left : left + side // 3]
        shapes, colours = random.permutation(SHAPES)[:2], random.permutation(list(COLOURS.values()))[:2]
        starts, ends = random.uniform(0.1, 0.9, (2, 2, 2))
        frames, moving = [], np.zeros((num_frames, cells, cells), bool)
        before = None
        for time in np.linspace(0, 1, num_frames):
            frame, plain = background.copy(), np.full_like(background, 128.0)
            frame[snow] += random.normal(0, SNOW, frame[snow].shape[:2])[..., None]
            for shape, colour, start, end in zip(shapes, colours, starts, ends, strict=True):
                for canvas in (frame, plain):
                    draw_shape(canvas, shape, tuple(colour), 0.1, tuple(start + (end - start) * time))
            if before is not None:
                changed = (np.abs(plain - before).max(-1) > 24).reshape(cells, side // cells, cells, side // cells)
                moving[len(frames)] = changed.mean((1, 3)) > 0.08
            before = plain
            frames.append(frame.clip(0, 255).astype(np.uint8))
        yield Clip(np.stack(frames), moving)


def correlate(scores: torch.Tensor, moving: np.ndarray) -> float:
    """
    Spearman's correlation of scores and motion, (T, n) both, over the frames `t >= 1`. Equal values share their mean
    rank. NaN where one of them is constant.
    """
    first, second = (_ranks(values[1:].ravel()) for values in (scores.numpy(), moving))
    return float(np.corrcoef(first, second)[0, 1]) if first.std() and second.std() else float("nan")


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[inverse]


def share_kept(scores: torch.Tensor, moving: np.ndarray, pruning_ratio: float) -> float:
    """
    Share of what moves, (T, n), that lies in the blocks kept when scores (T, n) rank them, over the frames `t >= 1`.
    NaN where nothing moves.
    """
    frames, blocks = scores.shape
    kept = [num_kept_blocks(frames, blocks, pruning_ratio)]
    keep_mask, _ = select_blocks(scores.flatten(), [(frames, 1, blocks)], kept)
    total = moving[1:].sum()
    return float((moving * keep_mask.view_as(scores).numpy())[1:].sum() / total) if total else float("nan")
