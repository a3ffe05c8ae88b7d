"""Tiny models and inputs that many test files share: random weights, every part of Molmo2 in place.

The tower has 6 layers of width 32 over 9 x 9 patches (9 blocks of 3 x 3), prunes after layer 2 and hands layers 5 and 1
to the connector; the text model has 2 layers of width 48. A row of a batch is a list of parts, in their order:

    [3, Video(4), 5]            3 text tokens, a video of 4 frames, 5 text tokens
    [2, Image(), Video(2), 3]   with an image of a low-resolution view and a 1 x 2 tiling of crops before the video
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Molmo2ForConditionalGeneration
from transformers.models.molmo2.configuration_molmo2 import Molmo2Config

from stts_hf.modeling.configuration_stts import STTSConfig
from stts_hf.modeling.modeling_stts import STTSForConditionalGeneration
from stts_hf.modeling.scoring_stts import FIRST_LOGIT

TEXT_VOCABULARY = 512
IMAGE_START, IMAGE_END, PATCH, LOW_RES_IMAGE_START, FRAME_START, FRAME_END = 512, 513, 514, 516, 519, 520
IMAGE_POOLING = (2, 2)  # Molmo2 pools images 2 x 2, so an odd patch grid hangs over
PAD = 0


@dataclass(frozen=True)
class Video:
    """`frames` frames; each is a timestamp (one text token), a start, `n` placeholders and an end."""

    frames: int


@dataclass(frozen=True)
class Image:
    """A low-resolution view and `tiling` (rows, columns) of crops without overlap, as native Molmo2 lays them out."""

    tiling: tuple[int, int] = (1, 2)


Part = int | Video | Image


def tiny_config(
    *,
    feature_layers: Sequence[int] = (5, 1),
    text_overrides: dict[str, Any] | None = None,
    model_overrides: dict[str, Any] | None = None,
    **vision_overrides: Any,
) -> STTSConfig:
    """Configuration of a tiny model; keywords go to the vision config (`pruning_ratio=0.3, packing=...`)."""
    vision_config: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "image_size": [18, 18],
        "patch_size": 2,
        "pruning_layer": 2,
    }
    adapter_config = {
        "vision_feature_layer": list(feature_layers),
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "intermediate_size": 80,
        "text_hidden_size": 48,
    }
    text_config = {
        "hidden_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": TEXT_VOCABULARY,
        "num_hidden_layers": 2,
        "intermediate_size": 160,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    return STTSConfig(
        vision_config=vision_config | vision_overrides,
        adapter_config=adapter_config,
        text_config=text_config | (text_overrides or {}),
        image_start_token_id=IMAGE_START,
        image_end_token_id=IMAGE_END,
        image_patch_id=PATCH,
        low_res_image_start_token_id=LOW_RES_IMAGE_START,
        frame_start_token_id=FRAME_START,
        frame_end_token_id=FRAME_END,
        **(model_overrides or {}),
    )


def tiny_model(
    config: STTSConfig | None = None, seed: int = 0, trained_scorer: bool = True
) -> STTSForConditionalGeneration:
    """A model in eval mode and float32 whose every weight is random and large enough to matter.

    `trained_scorer=False` leaves the scorer's last layer as it begins, so every score is 0.12."""
    model = STTSForConditionalGeneration(config or tiny_config()).float().eval()
    randomise(model, seed)
    if not trained_scorer:
        nn.init.zeros_(model.model.vision_tower.scorer.score_layer.weight)
        nn.init.constant_(model.model.vision_tower.scorer.score_layer.bias, FIRST_LOGIT)
    return model


def stock_twin(model) -> Molmo2ForConditionalGeneration:
    """Stock Molmo2 with the same settings and weights."""
    config = model.config.to_dict()
    parts: dict[str, Any] = {}
    for part in ("vision_config", "adapter_config", "text_config"):
        parts[part] = {
            name: value
            for name, value in config[part].items()
            if name not in (*STTSConfig.vision_settings, "model_type", "architectures")
        }
    tokens = {name: value for name, value in config.items() if name.endswith(("_token_id", "_patch_id"))}
    stock = Molmo2ForConditionalGeneration(Molmo2Config(**parts, **tokens)).eval()
    shared = {name: value for name, value in model.state_dict().items() if ".scorer." not in name}
    stock.load_state_dict(shared, strict=True)
    return stock


