"""The study's clips with what moves in them, block by block. Distraction, which misleads a heuristic, is no motion."""

from collections.abc import Iterator

import numpy as np

from ..benchmarks.moving_clips import Clip
from ..benchmarks.moving_clips import share_kept as share_kept
from .distraction import Look
from .questions import compose_short


def draw_clips(number: int, num_frames: int, side: int, cells: int, seed: int = 0) -> Iterator[Clip]:
    """Clips of the study's kind, at 4 frames per second, with motion per cell of the frame's `cells` x `cells`."""
    for index in range(number):
        scene, _ = compose_short(seed + index, look=Look(1.0))
        times = [frame / 4 for frame in range(num_frames)]
        yield Clip(scene.draw(times, side), scene.motion(times, cells))


def share_of_blocks(moving: np.ndarray, grid: tuple[int, ...]) -> np.ndarray | None:
    """
    Share of each block's patches that move, (T, n). moving: (T, rows, columns) of patches. grid: frames, and rows and
    columns of blocks, as the model sees them. None where the model sees other frames, or blocks that do not hold whole
    patches.
    """
    frames, rows, columns = grid
    if len(moving) != frames or moving.shape[1] % rows or moving.shape[2] % columns:
        return None
    blocks = moving.reshape(frames, rows, moving.shape[1] // rows, columns, -1)
    return blocks.mean(axis=(2, 4)).reshape(frames, rows * columns)
