"""
Scenes to ask about: things that move, blink, flash up and change over a textured background, drawn at any time.

A scene is numbers alone, drawn from a seed, so that what happens in it is known exactly. What makes it hard for a
heuristic that goes by change is put in on purpose: the camera drifts, regions flicker, others are full of snow, as of a
television without a signal, and every frame has noise.
Coordinates are shares of the frame's side, x to the right and y down; times are seconds.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

COLOURS = {
    "red": (214, 40, 40),
    "green": (30, 160, 60),
    "blue": (40, 70, 220),
    "yellow": (240, 210, 40),
    "pink": (240, 110, 190),
    "white": (245, 245, 245),
}
SHAPES = ("circle", "square", "triangle", "cross", "ring")
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
PLACES = {
    f"{row} {col}".strip() or "middle": (x, y)
    for row, y in (("top", 0.16), ("", 0.5), ("bottom", 0.84))
    for col, x in (("left", 0.16), ("", 0.5), ("right", 0.84))
}
# Five columns by seven rows, the bits of a row from left to right.
_LETTERS = {
    "A": (14, 17, 17, 31, 17, 17, 17),
    "C": (14, 17, 16, 16, 16, 17, 14),
    "E": (31, 16, 16, 30, 16, 16, 31),
    "H": (17, 17, 17, 31, 17, 17, 17),
    "L": (16, 16, 16, 16, 16, 16, 31),
    "T": (31, 4, 4, 4, 4, 4, 4),
    "X": (17, 17, 10, 4, 10, 17, 17),
    "Z": (31, 1, 2, 4, 8, 16, 31),
}
LETTERS = tuple(_LETTERS)
SHOWN_FOR = 0.3  # seconds that a mark flashes up: one or two frames at 4 per second
GREY = 128.0
SNOW, FLAKES = 60.0, 48  # strength, of 255; along the frame's side


@dataclass(frozen=True)
class Thing:
    """
    What is drawn over the background: `shape` is one of `SHAPES` or `LETTERS`, or "diamond" (a mark) or "bar" (a
    light), which no question calls by name; `radius` is half its side.

    It is at `start` at time 0 and moves by `velocity` a second. It is seen within the intervals `[from, to)` of `shown`
    (always where there are none), and has the colour `later` from `changes_at` on.
    """

    shape: str
    colour: str
    radius: float
    start: tuple[float, float]
    velocity: tuple[float, float] = (0.0, 0.0)
    shown: tuple[tuple[float, float], ...] = ()
    changes_at: float | None = None
    later: str = ""

    def is_shown(self, time: float) -> bool:
        return not self.shown or any(start <= time < end for start, end in self.shown)

    def colour_at(self, time: float) -> str:
        return self.later if self.changes_at is not None and time >= self.changes_at else self.colour


@dataclass(frozen=True)
class Scene:
    """
    seed: of texture, noise, flicker and snow. duration: seconds. things: drawn in order. drift: how far the camera
    moves over the whole clip. flicker: regions (left, top, width, height) whose brightness jumps from frame to frame.
    snow: regions whose grain is another in every frame.
    """

    seed: int
    duration: float
    things: tuple[Thing, ...]
    drift: tuple[float, float] = (0.0, 0.0)
    flicker: tuple[tuple[float, float, float, float], ...] = ()
    snow: tuple[tuple[float, float, float, float], ...] = ()

    def draw(self, times: list[float], height: int, width: int | None = None) -> np.ndarray:
        """The frames at `times` (seconds), uint8 (T, height, width, 3); square where no `width` is given."""
        return np.stack(list(self.frames(times, height, height if width is None else width)))

    def frames(self, times: Iterable[float], height: int, width: int) -> Iterator[np.ndarray]:
        """As `draw`, frame by frame, each (height, width, 3)."""
        generator = np.random.default_rng(self.seed)
        margin = int(np.ceil(max(map(abs, self.drift)) * max(height, width))) + 1
        canvas = _background(generator, height + 2 * margin, width + 2 * margin)
        noise = generator.normal(0, 1.5, (2 * height, 2 * width, 1)).astype(np.float32)
        for time in times:
            # Noise, flicker and snow go by the time, so that a frame is the same in whatever company it is drawn.
            chance = np.random.default_rng((self.seed, round(time * 1000)))
            shift = np.multiply(self.drift, time / self.duration)
            right, down = round(shift[0] * width), round(shift[1] * height)
            frame = canvas[margin + down :, margin + right :][:height, :width].copy()
            for x, y, region_width, region_height in self.flicker:
                rows = _pixels(y - down / height, region_height, height)
                cols = _pixels(x - right / width, region_width, width)
                frame[rows, cols] += chance.uniform(-45, 45)
            snowing = np.random.default_rng((self.seed, round(time * 1000), 1))
            for x, y, region_width, region_height in self.snow:
                rows = _pixels(y - down / height, region_height, height)
                cols = _pixels(x - right / width, region_width, width)
                flakes = frame[rows, cols].shape[:2]
                coarse = snowing.normal(0, SNOW, [-(-size * FLAKES // height) for size in flakes])
                side = -(-height // FLAKES)
                frame[rows, cols] += coarse.repeat(side, 0).repeat(side, 1)[: flakes[0], : flakes[1], None]
            self._draw_things(frame, time, (-right / width, -down / height))
            top, left = chance.integers(0, (height, width))
            frame += noise[top : top + height, left : left + width] + chance.uniform(-3, 3)
            yield frame.clip(0, 255).astype(np.uint8)

    def motion(self, times: list[float], cells: int) -> np.ndarray:
        """
        Where things change: bool (T, cells, cells), True where a cell of the frame looks otherwise than in the frame
        before because of a thing. Drift, flicker, snow and noise are nobody's motion: where the camera drifts, both
        frames are taken as the later one has it. Frame 0 has none.
        """
        size = 12 * cells
        changed = np.zeros((len(times), cells, cells), bool)
        for index, (earlier, later) in enumerate(itertools.pairwise(times), start=1):
            right, down = np.multiply(self.drift, -later / self.duration).tolist()
            frames = np.full((2, size, size, 3), GREY, np.float32)
            for frame, time in zip(frames, (earlier, later), strict=True):
                self._draw_things(frame, time, (right, down))
            difference = np.abs(frames[1] - frames[0]).max(-1).reshape(cells, 12, cells, 12)
            changed[index] = (difference > 24).mean((1, 3)) > 0.08
        return changed

    def _draw_things(self, frame: np.ndarray, time: float, shift: tuple[float, float]) -> None:
        height, width = frame.shape[:2]
        for thing in self.things:
            if not thing.is_shown(time):
                continue
            x, y = (
                place + speed * time + offset
                for place, speed, offset in zip(thing.start, thing.velocity, shift, strict=True)
            )
            radius = thing.radius * height  # pixels, both ways
            rows = _pixels(y - (radius + 1) / height, 2 * (radius + 1) / height, height)
            cols = _pixels(x - (radius + 1) / width, 2 * (radius + 1) / width, width)
            down = (np.arange(rows.start, rows.stop) + 0.5 - y * height)[:, None] / radius
            right = (np.arange(cols.start, cols.stop) + 0.5 - x * width)[None, :] / radius
            inside = (0.5 - _distance(thing.shape, right, down) * radius).clip(0, 1)[..., None]
            colour = np.array(COLOURS[thing.colour_at(time)], np.float32)
            frame[rows, cols] += inside * (colour - frame[rows, cols])


def _pixels(start: float, length: float, size: int) -> slice:
    first = min(max(int(np.floor(start * size)), 0), size)
    return slice(first, min(max(int(np.ceil((start + length) * size)), first), size))


def _background(generator: np.random.Generator, height: int, width: int) -> np.ndarray:
    """A muted gradient with stripes and grain that stand still, float32 (height, width, 3)."""
    rows, cols = np.mgrid[:height, :width].astype(np.float32) / np.array((height, width)).reshape(2, 1, 1)
    corners = generator.uniform(60, 150, (4, 3)) + generator.uniform(-15, 15)
    weights = np.stack([(1 - rows) * (1 - cols), (1 - rows) * cols, rows * (1 - cols), rows * cols], axis=-1)
    angle, waves, phase = generator.uniform(0, np.pi), generator.uniform(4, 14), generator.uniform(0, 6)
    stripes = np.sin(2 * np.pi * waves * (np.cos(angle) * rows + np.sin(angle) * cols) + phase)
    cells = int(generator.integers(12, 40))
    grain = generator.normal(0, generator.uniform(4, 12), (cells, cells))
    grain = grain.repeat(-(-height // cells), 0)[:height].repeat(-(-width // cells), 1)[:, :width]
    return (weights @ corners + (generator.uniform(3, 14) * stripes + grain)[..., None]).astype(np.float32)


def _distance(shape: str, right: np.ndarray, down: np.ndarray) -> np.ndarray:
    """How far outside a shape of radius 1 a place lies, below 0 inside."""
    if shape == "circle":
        return np.hypot(right, down) - 1
    if shape == "ring":
        return np.abs(np.hypot(right, down) - 0.72) - 0.28
    if shape == "square":
        return np.maximum(np.abs(right), np.abs(down)) - 0.88
    if shape == "diamond":
        return (np.abs(right) + np.abs(down) - 1) / np.sqrt(2)
    if shape == "bar":
        return np.maximum(np.abs(right) - 1, np.abs(down) - 0.55)
    if shape == "triangle":
        return np.maximum(down - 0.75, (2 * np.abs(right) - down - 0.95) / np.sqrt(5))
    if shape == "cross":
        long, short = np.maximum(np.abs(right), np.abs(down)), np.minimum(np.abs(right), np.abs(down))
        return np.maximum(long - 1, short - 0.3)
    cells = np.array([[row >> bit & 1 for bit in range(4, -1, -1)] for row in _LETTERS[shape]], bool)
    row, col = np.floor((down + 1) * 3.5).astype(int), np.floor((right + 0.72) * 5 / 1.44).astype(int)
    within = (row >= 0) & (row < 7) & (col >= 0) & (col < 5)
    return np.where(within & cells[row.clip(0, 6), col.clip(0, 4)], -1.0, 1.0)
