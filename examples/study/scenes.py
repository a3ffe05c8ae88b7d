"""
Scenes to ask about: things that move, blink, flash up and change over a background, drawn at any time.

A scene is numbers alone, drawn from a seed. What misleads a heuristic that goes by change is put in on purpose
(`distraction`), and every frame has noise. Coordinates are shares of the frame's side, x to the right and y down; times
are seconds.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from ..clips import drawing
from ..clips.drawing import COLOURS as COLOURS
from .backgrounds import draw_background, draw_film
from .distraction import BEHIND, OVER, Effect, paint

SHAPES = ("circle", "square", "triangle", "cross", "ring")
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
PLACES = {
    f"{row} {col}".strip() or "middle": (x, y)
    for row, y in (("top", 0.16), ("", 0.5), ("bottom", 0.84))
    for col, x in (("left", 0.16), ("", 0.5), ("right", 0.84))
}
LETTERS = tuple(drawing.LETTERS)
SHOWN_FOR = 0.3  # seconds that a mark flashes up: one or two frames at 4 per second
GREY, SHADOW = 128.0, (25, 25, 25)


@dataclass(frozen=True)
class Thing:
    """
    What is drawn over the background: `shape` is one of `SHAPES` or `LETTERS`, or "diamond" (a mark) or "bar" (a
    light), which no question calls by name; `radius` is half its side.

    It is at `start` at time 0 and moves by `velocity` a second, while `moving` (always where that is None). It is seen
    within the intervals `[from, to)` of `shown` (always if there are none), and has the colour `later` from
    `changes_at` on. casts: a shadow.
    """

    shape: str
    colour: str
    radius: float
    start: tuple[float, float]
    velocity: tuple[float, float] = (0.0, 0.0)
    shown: tuple[tuple[float, float], ...] = ()
    changes_at: float | None = None
    later: str = ""
    moving: tuple[float, float] | None = None
    casts: bool = False

    def place_at(self, time: float) -> np.ndarray:
        """Where it is, x and y, the camera left out."""
        first, last = self.moving or (0.0, time)
        return np.add(self.start, np.multiply(self.velocity, min(max(time - first, 0.0), last - first)))

    def is_shown(self, time: float) -> bool:
        return not self.shown or any(start <= time < end for start, end in self.shown)

    def colour_at(self, time: float) -> str:
        return self.later if self.changes_at is not None and time >= self.changes_at else self.colour


@dataclass(frozen=True)
class Scene:
    """
    seed: of background, noise and effects. duration: seconds. things: drawn in order. style, photograph: of the
    background, as `draw_background` has them. film: whether it is one. drift: how far the camera moves over the whole
    clip. slide: how far the background does, behind what stands still. shake: of the camera, a standard deviation.
    effects: what else distracts.
    """

    seed: int
    duration: float
    things: tuple[Thing, ...]
    style: str = "plain"
    photograph: int | None = None
    film: bool = False
    drift: tuple[float, float] = (0.0, 0.0)
    slide: tuple[float, float] = (0.0, 0.0)
    shake: float = 0.0
    effects: tuple[Effect, ...] = ()

    def camera(self, time: float) -> np.ndarray:
        """Where the camera is, x and y: what it shows lies as much to the left and up."""
        shaken = np.random.default_rng((self.seed, round(time * 1000), 0)).uniform(-1, 1, 2)
        return np.multiply(self.drift, time / self.duration - 0.5) + 1.7 * self.shake * shaken

    def draw(self, times: list[float], height: int, width: int | None = None) -> np.ndarray:
        """The frames at `times` (seconds), uint8 (T, height, width, 3); square where no `width` is given."""
        return np.stack(list(self.frames(times, height, height if width is None else width)))

    def frames(self, times: Iterable[float], height: int, width: int) -> Iterator[np.ndarray]:
        """As `draw`, frame by frame, each (height, width, 3)."""
        generator = np.random.default_rng(self.seed)
        reach = max(map(abs, (*np.add(np.abs(self.drift), np.abs(self.slide)) / 2, 0.0))) + 2 * self.shake
        margin = int(np.ceil(reach * max(height, width))) + 1
        size = (height + 2 * margin, width + 2 * margin)
        canvas = draw_background(generator, self.style, self.photograph, *size)
        noise = generator.normal(0, 1.5, (2 * height, 2 * width, 1)).astype(np.float32)
        for time in times:
            # Noise goes by the time, so that a frame is the same in whatever company it is drawn.
            chance = np.random.default_rng((self.seed, round(time * 1000)))
            if self.film:
                canvas = draw_film(self.seed, self.style, time, *size)
            camera = self.camera(time)
            behind = camera + np.multiply(self.slide, time / self.duration - 0.5)
            right, down = round(behind[0] * width), round(behind[1] * height)
            frame = canvas[margin + down :, margin + right :][:height, :width].copy()
            paint(BEHIND, self.effects, frame, time, self.seed, -behind)
            self._draw_things(frame, time, camera)
            paint(OVER, self.effects, frame, time, self.seed, -camera)
            top, left = chance.integers(0, (height, width))
            frame += noise[top : top + height, left : left + width] + chance.uniform(-3, 3)
            yield frame.clip(0, 255).astype(np.uint8)

    def motion(self, times: list[float], cells: int) -> np.ndarray:
        """
        Where things change: bool (T, cells, cells), True where a cell of the frame looks otherwise than in the frame
        before because of a thing. Distraction and noise are nobody's motion: where the camera moves, both frames are
        taken as the later one has it. Frame 0 has none.
        """
        size = 12 * cells
        changed = np.zeros((len(times), cells, cells), bool)
        for index, (earlier, later) in enumerate(itertools.pairwise(times), start=1):
            frames = np.full((2, size, size, 3), GREY, np.float32)
            for frame, time in zip(frames, (earlier, later), strict=True):
                self._draw_things(frame, time, self.camera(later))
            difference = np.abs(frames[1] - frames[0]).max(-1).reshape(cells, 12, cells, 12)
            changed[index] = (difference > 24).mean((1, 3)) > 0.08
        return changed

    def covers(self, times: list[float], cells: int) -> np.ndarray:
        """How much of each cell a thing covers, in percent: uint8 (things, T, cells, cells), 0 where it is not seen."""
        size = 8 * cells
        shares = np.zeros((len(self.things), len(times), cells, cells), np.uint8)
        for index, thing in enumerate(self.things):
            for frame, time in enumerate(times):
                if thing.is_shown(time):
                    alone = np.zeros((size, size, 3), np.float32)
                    place = thing.place_at(time) - self.camera(time)
                    drawing.draw_shape(alone, thing.shape, (1, 1, 1), thing.radius, (float(place[0]), float(place[1])))
                    shares[index, frame] = 100 * alone[..., 0].reshape(cells, 8, cells, 8).mean((1, 3))
        return shares

    def _draw_things(self, frame: np.ndarray, time: float, camera: np.ndarray) -> None:
        for thing in self.things:
            if not thing.is_shown(time):
                continue
            x, y = (thing.place_at(time) - camera).tolist()
            if thing.casts:
                drawing.draw_shape(frame, thing.shape, SHADOW, thing.radius, (x + 0.02, y + 0.02))
            drawing.draw_shape(frame, thing.shape, COLOURS[thing.colour_at(time)], thing.radius, (x, y))
