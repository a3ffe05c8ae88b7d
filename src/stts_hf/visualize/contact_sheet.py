"""A contact sheet: every sampled frame with its dropped blocks dimmed."""

import math
import textwrap
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from .dimming import as_array, check_outputs, dim_dropped_blocks

MARGIN = 16
GAP = 10
BACKGROUND = (17, 19, 24)
TEXT = (236, 238, 242)
FAINT_TEXT = (150, 156, 168)
KEPT = (88, 196, 132)
TRACK = (52, 56, 66)
MAX_WIDTH = 1920
TILE_WIDTHS = (150, 400)


def contact_sheet(
    frames: np.ndarray | torch.Tensor,
    keep_mask: np.ndarray | torch.Tensor,
    grid: tuple[int, int],
    timestamps: Sequence[float] | None = None,
    token_scores: np.ndarray | torch.Tensor | None = None,
    columns: int | None = None,
    title: str | None = None,
    tubelet: int = 1,
    note: str = "",
) -> Image.Image:
    """
    Draws the frames of one video in reading order, dropped blocks dark and grey. Below each frame are its time, the
    number of kept blocks, and a bar of that share.

    Args:
        frames: `(F, H, W, 3)` uint8, the frames of the video that the model saw, at any resolution.
        keep_mask: `(T, n)` bool, as in the model's outputs; blocks row by row.
        grid: rows and columns of blocks in a frame, `rows * cols == n`.
        timestamps: `F` times in seconds.
        token_scores: `(T, n)` scores in [0, 1]; adds each frame's mean score to its label.
        columns: frames per row; chosen by the number of frames when not given.
        title: a line above the summary, such as the question.
        tubelet: how many of the `F` frames the model merges into one of its `T`. They are drawn side by side.
        note: a sentence for whoever sees the picture, under the summary.

    Returns:
        An RGB image, at most 1920 pixels wide unless `columns` asks for more.

    Raises:
        ValueError: shapes that do not fit each other, or `columns` below 1.
        TypeError: frames that are not uint8, or a mask that is not bool.
    """
    frames, mask = as_array(frames), as_array(keep_mask)
    scores = None if token_scores is None else as_array(token_scores)
    check_outputs(frames, mask, grid, timestamps, scores, tubelet)
    if columns is not None and columns < 1:
        raise ValueError(f"`columns` is {columns}, but must be at least 1.")

    num_tiles, height, width = len(mask), frames.shape[1], tubelet * frames.shape[2]
    columns = min(columns or _choose_columns(num_tiles, height, width), num_tiles)
    rows = math.ceil(num_tiles / columns)
    fitting = (MAX_WIDTH - 2 * MARGIN + GAP) // columns - GAP
    tile_width = int(np.clip(fitting, *TILE_WIDTHS))
    tile_height = max(1, round(tile_width * height / width))

    label_height = _label_size(tile_width) + 18
    sheet_width = max(2 * MARGIN + columns * (tile_width + GAP) - GAP, 640)
    headlines = _wrap(title, sheet_width - 2 * MARGIN) if title else []
    notes = _wrap(note, sheet_width - 2 * MARGIN) if note else []
    header_height = MARGIN + 32 * len(headlines) + 34 + 22 * len(notes)
    sheet_height = header_height + rows * (tile_height + label_height + GAP) - GAP + MARGIN

    sheet = Image.new("RGB", (sheet_width, sheet_height), BACKGROUND)
    draw = ImageDraw.Draw(sheet)
    share = f"{mask.sum()} of {mask.size} video tokens kept ({mask.mean():.1%})"
    _draw_header(draw, headlines, f"{len(frames)} frames, {share}; hatched blocks were dropped", notes)
    for index in range(num_tiles):
        left = MARGIN + (index % columns) * (tile_width + GAP)
        top = header_height + (index // columns) * (tile_height + label_height + GAP)
        places = range(index * tubelet, (index + 1) * tubelet)
        sides = np.linspace(0, tile_width, tubelet + 1).round().astype(int).tolist()
        for place, start, end in zip(places, sides[:-1], sides[1:], strict=True):
            frame = frames[min(place, len(frames) - 1)]  # the last stays on
            tile = dim_dropped_blocks(frame, mask[index], grid, (end - start, tile_height))
            sheet.paste(tile, (left + start, top))
        times = [] if timestamps is None else timestamps[places.start : places.stop]
        name = ", ".join(f"{time:.2f}" for time in times) + " s" if len(times) else f"#{index}"
        if scores is not None and tile_width >= 200:
            name += f"   score {scores[index].mean():.2f}"
        _draw_count(draw, (left, top + tile_height + 3), tile_width, mask[index], name)
    return sheet


def _draw_count(draw: ImageDraw.ImageDraw, corner: tuple[int, int], width: int, keep: np.ndarray, name: str) -> None:
    """Draws below a tile: a bar of the kept share, the tile's name, and the number of kept blocks."""
    (left, top), kept = corner, int(keep.sum())
    draw.rectangle((left, top, left + width - 1, top + 3), fill=TRACK)
    if kept:
        draw.rectangle((left, top, left + round(width * kept / len(keep)) - 1, top + 3), fill=KEPT)
    font = ImageFont.load_default(_label_size(width))
    draw.text((left, top + 6), name, font=font, fill=TEXT)
    draw.text((left + width, top + 6), f"{kept}/{len(keep)}", font=font, fill=FAINT_TEXT, anchor="ra")


def _draw_header(draw: ImageDraw.ImageDraw, headlines: Sequence[str], summary: str, notes: Sequence[str]) -> None:
    for line, text in enumerate(headlines):
        draw.text((MARGIN, MARGIN + 32 * line), text, font=ImageFont.load_default(22), fill=TEXT)
    draw.text((MARGIN, MARGIN + 32 * len(headlines) + 2), summary, font=ImageFont.load_default(17), fill=FAINT_TEXT)
    for line, text in enumerate(notes):
        place = (MARGIN, MARGIN + 32 * len(headlines) + 26 + 22 * line)
        draw.text(place, text, font=ImageFont.load_default(15), fill=TEXT)


def _wrap(title: str, width: int) -> list[str]:
    """Returns at most three lines, wrapped by the letters' mean width with a margin."""
    letters = 0.95 * width * len(title) / ImageFont.load_default(22).getlength(title)
    return textwrap.wrap(title, int(letters), max_lines=3, placeholder=" ...")


def _label_size(tile_width: int) -> int:
    return int(np.clip(tile_width // 14, 11, 17))


def _choose_columns(num_frames: int, height: int, width: int) -> int:
    # About 16:10 as a whole, frames not below the smallest readable width.
    ideal = round(math.sqrt(num_frames * 1.6 * (height + 0.12 * width) / width))
    widest = (MAX_WIDTH - 2 * MARGIN + GAP) // (TILE_WIDTHS[0] + GAP)
    ideal = max(1, min(ideal, widest, num_frames))
    # One more column if that leaves fewer empty places in the last row.
    return min((ideal, min(ideal + 1, widest)), key=lambda columns: -num_frames % columns)
