"""
What happens in a clip that nothing is asked about: it misleads a ranking that goes by change alone.

Each kind is of a strength in (0, 1]. Those of the style "other" are for clips that measure what carries over: training
never sees them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..clips import drawing

KINDS = {
    "plain": ("snow", "flicker", "pan", "shake", "background", "grain"),
    "other": ("rain", "crowd", "roll", "ripple"),
}
WHOLE = (0.0, 0.0, 1.0, 1.0)
# At strength 1: standard deviations and jumps of brightness, of 255; ways of camera and background, in frames.
SNOW, GRAIN, FLICKER, DIMMING, STRIPES = 60.0, 16.0, 80.0, 25.0, 60.0
PAN, SHAKE, SLIDE = 0.16, 0.02, 1.0
FLAKES = 48  # of snow along the frame's side; twice as many grains


@dataclass(frozen=True)
class Look:
    """
    How scenes look. strength: of distraction, 0 for none at all, 1 for all of it; each clip then has two or three of
    `kinds` (all of the style's if there are none). style: "plain" or "other". photographs, films: the shares of clips
    that stand before one. calm: the share of training clips without distraction. sizes: sides of the files in pixels,
    of which each draws one (144 if there are none). Raises `ValueError` for what is not among these.
    """

    strength: float = 0.0
    kinds: tuple[str, ...] = ()
    style: str = "plain"
    photographs: float = 0.0
    calm: float = 0.0
    films: float = 0.0
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.style not in KINDS:
            raise ValueError(f"style is {self.style!r}, but must be one of {', '.join(KINDS)}")
        for name in ("strength", "photographs", "calm", "films"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but must lie between 0 and 1")
        if odd := [size for size in self.sizes if size < 32 or size % 2]:
            raise ValueError(f"sizes names {odd[0]}, but may name even numbers from 32 on")
        if unknown := sorted(set(self.kinds) - set(sum(KINDS.values(), ()))):
            raise ValueError(f"kinds names {unknown[0]!r}, but may name {', '.join(sum(KINDS.values(), ()))}")


@dataclass(frozen=True)
class Effect:
    """kind: of `BEHIND` or `OVER`. region: left, top, width and height, as shares of the frame."""

    kind: str
    strength: float
    region: tuple[float, float, float, float] = WHOLE


@dataclass(frozen=True)
class Moment:
    """What a painter may go by: draws of its own for the moment, the scene's seed, the time, the frame's side."""

    random: np.random.Generator
    strength: float
    seed: int
    time: float
    side: int


def _snow(patch: np.ndarray, at: Moment) -> None:
    _specks(patch, at.random, SNOW * at.strength, -(-at.side // FLAKES))


def _grain(patch: np.ndarray, at: Moment) -> None:
    _specks(patch, at.random, GRAIN * at.strength, -(-at.side // (2 * FLAKES)))


def _specks(patch: np.ndarray, random: np.random.Generator, deviation: float, size: int) -> None:
    height, width = patch.shape[:2]
    coarse = random.normal(0, deviation, (-(-height // size), -(-width // size)))
    patch += coarse.repeat(size, 0).repeat(size, 1)[:height, :width, None]


def _flicker(patch: np.ndarray, at: Moment) -> None:
    patch += at.random.uniform(-FLICKER, FLICKER) * at.strength


def _stripes(patch: np.ndarray, at: Moment) -> None:
    """As of a fan or a curtain, of an angle and a width that are the scene's."""
    height, width = patch.shape[:2]
    angle, waves = np.random.default_rng((at.seed, 10)).uniform((0, 6), (2 * np.pi, 12))
    along = np.cos(angle) * np.arange(width) + np.sin(angle) * np.arange(height)[:, None]
    patch += (STRIPES * at.strength * np.sin(2 * np.pi * (waves * along / at.side - 1.4 * at.time)))[..., None]


def _dimming(patch: np.ndarray, at: Moment) -> None:
    patch += at.random.uniform(-DIMMING, DIMMING) * at.strength


def _rain(patch: np.ndarray, at: Moment) -> None:
    height, width = patch.shape[:2]
    for x, y, length in at.random.uniform(0, 1, (60, 3)):
        steps = np.arange(int((0.08 + 0.12 * length) * height))
        rows, cols = (int(y * height) + steps) % height, (int(x * width) + steps // 4) % width
        for col in (cols, (cols + 1) % width):
            patch[rows, col] += 80 * at.strength


def _crowd(patch: np.ndarray, at: Moment) -> None:
    """Grey blots that wander behind everything."""
    blots = np.random.default_rng((at.seed, 8))
    for _ in range(1 + round(6 * at.strength)):
        start, speed = blots.uniform(0, 1, 2), blots.uniform(-0.4, 0.4, 2)
        grey, radius = int(blots.uniform(30, 180)), blots.uniform(0.06, 0.13)
        place = (start + speed * at.time) % 1.3 - 0.15
        drawing.draw_shape(patch, "circle", (grey, grey, grey), radius, (float(place[0]), float(place[1])))


def _roll(patch: np.ndarray, at: Moment) -> None:
    """A bright bar that rolls down the picture, as on a screen that is filmed."""
    rows = (np.arange(len(patch)) / len(patch) - 0.7 * at.time) % 1
    patch += (60 * at.strength * np.exp(-(((rows - 0.5) / 0.12) ** 2)))[:, None, None]


def _ripple(patch: np.ndarray, at: Moment) -> None:
    """The background sways, as under water."""
    height, width = patch.shape[:2]
    sway = np.sin(2 * np.pi * (3 * np.arange(height) / height + 1.3 * at.time))
    cols = np.arange(width) + np.round(0.06 * at.strength * width * sway).astype(int)[:, None]
    patch[:] = patch[np.arange(height)[:, None], cols % width]


# Painted into a region (height, width, 3) of a frame of `side` pixels, before its things are drawn, and after.
Painters = dict[str, Callable[[np.ndarray, Moment], None]]
BEHIND: Painters = {
    "snow": _snow,
    "flicker": _flicker,
    "stripes": _stripes,
    "rain": _rain,
    "crowd": _crowd,
    "ripple": _ripple,
}
OVER: Painters = {"grain": _grain, "dimming": _dimming, "roll": _roll}


def paint(
    painters: Painters, effects: tuple[Effect, ...], frame: np.ndarray, time: float, seed: int, shift: np.ndarray
) -> None:
    """Paints those of the effects that `painters` know; shift: of their regions, with what they lie on."""
    height, width = frame.shape[:2]
    for index, effect in enumerate(effects):
        if effect.kind not in painters:
            continue
        x, y, region_width, region_height = effect.region
        rows, cols = slice(0, height), slice(0, width)
        if effect.region != WHOLE:
            rows = drawing.pixel_range(y + shift[1], region_height, height)
            cols = drawing.pixel_range(x + shift[0], region_width, width)
        # By the time, so that a frame is the same in whatever company it is drawn.
        random = np.random.default_rng((seed, round(time * 1000), 1 + index))
        painters[effect.kind](frame[rows, cols], Moment(random, effect.strength, seed, time, height))


def draw_distraction(seed: int, look: Look) -> dict[str, Any]:
    """What of a scene is distraction, as fields of `Scene`: effects, ways of camera and background, shake."""
    random = np.random.default_rng((seed, 7))
    kinds = list(look.kinds or KINDS[look.style])
    number = min(len(kinds), int(random.integers(2, 4))) if look.strength else 0
    found: dict[str, Any] = {}
    effects: list[Effect] = []
    for index in random.permutation(len(kinds))[:number].tolist():
        kind, angle = kinds[index], random.uniform(0, 2 * np.pi)
        way = (float(np.cos(angle)), float(np.sin(angle)))
        if kind == "pan":
            found["drift"] = (PAN * look.strength * way[0], PAN * look.strength * way[1])
        elif kind == "background" and random.random() < 0.3:
            found["slide"] = (SLIDE * look.strength * way[0], SLIDE * look.strength * way[1])
        elif kind == "shake":
            found["shake"] = SHAKE * look.strength
        elif kind == "flicker" and random.random() < 0.3:
            effects.append(Effect("dimming", look.strength))
        elif kind in ("snow", "flicker", "background"):
            painted = "stripes" if kind == "background" else kind
            for _ in range(int(random.integers(1, 4))):
                region = (*random.uniform(0, 0.7, 2), *random.uniform(0.25, 0.4, 2))
                effects.append(Effect(painted, look.strength, region))
        else:
            effects.append(Effect(kind, look.strength))
    return found | {"effects": tuple(effects)}
