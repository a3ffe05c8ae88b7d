"""
Scenes to ask about: things that move, blink, flash up and change over a textured background, drawn at any time.

A scene is numbers alone, drawn from a seed. What misleads a heuristic that goes by change is put in on purpose: the
camera drifts, regions flicker, others are full of snow, as of a television without a signal, and every frame has noise.
Coordinates are shares of the frame's side, x to the right and y down; times are seconds.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from stts_hf.visualize import drawing
from stts_hf.visualize.drawing import COLOURS as COLOURS
from stts_hf.visualize.drawing import pixel_range

SHAPES = ("circle", "square", "triangle", "cross", "ring")
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
PLACES = {
    f"{row} {col}".strip() or "middle": (x, y)
    for row, y in (("top", 0.16), ("", 0.5), ("bottom", 0.84))
    for col, x in (("left", 0.16), ("", 0.5), ("right", 0.84))
}
LETTERS = tuple(drawing.LETTERS)
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
        canvas = drawing.draw_background(generator, height + 2 * margin, width + 2 * margin)
        noise = generator.normal(0, 1.5, (2 * height, 2 * width, 1)).astype(np.float32)
        for time in times:
            # Noise, flicker and snow go by the time, so that a frame is the same in whatever company it is drawn.
            chance = np.random.default_rng((self.seed, round(time * 1000)))
            shift = np.multiply(self.drift, time / self.duration)
            right, down = round(shift[0] * width), round(shift[1] * height)
            frame = canvas[margin + down :, margin + right :][:height, :width].copy()
            for x, y, region_width, region_height in self.flicker:
                rows = pixel_range(y - down / height, region_height, height)
                cols = pixel_range(x - right / width, region_width, width)
                frame[rows, cols] += chance.uniform(-45, 45)
            snowing = np.random.default_rng((self.seed, round(time * 1000), 1))
            for x, y, region_width, region_height in self.snow:
                rows = pixel_range(y - down / height, region_height, height)
                cols = pixel_range(x - right / width, region_width, width)
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
        for thing in self.things:
            if not thing.is_shown(time):
                continue
            x, y = (
                place + speed * time + offset
                for place, speed, offset in zip(thing.start, thing.velocity, shift, strict=True)
            )
            drawing.draw_shape(frame, thing.shape, COLOURS[thing.colour_at(time)], thing.radius, (x, y))
