"""Dims the dropped blocks of a frame, and checks the arguments of all pictures.

Processors resize whole frames, so blocks cover a frame's full extent in proportion, at any resolution.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image, ImageOps

Array = np.ndarray | torch.Tensor
DIMMED_BLACK, DIMMED_WHITE = (18, 20, 28), (110, 112, 120)
BORDER = (200, 210, 225)
HATCH = 24  # lines along a frame's longer side, which show dropped blocks of dark pictures
ROUNDING = 1e-6  # seconds


def dim_dropped_blocks(
    frame: np.ndarray, keep: np.ndarray, grid: tuple[int, int], size: tuple[int, int] | None = None
) -> Image.Image:
    """A frame `(H, W, 3)`, of this size, its blocks that are not in `keep` `(n,)` dark, grey and hatched."""
    image = Image.fromarray(np.ascontiguousarray(frame))
    if size is not None:
        image = image.resize(size, Image.Resampling.LANCZOS)
    dimmed = ImageOps.colorize(ImageOps.grayscale(image), DIMMED_BLACK, DIMMED_WHITE)
    mask = Image.fromarray(keep.reshape(grid)).resize(image.size, Image.Resampling.NEAREST)  # blocks need not divide it
    tile = Image.composite(image, dimmed, mask)
    kept = np.asarray(mask)  # (H, W)
    step, (rows, columns) = max(8, max(kept.shape) // HATCH), np.ogrid[: kept.shape[0], : kept.shape[1]]
    lines = ~kept & ((rows + columns) % step < max(1, step // 12))
    tile.paste(Image.blend(tile, Image.new("RGB", tile.size, BORDER), 0.3), mask=Image.fromarray(lines))
    border = np.zeros_like(kept)
    border[1:] |= kept[1:] != kept[:-1]
    border[:, 1:] |= kept[:, 1:] != kept[:, :-1]
    line = Image.blend(tile, Image.new("RGB", tile.size, BORDER), 0.55)
    return Image.composite(line, tile, Image.fromarray(border))


def frame_at(moments: Sequence[float] | np.ndarray, timestamps: Sequence[float] | np.ndarray) -> np.ndarray:
    """Returns indices (M,) of the frames that are on screen at `moments` (M,), given when each begins, in seconds."""
    return (np.searchsorted(np.asarray(timestamps), np.asarray(moments) + ROUNDING, side="right") - 1).clip(min=0)


def fit(height: int, width: int, longest_side: int) -> tuple[int, int]:
    """Returns height and width scaled down to at most `longest_side`, rounded to even numbers, as codecs need."""
    scale = min(1.0, longest_side / max(height, width))
    return max(2, round(height * scale / 2) * 2), max(2, round(width * scale / 2) * 2)


def as_array(values: Array) -> np.ndarray:
    """Returns the values as a NumPy array; bfloat16, which NumPy lacks, becomes float32."""
    if not isinstance(values, torch.Tensor):
        return np.asarray(values)
    values = values.detach().cpu()
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()


def check_outputs(
    frames: np.ndarray | int,
    mask: np.ndarray,
    grid: tuple[int, int],
    timestamps: Sequence[float] | None = None,
    scores: np.ndarray | None = None,
    tubelet: int = 1,
) -> None:
    """Raises `TypeError` or `ValueError` unless all shapes and dtypes fit each other. frames: or only their number."""
    if isinstance(frames, np.ndarray):
        if frames.dtype != np.uint8:
            raise TypeError(f"`frames` has dtype {frames.dtype}, but must be uint8 (0 to 255).")
        if frames.ndim != 4 or frames.shape[-1] != 3 or 0 in frames.shape:
            raise ValueError(f"`frames` has shape {frames.shape}, but must be (F, H, W, 3) with at least one frame.")
        frames = len(frames)
    if tubelet < 1:
        raise ValueError(f"`tubelet` is {tubelet}, but must be at least 1.")
    if mask.dtype != np.bool_:
        raise TypeError(f"`keep_mask` has dtype {mask.dtype}, but must be bool, True where a block was kept.")
    rows, cols = grid
    of_blocks = (math.ceil(frames / tubelet), rows * cols)
    times = None if timestamps is None else np.asarray(timestamps)
    arrays = {"keep_mask": (mask, of_blocks), "token_scores": (scores, of_blocks), "timestamps": (times, (frames,))}
    for name, (array, shape) in arrays.items():
        if array is not None and array.shape != shape:
            raise ValueError(
                f"`{name}` has shape {array.shape}, but {frames} frames, {tubelet} to a tubelet, with a `grid` of "
                f"{rows} x {cols} blocks need {shape}."
            )
