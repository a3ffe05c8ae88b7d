"""Sizes of the models that presets measure, and how each backbone's processor lays out a text with one video.

A geometry is a class for each backbone: what it knows is the configuration of its sizes and the arguments of a call.
"""

import dataclasses
from typing import Any

import numpy as np
import torch
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from stts_hf.benchmark.presets import Workload
from stts_hf.modeling.configuration_stts import STTSConfig
from stts_hf.modeling.configuration_stts_qwen3_vl import STTSQwen3VLConfig
from stts_hf.modeling.settings_stts import PruningConfig
from stts_hf.modeling.video_processing_stts import STTSVideoProcessor

START = 3  # text tokens before the video


@dataclasses.dataclass(frozen=True)
class Geometry:
    """vision, text: fields of the model's vision and text configuration."""

    vision: dict[str, Any]
    text: dict[str, Any]

    def config(self) -> PruningConfig:
        """The model's configuration."""
        raise NotImplementedError

    def num_words(self, config: Any) -> int:
        """Ids below are those of text."""
        raise NotImplementedError

    def frame(self, config: Any) -> list[int]:
        """Ids of a frame in the text: of its start, its placeholders and its end."""
        raise NotImplementedError

    def num_frames(self, workload: Workload) -> int:
        """Of the tower, for a video of so many frames."""
        return workload.frames

    def video_inputs(self, workload: Workload, config: Any, generator: torch.Generator) -> dict[str, Any]:
        """Pixels, drawn on the generator's device, and what goes with them, of as many videos as the batch has rows."""
        raise NotImplementedError

    def token_types(self, input_ids: torch.Tensor, config: Any) -> torch.Tensor:
        """`mm_token_type_ids` (B, L)."""
        raise NotImplementedError

    def clip_size(self, config: Any) -> tuple[int, int]:
        """Side in pixels of a square frame, and its blocks along it."""
        raise NotImplementedError

    def read_clip(self, frames: np.ndarray, config: Any) -> dict[str, torch.Tensor]:
        """`video_inputs` of frames, uint8 (T, side, side, 3), by the backbone's own video processor."""
        raise NotImplementedError

    def inputs(self, workload: Workload, config: Any, device: torch.device) -> dict[str, Any]:
        """
        Arguments of `model(...)`, laid out as the processor does: each row has some text, one video, more text.

        Pixels and ids are random, never zeros. Returns input_ids, attention_mask, mm_token_type_ids (B, L), what
        `video_inputs` returns, and labels (B, L) for training: the text after the video.
        """
        generator = torch.Generator(device).manual_seed(0)
        frame = [0] * workload.timestamp_tokens + self.frame(config)
        answer = max(workload.text_tokens - START, 1)
        row = torch.tensor([0] * START + frame * self.num_frames(workload) + [0] * answer, device=device)
        input_ids = row.repeat(workload.batch, 1)
        drawn = torch.randint(1, self.num_words(config), input_ids.shape, generator=generator, device=device)
        input_ids = torch.where(input_ids == 0, drawn, input_ids)
        inputs = {
            "input_ids": input_ids,
            "attention_mask": torch.ones_like(input_ids),
            "mm_token_type_ids": self.token_types(input_ids, config),
            **self.video_inputs(workload, config, generator),
        }
        if workload.mode == "training":
            labels = torch.full_like(input_ids, -100)
            labels[:, -answer:] = input_ids[:, -answer:]
            inputs["labels"] = labels
        return inputs


def draw_pixels(workload: Workload, generator: torch.Generator, *shape: int) -> torch.Tensor:
    drawn = torch.randn(*shape, generator=generator, device=generator.device)
    return drawn.to(getattr(torch, workload.dtype))


