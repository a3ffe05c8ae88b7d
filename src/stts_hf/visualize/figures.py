"""Figures for papers and slides: selectors side by side, heat maps of their scores, tokens kept over time."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from .dimming import Array, as_array, check_mask, check_outputs, dim_dropped_blocks

# Purple and green as in the paper's figures.
COLOURS = {"scorer": "#7a4fd0", "cosine": "#1f9d61", "random": "#c4761b"}
OTHER = "#4a6fa5"
SCORES = "viridis"
COLUMNS = 8


def colour_of(selector: str) -> str:
    """As `#rrggbb`."""
    return COLOURS.get(selector, OTHER)


def score_range(scores: np.ndarray) -> tuple[float, float]:
    """
    Lowest and highest of scores `(T, n)` in frames `t >= 1`. Frame 0 is always kept, and its scores mean nothing:
    cosine has no frame before to compare it with.
    """
    rest = scores[1:] if len(scores) > 1 else scores
    rest = rest[np.isfinite(rest)]
    return (float(rest.min()), float(rest.max())) if rest.size else (0.0, 1.0)


def comparison(
    frames: Array,
    keep_masks: Mapping[str, Array],
    grid: tuple[int, int],
    timestamps: Sequence[float],
    tubelet: int = 1,
    columns: int = COLUMNS,
) -> Figure:
    """
    Selectors side by side, as in the paper's qualitative figures: a row of frames as they are, and a row for each
    selector with the blocks dimmed that it drops.

    Args:
        frames: `(F, H, W, 3)` uint8.
        keep_masks: selector, or what else to call a row, and its mask `(T, n)` bool.
        grid: rows and columns of blocks in a frame.
        timestamps: `F` times in seconds.
        tubelet: how many of the `F` frames the model takes for one of its `T`.
        columns: most frames to show, spread evenly over the video with its first and last.

    Raises:
        ValueError, TypeError: as `contact_sheet`.
    """
    frames = as_array(frames)
    masks = {name: as_array(mask) for name, mask in keep_masks.items()}
    for mask in masks.values():
        check_outputs(frames, mask, grid, timestamps, None, tubelet)
    figure, rows, places = _rows(frames, timestamps, 1 + len(masks), columns, below=0.2)
    for axes, place in zip(rows[0], places, strict=True):
        axes.imshow(frames[place])
    _label(rows[0][0], "video", "#555555", f"{len(frames)} frames")
    for row, (name, mask) in zip(rows[1:], masks.items(), strict=True):
        for axes, place in zip(row, places, strict=True):
            axes.imshow(dim_dropped_blocks(frames[place], mask[place // tubelet], grid))
            kept = int(mask[place // tubelet].sum())
            axes.set_xlabel(f"{kept}/{mask.shape[1]}", fontsize=7, color="#555555", labelpad=2)
            _frame_axes(axes, colour_of(name))
        _label(row[0], name, colour_of(name), f"{mask.mean():.1%} kept")
    return figure


def heat_maps(
    frames: Array,
    token_scores: Mapping[str, Array],
    grid: tuple[int, int],
    timestamps: Sequence[float],
    tubelet: int = 1,
    columns: int = COLUMNS,
) -> Figure:
    """
    What the blocks were ranked by, a row for each selector: `(T, n)` scores over the frames in grey, each row in the
    range that its scores have in frames `t >= 1`. Other arguments and errors as in `comparison`.
    """
    frames = as_array(frames)
    scores = {name: as_array(values) for name, values in token_scores.items()}
    for values in scores.values():
        check_outputs(frames, None, grid, timestamps, values, tubelet)
    figure, rows, places = _rows(frames, timestamps, len(scores), columns, below=0.04)
    height, width = frames.shape[1:3]
    extent = (-0.5, width - 0.5, height - 0.5, -0.5)
    for row, (name, values) in zip(rows, scores.items(), strict=True):
        low, high = score_range(values)
        image: Any = None
        for axes, place in zip(row, places, strict=True):
            axes.imshow(frames[place].mean(axis=-1), cmap="gray", vmin=0, vmax=255)
            blocks = values[place // tubelet].reshape(grid)
            image = axes.imshow(blocks, cmap=SCORES, vmin=low, vmax=high, alpha=0.65, extent=extent)
            _frame_axes(axes, colour_of(name))
        _label(row[0], name, colour_of(name), "score")
        bar = figure.colorbar(image, ax=row, fraction=0.012, pad=0.008)
        bar.ax.tick_params(labelsize=6)
    return figure


def timeline(keep_masks: Mapping[str, Array], timestamps: Sequence[float], tubelet: int = 1) -> Figure:
    """
    Tokens kept per frame (per tubelet, where the model takes several frames for one), a line for each selector with its
    mask `(T, n)` bool, over the `F` `timestamps` in seconds. Errors as in `comparison`.
    """
    figure = Figure(figsize=(9, 3), layout="constrained")
    axes = figure.subplots()
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    for name, keep_mask in keep_masks.items():
        mask = as_array(keep_mask)
        check_mask(mask, len(timestamps), (1, mask.shape[-1]), timestamps, None, tubelet)
        starts = np.asarray(timestamps)[::tubelet]
        kept = mask.sum(axis=1)
        label = f"{name}: {mask.sum():,} of {mask.size:,}"
        axes.plot(starts, kept, "o-", color=colour_of(name), label=label, linewidth=1.4, markersize=3.5, alpha=0.85)
        axes.set_ylim(0, mask.shape[1] * 1.04)
    axes.set(xlabel="seconds", ylabel=f"tokens kept per {'frame' if tubelet == 1 else f'{tubelet} frames'}")
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))
    return figure


def _rows(
    frames: np.ndarray, timestamps: Sequence[float], rows: int, columns: int, below: float
) -> tuple[Figure, np.ndarray, list[int]]:
    """
    A figure with axes (rows, columns) for pictures, the times above, and so many inches of text below each row; and
    which frames are in the columns.
    """
    if columns < 1:
        raise ValueError(f"`columns` is {columns}, but must be at least 1.")
    places = np.unique(np.linspace(0, len(frames) - 1, min(columns, len(frames))).round().astype(int)).tolist()
    width = 11 / max(len(places), 4)
    height = 0.97 * width * frames.shape[1] / frames.shape[2]
    tight = ConstrainedLayoutEngine(w_pad=0.02, h_pad=0.02, wspace=0.01, hspace=0.01)
    figure = Figure(figsize=(1 + width * len(places), 0.25 + rows * (height + below)), layout=tight)
    axes = figure.subplots(rows, len(places), squeeze=False)
    for some in axes.flat:
        some.set_xticks([])
        some.set_yticks([])
        _frame_axes(some, "#999999", 0.5)
    for some, place in zip(axes[0], places, strict=True):
        some.set_title(f"{timestamps[place]:.2f} s", fontsize=8, color="#333333", pad=3)
    return figure, axes, places


def _frame_axes(axes: Axes, colour: str, linewidth: float = 1.4) -> None:
    for spine in axes.spines.values():
        spine.set(edgecolor=colour, linewidth=linewidth)


def _label(axes: Axes, name: str, colour: str, detail: str) -> None:
    axes.set_ylabel(f"{name}\n{detail}", fontsize=8, color=colour, rotation=0, ha="right", va="center", labelpad=6)
