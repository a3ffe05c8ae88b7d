"""Shapes over a textured background: what drawn clips consist of. Places and sizes are shares of the frame's side."""

from collections.abc import Callable

import numpy as np

COLOURS = {
    "red": (214, 40, 40),
    "green": (30, 160, 60),
    "blue": (40, 70, 220),
    "yellow": (240, 210, 40),
    "pink": (240, 110, 190),
    "white": (245, 245, 245),
}
# Five columns by seven rows, the bits of a row from left to right.
LETTERS = {
    "A": (14, 17, 17, 31, 17, 17, 17),
    "C": (14, 17, 16, 16, 16, 17, 14),
    "E": (31, 16, 16, 30, 16, 16, 31),
    "H": (17, 17, 17, 31, 17, 17, 17),
    "L": (16, 16, 16, 16, 16, 16, 31),
    "T": (31, 4, 4, 4, 4, 4, 4),
    "X": (17, 17, 10, 4, 10, 17, 17),
    "Z": (31, 1, 2, 4, 8, 16, 31),
}
# Signed distance of each point to the border of a shape of radius 1, below 0 inside; x to the right, y down.
_DISTANCES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "circle": lambda x, y: np.hypot(x, y) - 1,
    "ring": lambda x, y: np.abs(np.hypot(x, y) - 0.72) - 0.28,
    "square": lambda x, y: np.maximum(np.abs(x), np.abs(y)) - 0.88,
    "diamond": lambda x, y: (np.abs(x) + np.abs(y) - 1) / np.sqrt(2),
    "bar": lambda x, y: np.maximum(np.abs(x) - 1, np.abs(y) - 0.55),
    "triangle": lambda x, y: np.maximum(y - 0.75, (2 * np.abs(x) - y - 0.95) / np.sqrt(5)),
    "cross": lambda x, y: np.maximum(np.maximum(np.abs(x), np.abs(y)) - 1, np.minimum(np.abs(x), np.abs(y)) - 0.3),
}


def draw_background(generator: np.random.Generator, height: int, width: int) -> np.ndarray:
    """A muted gradient with stripes and grain, float32 (height, width, 3)."""
    rows, cols = np.mgrid[:height, :width].astype(np.float32) / np.array((height, width)).reshape(2, 1, 1)
    corners = generator.uniform(60, 150, (4, 3)) + generator.uniform(-15, 15)
    weights = np.stack([(1 - rows) * (1 - cols), (1 - rows) * cols, rows * (1 - cols), rows * cols], axis=-1)
    angle, waves, phase = generator.uniform(0, np.pi), generator.uniform(4, 14), generator.uniform(0, 6)
    stripes = np.sin(2 * np.pi * waves * (np.cos(angle) * rows + np.sin(angle) * cols) + phase)
    cells = int(generator.integers(12, 40))
    grain = generator.normal(0, generator.uniform(4, 12), (cells, cells))
    grain = grain.repeat(-(-height // cells), 0)[:height].repeat(-(-width // cells), 1)[:, :width]
    return (weights @ corners + (generator.uniform(3, 14) * stripes + grain)[..., None]).astype(np.float32)


def draw_shape(
    frame: np.ndarray, shape: str, colour: tuple[int, int, int], radius: float, place: tuple[float, float]
) -> None:
    """
    Draws a shape into a float frame (height, width, 3). shape: "circle", "square", "triangle", "cross", "ring",
    "diamond", "bar" or one of `LETTERS`. radius: half its side, as a share of the height. place: x and y of its centre.
    """
    (height, width), (x, y) = frame.shape[:2], place
    pixels = radius * height
    rows = pixel_range(y - (pixels + 1) / height, 2 * (pixels + 1) / height, height)
    cols = pixel_range(x - (pixels + 1) / width, 2 * (pixels + 1) / width, width)
    down = (np.arange(rows.start, rows.stop) + 0.5 - y * height)[:, None] / pixels
    right = (np.arange(cols.start, cols.stop) + 0.5 - x * width)[None, :] / pixels
    distance = _DISTANCES[shape](right, down) if shape in _DISTANCES else _letter(shape, right, down)
    inside = (0.5 - distance * pixels).clip(0, 1)[..., None]
    frame[rows, cols] += inside * (np.array(colour, np.float32) - frame[rows, cols])


def pixel_range(start: float, length: float, size: int) -> slice:
    """The pixels of `[start, start + length)`, shares of a side of `size` pixels; none lies outside of it."""
    first = min(max(int(np.floor(start * size)), 0), size)
    return slice(first, min(max(int(np.ceil((start + length) * size)), first), size))


def _letter(letter: str, right: np.ndarray, down: np.ndarray) -> np.ndarray:
    """-1 in the letter's cells, 1 outside of them."""
    cells = np.array([[row >> bit & 1 for bit in range(4, -1, -1)] for row in LETTERS[letter]], bool)
    row, col = np.floor((down + 1) * 3.5).astype(int), np.floor((right + 0.72) * 5 / 1.44).astype(int)
    within = (row >= 0) & (row < 7) & (col >= 0) & (col < 5)
    return np.where(within & cells[row.clip(0, 6), col.clip(0, 4)], -1.0, 1.0)