@dataclasses.dataclass(frozen=True)
class Molmo2(Geometry):
    """feature_layers: of the ViT, which the connector takes."""

    feature_layers: tuple[int, int]

    def config(self) -> STTSConfig:
        shared = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
        adapter = {
            "vision_feature_layer": list(self.feature_layers),
            **{field: self.vision[field] for field in shared},
            "intermediate_size": self.text["intermediate_size"],
            "text_hidden_size": self.text["hidden_size"],
        }
        first = self.text["vocab_size"]  # special tokens are numbered from the end of the text vocabulary
        return STTSConfig(
            vision_config=self.vision,
            adapter_config=adapter,
            text_config=self.text,
            image_start_token_id=first,
            image_end_token_id=first + 1,
            image_patch_id=first + 2,
            low_res_image_start_token_id=first + 4,
            frame_start_token_id=first + 7,
            frame_end_token_id=first + 8,
        )

    def num_words(self, config: STTSConfig) -> int:
        return int(config.text_config.vocab_size)

    def frame(self, config: STTSConfig) -> list[int]:
        rows, cols = config.vision_config.block_grid
        placeholders = [config.image_patch_id] * (rows * cols)
        return [config.frame_start_token_id, *placeholders, config.frame_end_token_id]

    def token_types(self, input_ids: torch.Tensor, config: STTSConfig) -> torch.Tensor:
        return (input_ids >= self.num_words(config)).long()

    def video_inputs(self, workload: Workload, config: STTSConfig, generator: torch.Generator) -> dict[str, Any]:
        """pixel_values_videos (F, N, pixels), video_token_pooling (G, S), video_grids (V, 3)."""
        vision, device = config.vision_config, generator.device
        patch_rows, patch_cols = (side // vision.patch_size for side in vision.image_size)
        rows, cols = vision.block_grid
        height, width = vision.pooling_size
        patches = torch.arange(patch_rows * patch_cols, device=device).view(rows, height, cols, width)
        windows = patches.transpose(1, 2).reshape(rows * cols, height * width)  # (n, S)
        frames = workload.batch * workload.frames
        first = torch.arange(frames, device=device) * (patch_rows * patch_cols)
        values = vision.patch_size**2 * vision.num_channels
        return {
            "pixel_values_videos": draw_pixels(workload, generator, frames, patch_rows * patch_cols, values),
            "video_token_pooling": (windows + first[:, None, None]).flatten(0, 1),
            "video_grids": torch.tensor([[workload.frames, rows, cols]] * workload.batch),
        }

    def clip_size(self, config: STTSConfig) -> tuple[int, int]:
        return config.vision_config.image_size[0], config.vision_config.block_grid[0]

    def read_clip(self, frames: np.ndarray, config: STTSConfig) -> dict[str, torch.Tensor]:
        vision = config.vision_config
        size = dict(zip(("height", "width"), vision.image_size, strict=True))
        processor = STTSVideoProcessor(size=size, patch_size=vision.patch_size, pooling_size=vision.pooling_size)
        return dict(processor([frames], do_sample_frames=False, return_tensors="pt"))


@dataclasses.dataclass(frozen=True)
class Qwen3VL(Geometry):
    """grid: rows and columns of blocks of a frame of the tower, which is a tubelet of video frames."""

    grid: tuple[int, int]

    def config(self) -> STTSQwen3VLConfig:
        last = self.text["vocab_size"] - 1  # special tokens end the text vocabulary
        return STTSQwen3VLConfig(
            vision_config=self.vision,
            text_config=self.text,
            image_token_id=last - 3,
            video_token_id=last - 2,
            vision_start_token_id=last - 1,
            vision_end_token_id=last,
            tie_word_embeddings=True,
        )

    def num_words(self, config: STTSQwen3VLConfig) -> int:
        return config.image_token_id

    def num_frames(self, workload: Workload) -> int:
        return -(-workload.frames // self.vision["temporal_patch_size"])

    def frame(self, config: STTSQwen3VLConfig) -> list[int]:
        rows, cols = self.grid
        return [config.vision_start_token_id, *[config.video_token_id] * (rows * cols), config.vision_end_token_id]

    def token_types(self, input_ids: torch.Tensor, config: STTSQwen3VLConfig) -> torch.Tensor:
        return 2 * (input_ids == config.video_token_id).long()

    def video_inputs(self, workload: Workload, config: STTSQwen3VLConfig, generator: torch.Generator) -> dict[str, Any]:
        """pixel_values_videos (F * N, values of a patch), block by block; video_grid_thw (V, 3) in patches."""
        side, (rows, cols), frames = self.vision["spatial_merge_size"], self.grid, self.num_frames(workload)
        values = 3 * self.vision["temporal_patch_size"] * self.vision["patch_size"] ** 2
        patches = workload.batch * frames * rows * cols * side**2
        grids = torch.tensor([[frames, side * rows, side * cols]] * workload.batch, device=generator.device)
        return {"pixel_values_videos": draw_pixels(workload, generator, patches, values), "video_grid_thw": grids}

    def clip_size(self, config: STTSQwen3VLConfig) -> tuple[int, int]:
        return 12 * self.vision["spatial_merge_size"] * self.vision["patch_size"], 12

    def read_clip(self, frames: np.ndarray, config: STTSQwen3VLConfig) -> dict[str, torch.Tensor]:
        processor = Qwen3VLVideoProcessor(
            patch_size=self.vision["patch_size"],
            temporal_patch_size=self.vision["temporal_patch_size"],
            merge_size=self.vision["spatial_merge_size"],
        )
        return dict(processor([frames], do_resize=False, do_sample_frames=False, return_tensors="pt"))


def _molmo2_vision(
    width: int, mlp: int, layers: int, heads: int, pruning_layer: int, side: int = 378, head_dim: int = 72
) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": head_dim,
        "image_size": [side, side],
        "patch_size": 14,
        "pruning_layer": pruning_layer,
    }


def _qwen_vision(
    width: int, layers: int, heads: int, taps: tuple[int, ...], pruning_layer: int, out: int
) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "depth": layers,
        "num_heads": heads,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "num_position_embeddings": 48**2,
        "out_hidden_size": out,
        "deepstack_visual_indexes": list(taps),
        "pruning_layer": pruning_layer,
    }