@torch.no_grad()
def randomise(module: nn.Module, seed: int = 0) -> None:
    """Draws every parameter anew: default initialisation gives attention that is nearly uniform and hides errors."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("score_layer.weight"):
            scale, mean = 1.0, 0.0  # scores spread over (0, 1)
        elif "norm" in name:
            scale, mean = 0.1, float(name.endswith("weight"))
        elif parameter.dim() == 1:
            scale, mean = 0.1, 0.0
        elif "embed" in name and "patch_embed" not in name:
            scale, mean = 0.5, 0.0
        else:
            fan_in = parameter.shape[-1] if ".experts." in name else parameter[0].numel()  # a matrix of each expert
            scale, mean = fan_in**-0.5, 0.0
        parameter.copy_(mean + scale * noise)


def build_inputs(
    rows: Sequence[Sequence[Part]],
    config: STTSConfig | None = None,
    *,
    seed: int = 0,
    padding_side: str = "left",
    labels: bool = False,
) -> dict[str, Any]:
    """Arguments of `model(...)` for a batch, as the processor returns them.

    Args:
        padding_side: where shorter rows are padded, "left" or "right".
        labels: also `labels`, the ids of all text tokens (timestamps too), -100 elsewhere.

    Returns input_ids, attention_mask and mm_token_type_ids (B, L); pixel_values_videos (F, N, pixels),
    video_token_pooling (G, S) and video_grids (V, 3) if there is a video; pixel_values (crops, N, pixels),
    image_token_pooling (tokens, 4), image_grids (images, 4) and image_num_crops (images,) if there is an image.
    """
    vision_config = (config or tiny_config()).vision_config
    generator = torch.Generator().manual_seed(seed)
    block_rows, block_cols = vision_config.block_grid
    patch_rows, patch_cols = patch_grid(vision_config)
    ids: list[list[int]] = []
    videos, images = [], []
    for row in rows:
        tokens: list[int] = []
        for part in row:
            if isinstance(part, Video):
                videos.append(part)
                for _ in range(part.frames):
                    tokens += [*_text(1, generator), FRAME_START, *[PATCH] * (block_rows * block_cols), FRAME_END]
            elif isinstance(part, Image):
                images.append(part)
                low = window_grid((patch_rows, patch_cols), IMAGE_POOLING)
                high = window_grid((patch_rows * part.tiling[0], patch_cols * part.tiling[1]), IMAGE_POOLING)
                tokens += [LOW_RES_IMAGE_START, *[PATCH] * (low[0] * low[1]), IMAGE_END]
                tokens += [IMAGE_START, *[PATCH] * (high[0] * high[1]), IMAGE_END]
            else:
                tokens += _text(part, generator)
        ids.append(tokens)

    inputs = _pad(ids, padding_side)
    if labels:
        is_text = (inputs["input_ids"] < TEXT_VOCABULARY) & inputs["attention_mask"].bool()
        inputs["labels"] = inputs["input_ids"].where(is_text, -100)
    pixels = vision_config.patch_size**2 * vision_config.num_channels
    if videos:
        num_frames = [video.frames for video in videos]
        inputs |= {
            "pixel_values_videos": moving_pixels(num_frames, patch_rows * patch_cols, pixels, generator),
            "video_token_pooling": pooling_windows(
                sum(num_frames),
                (patch_rows, patch_cols),
                (vision_config.pooling_size[0], vision_config.pooling_size[1]),
            ),
            "video_grids": torch.tensor([[frames, block_rows, block_cols] for frames in num_frames]),
        }
    if images:
        inputs |= _image_tensors(images, (patch_rows, patch_cols), pixels, generator)
    return inputs


def video_prompt(
    num_frames: Sequence[int],
    config: STTSConfig | None = None,
    *,
    seed: int = 0,
    text_lengths: Sequence[int] | None = None,
    padding_side: str = "left",
    labels: bool = False,
) -> dict[str, Any]:
    """Arguments of `model(...)`: each row is 3 text tokens, one video (none for 0 frames) and `text_lengths` tokens.

    By default row `i` has `4 + i` tokens after its video, so that rows of equal frames differ in length too."""
    text_lengths = text_lengths or [4 + row for row in range(len(num_frames))]
    rows: list[list[Part]] = [
        [3, Video(frames), after] if frames else [3, after]
        for frames, after in zip(num_frames, text_lengths, strict=True)
    ]
    return build_inputs(rows, config, seed=seed, padding_side=padding_side, labels=labels)


def image_inputs(
    tilings: Sequence[tuple[int, int] | None] = ((1, 2),),
    config: STTSConfig | None = None,
    *,
    seed: int = 0,
    padding_side: str = "left",
    labels: bool = False,
) -> dict[str, Any]:
    """Arguments of `model(...)`: each row is 2 text tokens, an image of the given tiling (or None) and 4 + i tokens."""
    rows: list[list[Part]] = [
        [2, Image(tiling), 4 + row] if tiling else [2, 4 + row] for row, tiling in enumerate(tilings)
    ]
    return build_inputs(rows, config, seed=seed, padding_side=padding_side, labels=labels)


def patch_grid(vision_config) -> tuple[int, int]:
    """Rows and columns of patches in a frame."""
    height, width = vision_config.image_size
    return height // vision_config.patch_size, width // vision_config.patch_size


def window_grid(grid: tuple[int, int], window: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of windows over a grid; one that hangs over the border counts."""
    return -(-grid[0] // window[0]), -(-grid[1] // window[1])


def pooling_windows(num_frames: int, grid: tuple[int, int], window: tuple[int, int]) -> torch.Tensor:
    """Native Molmo2's windows: int64 (T * n, S), -1 where a window hangs over the border, on all sides of the grid."""
    (rows, cols), (height, width) = window_grid(grid, window), window
    over_rows, over_cols = rows * height - grid[0], cols * width - grid[1]
    patches = torch.arange(num_frames * grid[0] * grid[1]).view(num_frames, *grid)
    padding = (over_cols // 2, over_cols - over_cols // 2, over_rows // 2, over_rows - over_rows // 2)
    patches = F.pad(patches, padding, value=-1)
    return patches.view(num_frames, rows, height, cols, width).transpose(2, 3).reshape(-1, height * width)


def moving_pixels(num_frames: Sequence[int], num_patches: int, pixels: int, generator: torch.Generator) -> torch.Tensor:
    """Frames (F, N, pixels) of several videos, each a still picture under a random change of a part of its patches."""
    frames = []
    for count in num_frames:
        still = torch.randn(1, num_patches, pixels, generator=generator)
        change = torch.randn(count, num_patches, pixels, generator=generator)
        moves = torch.rand(count, num_patches, 1, generator=generator) < 0.5
        frames.append(still + change * moves)
    return torch.cat(frames)


def _text(count: int, generator: torch.Generator) -> list[int]:
    return torch.randint(1, TEXT_VOCABULARY, (count,), generator=generator).tolist()


def _pad(ids: list[list[int]], padding_side: str) -> dict[str, torch.Tensor]:
    length = max(map(len, ids))
    input_ids = torch.full((len(ids), length), PAD)
    attention_mask = torch.zeros_like(input_ids)
    for row, tokens in enumerate(ids):
        columns = slice(length - len(tokens), length) if padding_side == "left" else slice(0, len(tokens))
        input_ids[row, columns] = torch.tensor(tokens)
        attention_mask[row, columns] = 1
    mm_token_type_ids = (input_ids >= TEXT_VOCABULARY).long()
    return {"input_ids": input_ids, "attention_mask": attention_mask, "mm_token_type_ids": mm_token_type_ids}


def _image_tensors(
    images: Sequence[Image], grid: tuple[int, int], pixels: int, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    num_patches = grid[0] * grid[1]
    tables, grids, num_crops = [], [], []
    first = 0  # patches of earlier crops
    for image in images:
        rows, cols = image.tiling
        low = pooling_windows(1, grid, IMAGE_POOLING)
        # The crops' patches as one picture: (rows * R, cols * C) numbers of patches, cut into windows.
        canvas = torch.arange(rows * cols * num_patches).view(rows, cols, *grid).transpose(1, 2)
        canvas = canvas.reshape(rows * grid[0], cols * grid[1]) + num_patches
        windows = pooling_windows(1, (canvas.shape[0], canvas.shape[1]), IMAGE_POOLING)
        high = torch.where(windows >= 0, canvas.flatten()[windows.clamp_min(0)], -1)
        table = torch.cat([low, high])
        tables.append(torch.where(table >= 0, table + first, -1))
        grids.append(
            [*window_grid(grid, IMAGE_POOLING), *window_grid((canvas.shape[0], canvas.shape[1]), IMAGE_POOLING)]
        )
        num_crops.append(1 + rows * cols)
        first += num_crops[-1] * num_patches
    return {
        "pixel_values": torch.randn(sum(num_crops), num_patches, pixels, generator=generator),
        "image_token_pooling": torch.cat(tables),
        "image_grids": torch.tensor(grids),
        "image_num_crops": torch.tensor(num_crops),
    }
