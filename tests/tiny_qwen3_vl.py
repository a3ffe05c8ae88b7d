"""Tiny Qwen3-VL models and inputs: random weights, every part in place.

The tower has 6 layers of width 32, prunes after layer 2 and hands layers 1 and 4 to deepstack; the text model has 3
layers of width 48. A sample is a list of parts, in their order: `[3, Video(4, 2, 3), 5]` is 3 text tokens, a video of 4
tubelets of 2 x 3 blocks, 5 text tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLForConditionalGeneration

from stts_hf.modeling.configuration_stts_qwen3_vl import STTSQwen3VLConfig
from stts_hf.modeling.modeling_stts_qwen3_vl import STTSQwen3VLForConditionalGeneration
from stts_hf.modeling.scoring_stts import FIRST_LOGIT
from stts_hf.modeling.settings_stts import PRUNING_FIELDS
from tests.tiny import randomise

TEXT_VOCABULARY, IMAGE_ID, VIDEO_ID, VISION_START, VISION_END = 500, 500, 501, 502, 503
SIDE = 2  # of a block, in patches
PATCH_VALUES = 3 * 2 * 4 * 4  # channels, video frames of a tubelet, pixels
VISION = {
    "depth": 6,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 4,
    "patch_size": 4,
    "spatial_merge_size": SIDE,
    "out_hidden_size": 48,
    "pruning_layer": 2,
}
TEXT = {
    "vocab_size": 512,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
TOKEN_IDS = {
    "image_token_id": IMAGE_ID,
    "video_token_id": VIDEO_ID,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Video:
    """Each tubelet is a timestamp (two text tokens), a start, `rows * cols` placeholders and an end."""

    tubelets: int
    rows: int = 2
    cols: int = 3


@dataclass(frozen=True)
class Image:
    """A start, `rows * cols` placeholders and an end."""

    rows: int = 2
    cols: int = 3


Part = int | Video | Image


def tiny_config(*, taps: Sequence[int] = (1, 4), model_overrides: dict[str, Any] | None = None, **vision: Any) -> Any:
    """Configuration of a tiny model; keywords go to the vision config (`pruning_ratio=0.3, packing=...`)."""
    of_vision = {"num_position_embeddings": 36, "deepstack_visual_indexes": list(taps)}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    return STTSQwen3VLConfig(
        vision_config=VISION | of_vision | vision,
        text_config=TEXT | {"head_dim": 16, "rope_parameters": rope},
        **TOKEN_IDS | (model_overrides or {}),
    )


def tiny_model(
    config: Any = None, seed: int = 0, trained_scorer: bool = True, kind: Any = STTSQwen3VLForConditionalGeneration
) -> Any:
    """A model of `kind` in eval mode and float32 whose every weight is random and large enough to matter."""
    model = kind(config or tiny_config()).float().eval()
    randomise(model, seed)
    if not trained_scorer:
        nn.init.zeros_(model.model.visual.scorer.score_layer.weight)
        nn.init.constant_(model.model.visual.scorer.score_layer.bias, FIRST_LOGIT)
    return model


def stock_twin(model: Any, kind: Any = Qwen3VLForConditionalGeneration) -> Any:
    """The stock model of `kind` with the same settings and weights."""
    config = model.config.to_dict()
    vision = {
        name: value for name, value in config["vision_config"].items() if name not in (*PRUNING_FIELDS, "model_type")
    }
    ids = {name: config[name] for name in config if name.endswith("_token_id")}
    stock = kind(kind.config_class(vision_config=vision, text_config=config["text_config"], **ids)).eval()
    weights = {name: value for name, value in model.state_dict().items() if ".scorer." not in name}
    stock.load_state_dict(weights, strict=True)
    return stock


def sample(parts: Sequence[Part], seed: int = 0, timestamps: bool = True) -> Inputs:
    """
    Arguments of `model(...)` for one sample, (1, L), as the processor returns them, and `labels` of its text. Without
    timestamps, all tubelets of a video lie between one start and one end.
    """
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = []
    pixels: dict[str, list[torch.Tensor]] = {"pixel_values_videos": [], "pixel_values": []}
    grids: dict[str, list[list[int]]] = {"video_grid_thw": [], "image_grid_thw": []}
    for part in parts:
        if isinstance(part, int):
            ids += torch.randint(1, TEXT_VOCABULARY, (part,), generator=generator).tolist()
            continue
        frames = part.tubelets if isinstance(part, Video) else 1
        blocks = part.rows * part.cols
        runs = frames if timestamps else 1
        for _ in range(runs):
            if isinstance(part, Video) and timestamps:
                ids += torch.randint(1, TEXT_VOCABULARY, (2,), generator=generator).tolist()
            pads = [VIDEO_ID if isinstance(part, Video) else IMAGE_ID] * (blocks * frames // runs)
            ids += [VISION_START, *pads, VISION_END]
        kind = (
            ("pixel_values_videos", "video_grid_thw") if isinstance(part, Video) else ("pixel_values", "image_grid_thw")
        )
        grids[kind[1]].append([frames, SIDE * part.rows, SIDE * part.cols])
        shape = (frames, SIDE * SIDE * blocks, PATCH_VALUES)
        still = torch.randn(1, *shape[1:], generator=generator)
        moves = torch.rand(*shape[:2], 1, generator=generator) < 0.5
        pixels[kind[0]].append((still + moves * torch.randn(shape, generator=generator)).flatten(0, 1))
    inputs: Inputs = {"input_ids": torch.tensor([ids])}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["mm_token_type_ids"] = (inputs["input_ids"] == IMAGE_ID).long() + 2 * (
        inputs["input_ids"] == VIDEO_ID
    ).long()
    inputs["labels"] = inputs["input_ids"].where(inputs["input_ids"] < TEXT_VOCABULARY, -100)
    inputs |= {name: torch.cat(value) for name, value in pixels.items() if value}
    return inputs | {name: torch.tensor(value) for name, value in grids.items() if value}


def samples(rows: Sequence[Sequence[Part]], seed: int = 0) -> list[Inputs]:
    return [sample(row, seed + index) for index, row in enumerate(rows)]


FILLER = {"input_ids": 0, "attention_mask": 0, "mm_token_type_ids": 0, "labels": -100, "position_ids": 0}


def batch(alone: Sequence[Inputs], padding_side: str = "left") -> Inputs:
    """Samples as rows of one batch."""
    longest = max(row["input_ids"].shape[1] for row in alone)
    together: Inputs = {}
    for name in FILLER:
        rows = [row[name] for row in alone if name in row]
        if rows:
            missing = [longest - row.shape[1] for row in rows]
            sides = [(some, 0) if padding_side == "left" else (0, some) for some in missing]
            padded = [nn.functional.pad(row, side, value=FILLER[name]) for row, side in zip(rows, sides, strict=True)]
            together[name] = torch.cat(padded)
    return together | _vision(alone)


def pack(alone: Sequence[Inputs]) -> Inputs:
    """Samples in a single row, told apart by positions that start over."""
    names = [name for name in FILLER if name in alone[0] and name != "attention_mask"]
    packed = {name: torch.cat([row[name] for row in alone], dim=-1) for name in names}
    packed["position_ids"] = torch.cat([torch.arange(row["input_ids"].shape[1]) for row in alone])[None]
    return packed | _vision(alone)


def _vision(alone: Sequence[Inputs]) -> Inputs:
    names = [name for row in alone for name in row if name not in FILLER]
    return {name: torch.cat([row[name] for row in alone if name in row]) for name in dict.fromkeys(names)}


def text_of(inputs: Inputs) -> Inputs:
    """Without labels, as for `generate`."""
    return {name: value for name, value in inputs.items() if name != "labels"}