def _text(
    width: int,
    mlp: int,
    layers: int,
    heads: int,
    key_heads: int,
    vocab: int = 13312,
    head_dim: int = 128,
) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6},
    }


def _qwen_text(
    width: int,
    mlp: int,
    layers: int,
    heads: int,
    key_heads: int,
    vocab: int,
    sections: tuple[int, int, int] = (24, 20, 20),
) -> dict[str, Any]:
    text = _text(width, mlp, layers, heads, key_heads, vocab, 2 * sum(sections))
    text["rope_parameters"] |= {"mrope_section": list(sections), "mrope_interleaved": True}
    return text


SO400M = _molmo2_vision(1152, 4304, 25, 16, 3)  # of the 27 layers of the original's configuration Molmo2 uses 25
# Sizes of the released Qwen3-VL-4B; 364 blocks are what 720p has left in 64 frames under the processor's pixel budget,
# 91 in 256 frames.
QWEN_4B = (_qwen_vision(1024, 24, 16, (5, 11, 17), 3, 2560), _qwen_text(2560, 9728, 36, 32, 8, 151936))
# Smaller towers keep the share of dense layers: 2 of 13, or 1 of 6, are nearly 4 of 25. Where only the tower is
# measured, the text model is as small as it can be.
GEOMETRIES: dict[str, Geometry] = {
    "tiny": Molmo2(_molmo2_vision(32, 64, 6, 4, 1, 126, head_dim=8), _text(48, 96, 2, 4, 2, 512, 16), (5, 3)),
    "so400m": Molmo2(SO400M, _text(2560, 64, 1, 32, 8, 512), (24, 18)),
    "narrow-tower": Molmo2(_molmo2_vision(144, 538, 13, 2, 1), _text(320, 96, 2, 4, 2, 512, 64), (12, 9)),
    "molmo2-4b": Molmo2(SO400M, _text(2560, 9728, 36, 32, 8, 151936), (24, 18)),
    "molmo2-small": Molmo2(_molmo2_vision(288, 1076, 13, 4, 1, 252), _text(1024, 3888, 8, 12, 3), (12, 9)),
    "molmo2-small-long": Molmo2(_molmo2_vision(144, 538, 6, 2, 0, 252), _text(640, 2432, 3, 4, 1), (5, 4)),
    "qwen3-vl-tiny": Qwen3VL(
        _qwen_vision(32, 6, 4, (1, 4), 1, 48), _qwen_text(48, 96, 3, 4, 2, 512, sections=(4, 2, 2)), (2, 3)
    ),
    "qwen3-vl-4b": Qwen3VL(*QWEN_4B, (14, 26)),
    "qwen3-vl-4b-low": Qwen3VL(*QWEN_4B, (7, 13)),
    "qwen3-vl-small": Qwen3VL(
        _qwen_vision(256, 12, 4, (2, 5, 8), 1, 1024), _qwen_text(1024, 3891, 8, 16, 4, 13312), (8, 14)
    ),
    "qwen3-vl-small-long": Qwen3VL(
        _qwen_vision(128, 6, 2, (1, 2, 4), 0, 640), _qwen_text(640, 2432, 3, 4, 1, 13312), (8, 14)
    ),
}


def geometry_config(name: str) -> Any:
    """Configuration of the geometry `name`, a key of `GEOMETRIES`."""
    return GEOMETRIES[name].config()


def workload_inputs(workload: Workload, config: Any, device: torch.device) -> dict[str, Any]:
    """Arguments of `model(...)` of a workload; see `Geometry.inputs`."""
    return GEOMETRIES[workload.geometry].inputs(workload, config, device)
