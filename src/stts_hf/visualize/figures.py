"""A figure for papers and slides: selectors side by side."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from stts_hf.selectors import OTHER, SELECTORS

from .dimming import Array, as_array, check_outputs, dim_dropped_blocks

SCORES = "viridis"
COLUMNS = 8


def colour_of(selector: str) -> str:
    """As `#rrggbb`."""
    return SELECTORS[selector].colour if selector in SELECTORS else OTHER


def score_range(scores: np.ndarray) -> tuple[float, float]:
    """Lowest and highest of scores `(T, n)` in frames `t >= 1`; those of frame 0 are meaningless."""
    rest = scores[1:] if len(scores) > 1 else scores
    rest = rest[np.isfinite(rest)]
    return (float(rest.min()), float(rest.max())) if rest.size else (0.0, 1.0)


def comparison(
    frames: Array, keep_masks: Mapping[str, Array], grid: tuple[int, int], timestamps: Sequence[float], tubelet: int = 1
) -> Figure:
    """
    Selectors side by side, as in the paper's qualitative figures: a row of at most 8 frames, spread evenly from the
    first to the last, and for each selector a row with its dropped blocks dimmed.

    keep_masks: by label of the row, usually a selector. Other arguments and errors are those of `contact_sheet`.
    """
    frames = as_array(frames)
    masks = {name: as_array(mask) for name, mask in keep_masks.items()}
    for mask in masks.values():
        check_outputs(frames, mask, grid, timestamps, None, tubelet)
    places = np.unique(np.linspace(0, len(frames) - 1, min(COLUMNS, len(frames))).round().astype(int)).tolist()
    width = 11 / max(len(places), 4)
    height = 0.97 * width * frames.shape[1] / frames.shape[2]
    tight = ConstrainedLayoutEngine(w_pad=0.02, h_pad=0.02, wspace=0.01, hspace=0.01)
    figure = Figure(figsize=(1 + width * len(places), 0.25 + (1 + len(masks)) * (height + 0.2)), layout=tight)
    first, *rows = figure.subplots(1 + len(masks), len(places), squeeze=False)
    for axes, place in zip(first, places, strict=True):
        axes.set_title(f"{timestamps[place]:.2f} s", fontsize=8, color="#333333", pad=3)
        _show(axes, frames[place], "#999999", 0.5)
    _label(first[0], "video", "#555555", f"{len(frames)} frames")
    for row, (name, mask) in zip(rows, masks.items(), strict=True):
        for axes, place in zip(row, places, strict=True):
            keep = mask[place // tubelet]
            _show(axes, dim_dropped_blocks(frames[place], keep, grid), colour_of(name), 1.4)
            axes.set_xlabel(f"{keep.sum()}/{len(keep)}", fontsize=7, color="#555555", labelpad=2)
        _label(row[0], name, colour_of(name), f"{mask.mean():.1%} kept")
    return figure


def distribution(shares: Array, per_second: Array, levels: Array, curve: Sequence[float], threshold: float) -> Figure:
    """What a threshold keeps: histograms over videos of shares and of tokens per second; mean shares by `levels`."""
    figure = Figure(figsize=(11, 3), layout="constrained")
    of_videos, of_seconds, by_threshold = figure.subplots(1, 3)
    of_videos.hist(100 * as_array(shares), bins=20, range=(0, 100), color=OTHER)
    of_videos.set(xlabel="video tokens kept, %", ylabel="videos")
    of_seconds.hist(as_array(per_second), bins=20, color=OTHER)
    of_seconds.set(xlabel="tokens kept per second of video", ylabel="videos")
    by_threshold.plot(as_array(levels), [100 * share for share in curve], color=OTHER)
    by_threshold.axvline(threshold, color="#999999", linestyle=":")
    by_threshold.set(xlabel="score threshold", ylabel="mean of videos kept, %", ylim=(0, 100))
    return figure


def _show(axes: Axes, picture: Any, colour: str, linewidth: float) -> None:
    axes.imshow(picture)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(edgecolor=colour, linewidth=linewidth)


def _label(axes: Axes, name: str, colour: str, detail: str) -> None:
    axes.set_ylabel(f"{name}\n{detail}", fontsize=8, color=colour, rotation=0, ha="right", va="center", labelpad=6)
