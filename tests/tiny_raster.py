"""A backbone over native SmolVLM that consists of hooks alone, which `RasterTower` and `CausalBackbone` must carry.

The tower has 5 layers of width 32 and prunes after layer 1; frames have 3 x 3 blocks of 2 x 2 patches. A sample is a
list of parts, in their order: `[3, Video(4), 5]` is 3 text tokens, a video of 4 frames, 5 text tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from stts_hf.modeling.settings_stts import PruningConfig, PruningSettings  # isort: split

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import AutoModel, GenerationMixin, SmolVLMConfig, SmolVLMForConditionalGeneration, SmolVLMModel
from transformers.models.smolvlm.configuration_smolvlm import SmolVLMVisionConfig
from transformers.models.smolvlm.modeling_smolvlm import (
    SmolVLMConnector,
    SmolVLMEncoderLayer,
    SmolVLMVisionTransformer,
)

from stts_hf.modeling.causal_stts import CausalBackbone
from stts_hf.modeling.outputs_stts import PruningHead
from stts_hf.modeling.raster_tower_stts import RasterSpanLayer, RasterTower
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


@strict
class RasterVisionConfig(PruningSettings, SmolVLMVisionConfig):
    model_type = "stts_test_raster_vision"
    refill_single_frame_bins: Literal[False] = False


@strict
class RasterConfig(PruningConfig, SmolVLMConfig):
    model_type = "stts_test_raster"
    native = SmolVLMConfig
    family = "the raster model of tests"
    vision_class = RasterVisionConfig


class RasterLayer(RasterSpanLayer, SmolVLMEncoderLayer):
    names = ("layer_norm1", "self_attn", "out_proj", "layer_norm2")
    options = ("scale", "dropout")


class RasterVisionModel(RasterTower, SmolVLMVisionTransformer):
    config: RasterVisionConfig
    layer = RasterLayer
    layers_name = "encoder.layers"
    norm_name = "post_layernorm"

    def embed(self, pixel_values: torch.Tensor) -> torch.Tensor:
        side = self.embeddings.num_patches_per_side
        whole = torch.ones(len(pixel_values), side, side, dtype=torch.bool, device=pixel_values.device)
        return self.embeddings(pixel_values.to(self.dtype), whole)


class RasterModel(CausalBackbone, SmolVLMModel):
    config: RasterConfig
    native = SmolVLMModel
    tower_name = "vision_model"
    image_inputs = ("pixel_values", "pixel_attention_mask")
    parts: ClassVar[dict[str, str]] = {
        "text_model": "language_model",
        "vision_model": "vision_tower",
        "vision_model.scorer": "scorer",
        "connector": "connector",
    }

    def __init__(self, config: Any):
        super(SmolVLMModel, self).__init__(config)
        self.vision_model = RasterVisionModel(config.vision_config)
        self.connector = SmolVLMConnector(config)
        self.text_model = AutoModel.from_config(config.text_config)
        self.post_init()

    @property
    def block_side(self) -> int:  # type: ignore[override]
        return self.config.scale_factor

    def connect(self, features: torch.Tensor) -> torch.Tensor:
        return self.connector.modality_projection(features.flatten(1))

    def count_image_tokens(self, vision: dict[str, Any]) -> list[int]:
        pictures = vision["pixel_values"].flatten(0, 1)
        return [GRID * GRID] * int((pictures != 0).flatten(1).any(-1).sum())  # native code skips those of zeros


class RasterForConditionalGeneration(PruningHead, SmolVLMForConditionalGeneration, GenerationMixin):
    config: RasterConfig
    native = SmolVLMForConditionalGeneration
    backbone = RasterModel


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


def tiny_model(rule: Any = "original", trained_scorer: bool = True, **vision: Any) -> Any:
    """In eval mode and float32; every weight is random and large enough to matter. Keywords go to the vision config."""
    settings: dict[str, Any] = VISION | {"pruning_layer": 1} | vision
    config = RasterConfig(vision_config=settings, text_config=TEXT, pruned_position_ids=rule, **OTHERS)
    model = RasterForConditionalGeneration(config).float().eval()
    randomise(model)
    nn.init.zeros_(model.lm_head.weight[TEXT_VOCABULARY:])  # answers hold no placeholders
    if not trained_scorer:
        nn.init.zeros_(model.model.vision_model.scorer.score_layer.weight)
        nn.init.constant_(model.model.vision_model.scorer.score_layer.bias, FIRST_LOGIT)
    return model


def stock_twin(model: Any) -> Any:
    """The stock model with the same weights."""
    config = SmolVLMConfig(vision_config=VISION, text_config=TEXT, **OTHERS)
    stock = SmolVLMForConditionalGeneration(config).eval()
    weights = {name: value for name, value in model.state_dict().items() if ".scorer." not in name}
    stock.load_state_dict(weights, strict=True)
    return stock


def sample(parts: Sequence[Part], seed: int = 0) -> Inputs:
    """Arguments of `model(...)` for one sample, (1, L), and `labels` of its text."""
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
        still = torch.randn(1, 3, IMAGE_SIDE, IMAGE_SIDE, generator=generator)
        moves = torch.rand(count, 1, IMAGE_SIDE, IMAGE_SIDE, generator=generator) < 0.3
        pixels = still + moves * torch.randn(count, 3, IMAGE_SIDE, IMAGE_SIDE, generator=generator)
        (frames if isinstance(part, Video) else pictures).append(pixels)
        grids += [[count, GRID, GRID]] if isinstance(part, Video) else []
        ids += [START, *[PLACEHOLDER] * GRID**2, END] * count
        types += [0, *[2 if isinstance(part, Video) else 1] * GRID**2, 0] * count
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
    """What stock SmolVLM gets in place of videos: frames of a single sample among its images, in their order."""
    frames = iter(inputs["pixel_values_videos"]) if "pixel_values_videos" in inputs else iter(())
    pictures = iter(inputs["pixel_values"][0]) if "pixel_values" in inputs else iter(())
    kinds = inputs["mm_token_type_ids"][0, inputs["mm_token_type_ids"][0] > 0][:: GRID**2].tolist()
    pixels = [next(frames if kind == 2 else pictures) for kind in kinds]
    text = {name: inputs[name] for name in ("input_ids", "attention_mask", "labels") if name in inputs}
    return text | {"pixel_values": torch.stack(pixels)[None]}
