"""Tiny SmolVLM2 models, their stock twins, and inputs as the processor lays them out.

The tower has 5 layers of width 32 and prunes after layer 1; frames have 3 x 3 blocks of 2 x 2 patches. A sample is a
list of parts, in their order: `[3, Video(4), 5]` is 3 text tokens, a video of 4 frames, 5 text tokens.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

from stts_hf import STTSSmolVLMConfig, STTSSmolVLMForConditionalGeneration
from stts_hf.modeling.scoring_stts import FIRST_LOGIT
from tests.tiny import randomise
from tests.tiny_qwen3_vl import Inputs
from tests.tiny_qwen3_vl import batch as _batch
from tests.tiny_qwen3_vl import pack as _pack

TEXT_VOCABULARY, PLACEHOLDER, START, END = 500, 500, 501, 502
SIDE, GRID = 2, 3  # of a block in patches, of a frame in blocks
PATCH = 4  # pixels
IMAGE_SIDE = PATCH * SIDE * GRID


@dataclass(frozen=True)
class Video:
    """Each frame is a start, `GRID * GRID` placeholders and an end."""

    frames: int


@dataclass(frozen=True)
class Image:
    """The same once."""


Part = int | Video | Image


VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "image_size": IMAGE_SIDE,
    "patch_size": PATCH,
}
TEXT = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
OTHERS: dict[str, Any] = {"scale_factor": SIDE, "image_token_id": PLACEHOLDER}


def tiny_config(rule: Any = "original", side: int = IMAGE_SIDE, **vision: Any) -> Any:
    """rule: `pruned_position_ids`. side: of frames, in pixels. Keywords go to the vision config."""
    settings: dict[str, Any] = VISION | {"pruning_layer": 1, "image_size": side} | vision
    return STTSSmolVLMConfig(vision_config=settings, text_config=TEXT, pruned_position_ids=rule, **OTHERS)


def tiny_model(config: Any = None, trained_scorer: bool = True) -> Any:
    """In eval mode and float32; every weight is random and large enough to matter."""
    model = STTSSmolVLMForConditionalGeneration(config or tiny_config()).float().eval()
    randomise(model)
    nn.init.zeros_(model.lm_head.weight[TEXT_VOCABULARY:])  # answers hold no placeholders
    if not trained_scorer:
        nn.init.zeros_(model.model.vision_model.scorer.score_layer.weight)
        nn.init.constant_(model.model.vision_model.scorer.score_layer.bias, FIRST_LOGIT)
    return model


_native: Any = SmolVLMForConditionalGeneration


class StockSmolVLM(_native):
    """Stock SmolVLM2, which takes frames of videos as images: gets our inputs as such."""

    @functools.wraps(_native.forward)  # whose signature says what `generate` takes
    def forward(self, *args: Any, **inputs: Any) -> Any:
        return super().forward(*args, **as_pictures(inputs))

    def generate(self, *args: Any, **inputs: Any) -> Any:
        return super().generate(*args, **as_pictures(inputs))


def stock_twin(model: Any) -> Any:
    """The stock model with the same weights."""
    config = SmolVLMConfig(vision_config=VISION, text_config=TEXT, **OTHERS)
    stock = StockSmolVLM(config).eval()
    weights = {name: value for name, value in model.state_dict().items() if ".scorer." not in name}
    stock.load_state_dict(weights, strict=True)
    return stock


def sample(parts: Sequence[Part], seed: int = 0, grid: int = GRID) -> Inputs:
    """Arguments of `model(...)` for one sample, (1, L), and `labels` of its text."""
    side = PATCH * SIDE * grid
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = []
    types: list[int] = []
    frames: list[torch.Tensor] = []
    pictures: list[torch.Tensor] = []
    grids: list[list[int]] = []
    for part in parts:
        if isinstance(part, int):
            ids += torch.randint(1, TEXT_VOCABULARY, (part,), generator=generator).tolist()
            types += [0] * part
            continue
        count = part.frames if isinstance(part, Video) else 1
        still = torch.randn(1, 3, side, side, generator=generator)
        moves = torch.rand(count, 1, side, side, generator=generator) < 0.3
        pixels = still + moves * torch.randn(count, 3, side, side, generator=generator)
        (frames if isinstance(part, Video) else pictures).append(pixels)
        grids += [[count, grid, grid]] if isinstance(part, Video) else []
        ids += [START, *[PLACEHOLDER] * grid**2, END] * count
        types += [0, *[2 if isinstance(part, Video) else 1] * grid**2, 0] * count
    inputs: Inputs = {"input_ids": torch.tensor([ids]), "mm_token_type_ids": torch.tensor([types])}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["labels"] = inputs["input_ids"].where(inputs["input_ids"] < TEXT_VOCABULARY, -100)
    if frames:
        inputs |= {"pixel_values_videos": torch.cat(frames), "video_grids": torch.tensor(grids)}
    return inputs | ({"pixel_values": torch.cat(pictures)[None]} if pictures else {})


def samples(rows: Sequence[Sequence[Part]]) -> list[Inputs]:
    return [sample(row, index) for index, row in enumerate(rows)]


def batch(alone: Sequence[Inputs], padding_side: str = "left") -> Inputs:
    """Samples as rows of one batch; rows have as many images as the one with most, and images of zeros fill up."""
    most = max((row["pixel_values"].shape[1] for row in alone if "pixel_values" in row), default=0)
    return _batch([row | _images(row, most) for row in alone], padding_side)


def pack(alone: Sequence[Inputs]) -> Inputs:
    """Samples in a single row, told apart by positions that start over."""
    packed = _pack([{name: value for name, value in row.items() if name != "pixel_values"} for row in alone])
    pictures = [row["pixel_values"] for row in alone if "pixel_values" in row]
    return packed | ({"pixel_values": torch.cat(pictures, dim=1)} if pictures else {})


def _images(row: Inputs, most: int) -> Inputs:
    if not most:
        return {}
    pictures = row.get("pixel_values", torch.zeros(1, 0, 3, IMAGE_SIDE, IMAGE_SIDE))
    return {"pixel_values": nn.functional.pad(pictures, (0,) * 7 + (most - pictures.shape[1],))}


def as_pictures(inputs: Inputs) -> Inputs:
    """What stock SmolVLM2 gets in place of videos: their frames among the images of each row, in their order."""
    others = {name: value for name, value in inputs.items() if name not in ("video_grids", "mm_token_type_ids")}
    if others.pop("pixel_values_videos", None) is None:
        return others
    frames, rows = iter(inputs["pixel_values_videos"]), []
    for index, types in enumerate(inputs["mm_token_type_ids"]):
        pictures = iter(inputs["pixel_values"][index]) if "pixel_values" in inputs else iter(())
        rows.append([next(frames if kind == 2 else pictures) for kind in types[types > 0][:: GRID**2].tolist()])
    padding = torch.zeros_like(inputs["pixel_values_videos"][0])
    most = max(map(len, rows))
    filled = [torch.stack([*row, *[padding] * (most - len(row))]) for row in rows]
    return others | {"pixel_values": torch.stack(filled)}
