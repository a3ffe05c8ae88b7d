"""Where the reference numbers lie, and how to read them: nothing here is tied to the files present today."""

import os
from dataclasses import dataclass
from math import isqrt
from pathlib import Path

import torch
from safetensors import safe_open

FIXTURES = Path(os.environ.get("STTS_FIXTURES") or Path(__file__).parent / "fixtures")


def vision_fixtures() -> list[Path]:
    """Every vision-side file: `*.safetensors` at the top of the fixtures folder, sorted by name."""
    return sorted(FIXTURES.glob("*.safetensors"))


def checkpoint_fixtures() -> list[Path]:
    """Every folder with a whole model: the sub-folders that hold an `expected.safetensors`, sorted by name."""
    return sorted(path.parent for path in FIXTURES.glob("*/expected.safetensors"))


def checkpoint_forms() -> list[Path]:
    """Every original training checkpoint, in whatever form, below the folders of `checkpoint_fixtures`."""
    return [config.parent for folder in checkpoint_fixtures() for config in sorted(folder.glob("*/config.yaml"))]


def read_safetensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """All tensors of `path` and its metadata."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


@dataclass(frozen=True)
class VisionFixture:
    """One row of videos through the authors' vision code; letters as in the design page, F frames of all videos.

    Args:
        weights: the vision backbone's state dict under the authors' names (`image_vit...`).
        pixel_patches: (F, N, pixels), `num_frames` of each video.
        patch_grid: patches per frame as (rows, columns); `pooling_size` the same for a block.
        feature_layers: ViT layers whose outputs the connector concatenates, in its order.
        expected: every other tensor of the file, under the name it has there.
    """

    name: str
    weights: dict[str, torch.Tensor]
    pixel_patches: torch.Tensor
    num_frames: list[int]
    num_heads: int
    patch_grid: tuple[int, int]
    pooling_size: tuple[int, int]
    feature_layers: list[int]
    pruning_layer: int
    pruning_ratio: float
    expected: dict[str, torch.Tensor]

    @property
    def counted_scores(self) -> torch.Tensor:
        """Frames whose reference score means something, bool (F,): not the first of the second and later videos."""
        counted = torch.ones(sum(self.num_frames), dtype=torch.bool)
        first_frames = torch.tensor([0, *self.num_frames]).cumsum(0)[1:-1]
        counted[first_frames] = False
        return counted


def load_vision_fixture(path: Path) -> VisionFixture:
    """Read one file of `vision_fixtures`. Frames and blocks are taken as square: the files name no grid."""
    tensors, metadata = read_safetensors(path)
    prefix = "weights."
    weights = {name.removeprefix(prefix): tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
    pixel_patches, num_frames = tensors.pop("pixel_patches"), tensors.pop("num_frames").tolist()
    num_patches, num_blocks = pixel_patches.shape[1], tensors["scores"].shape[1]
    return VisionFixture(
        name=path.stem,
        weights=weights,
        pixel_patches=pixel_patches,
        num_frames=num_frames,
        num_heads=int(metadata["num_heads"]),
        patch_grid=(_side(num_patches), _side(num_patches)),
        pooling_size=(_side(num_patches // num_blocks), _side(num_patches // num_blocks)),
        feature_layers=[int(layer) for layer in metadata["vit_layers"].split(",")],
        pruning_layer=int(metadata["pruning_layer"]),
        pruning_ratio=float(metadata["pruning_ratio"]),
        expected=tensors,
    )


def pooling_table(num_frames: int, patch_grid: tuple[int, int], pooling_size: tuple[int, int]) -> torch.Tensor:
    """`video_token_pooling` of a video whose grid the window divides: int64 (T*n, w*w), patches row by row."""
    (rows, columns), (height, width) = patch_grid, pooling_size
    if rows % height or columns % width:
        raise ValueError(f"patch_grid {patch_grid} is not a multiple of pooling_size {pooling_size}")
    patches = torch.arange(num_frames * rows * columns)
    patches = patches.reshape(num_frames, rows // height, height, columns // width, width)  # (T, R, h, C, w)
    return patches.transpose(2, 3).reshape(-1, height * width)  # (T*n, h*w)


def _side(area: int) -> int:
    side = isqrt(area)
    if side * side != area:
        raise ValueError(f"{area} is not a square number: this fixture needs its grid spelled out")
    return side
