"""
What scenes stand before: drawn textures and, in some clips, photographs. These ship inside packages that the extras
`demo` and `visualize` install, so nothing is downloaded.
"""

import functools
import importlib.util
from pathlib import Path

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


@functools.cache
def read_photograph(style: str, index: int) -> Image.Image:
    """A photograph of `PHOTOGRAPHS`. Raises `ValueError` where its package is not installed."""
    package, name = PHOTOGRAPHS[style][index]
    spec = importlib.util.find_spec(package)
    file = Path(spec.submodule_search_locations[0], name) if spec and spec.submodule_search_locations else None
    if file is None or not file.is_file():
        raise ValueError(
            f"the photograph {name} of the package {package} is missing: pip install -e '.[demo,visualize]', or make "
            "clips without photographs (--photographs 0)"
        )
    with Image.open(file) as image:
        return image.convert("RGB")


def draw_background(
    random: np.random.Generator, style: str, photograph: int | None, height: int, width: int
) -> np.ndarray:
    """A background, float32 (height, width, 3), muted so that things stand out. photograph: which one, or None."""
    if photograph is not None:
        return _photograph(random, read_photograph(style, photograph), height, width)
    if style == "plain":
        return drawing.draw_background(random, height, width)
    return _patches(random, height, width)


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
