"""Sizes of the models that presets measure, and how each backbone's processor lays out a text with one video."""

import abc
import dataclasses
from typing import Any

import numpy as np
import torch
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from stts_hf.benchmark.presets import Workload
from stts_hf.modeling.configuration_stts import STTSConfig
from stts_hf.modeling.configuration_stts_qwen3_vl import STTSQwen3VLConfig
from stts_hf.modeling.video_processing_stts import STTSVideoProcessor

START = 3  # text tokens before the video
NUM_SPECIAL = 4  # ids at the end of the text vocabulary that random text leaves out


@dataclasses.dataclass(frozen=True)
class Geometry(abc.ABC):
    """A class for each backbone. vision, text: fields of the model's vision and text configuration."""

    vision: dict[str, Any]
    text: dict[str, Any]

    @abc.abstractmethod
    def config(self) -> Any:
        """The model's configuration."""

    @abc.abstractmethod
    def frame(self, config: Any) -> tuple[list[int], list[int]]:
        """Ids of a frame in the text (its start, placeholders and end), and their `mm_token_type_ids`."""

    @abc.abstractmethod
    def video_inputs(self, workload: Workload, config: Any, generator: torch.Generator) -> dict[str, Any]:
        """Pixels, drawn on the generator's device, and what goes with them, of as many videos as the batch has rows."""

    @abc.abstractmethod
    def read_clip(self, frames: np.ndarray, config: Any) -> dict[str, torch.Tensor]:
        """`video_inputs` of frames, uint8 (T, side, side, 3), by the backbone's own video processor."""

    @abc.abstractmethod
    def clip_size(self, config: Any) -> tuple[int, int]:
        """Side in pixels of a square frame, and its blocks along it."""

    def num_frames(self, workload: Workload) -> int:
        """Frames of the tower, for a video of so many frames."""
        return workload.frames

    def inputs(self, workload: Workload, config: Any, device: torch.device) -> dict[str, Any]:
        """
        Arguments of `model(...)`, laid out as the processor does: each row has some text, one video, more text.

        Pixels and ids are random, never zeros. Returns input_ids, attention_mask, mm_token_type_ids (B, L), what
        `video_inputs` returns, and labels (B, L) for training: the text after the video.
        """
        generator = torch.Generator(device).manual_seed(0)
        time, answer = [0] * workload.timestamp_tokens, max(workload.text_tokens - START, 1)
        frames = ((time + of_frame) * self.num_frames(workload) for of_frame in self.frame(config))
        rows = [torch.tensor([0] * START + of_frames + [0] * answer, device=device) for of_frames in frames]
        input_ids, token_types = (row.repeat(workload.batch, 1) for row in rows)
        words = random_words(config, input_ids.shape, generator)
        inputs = {
            "input_ids": torch.where(input_ids == 0, words, input_ids),
            "attention_mask": torch.ones_like(input_ids),
            "mm_token_type_ids": token_types,
            **self.video_inputs(workload, config, generator),
        }
        if workload.mode == "training":
            inputs["labels"] = torch.full_like(input_ids, -100)
            inputs["labels"][:, -answer:] = inputs["input_ids"][:, -answer:]
        return inputs


def random_words(config: Any, shape: Any, generator: torch.Generator) -> torch.Tensor:
    """Ids of text, on the generator's device."""
    words = config.text_config.vocab_size - NUM_SPECIAL
    return torch.randint(1, words, shape, generator=generator, device=generator.device)


def random_pixels(workload: Workload, generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, device=generator.device).to(getattr(torch, workload.dtype))


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
        places = {"image_start": 0, "image_end": 1, "low_res_image_start": 4, "frame_start": 7, "frame_end": 8}
        special = {f"{name}_token_id": first + place for name, place in places.items()}
        return STTSConfig(
            vision_config=self.vision,
            adapter_config=adapter,
            text_config=self.text,
            image_patch_id=first + 2,
            **special,
        )

    def frame(self, config: STTSConfig) -> tuple[list[int], list[int]]:
        rows, cols = config.vision_config.block_grid
        ids = [config.frame_start_token_id, *[config.image_patch_id] * (rows * cols), config.frame_end_token_id]
        return ids, [1] * len(ids)

    def video_inputs(self, workload: Workload, config: STTSConfig, generator: torch.Generator) -> dict[str, Any]:
        """pixel_values_videos (F, N, pixels), video_token_pooling (G, S), video_grids (V, 3)."""
        vision, device = config.vision_config, generator.device
        (rows, cols), (height, width) = vision.block_grid, vision.pooling_size
        num_patches, frames = rows * height * cols * width, workload.batch * workload.frames
        patches = torch.arange(num_patches, device=device).view(rows, height, cols, width)
        windows = patches.transpose(1, 2).reshape(rows * cols, height * width)  # (n, S)
        first = num_patches * torch.arange(frames, device=device)
        values = vision.patch_size**2 * vision.num_channels
        return {
            "pixel_values_videos": random_pixels(workload, generator, frames, num_patches, values),
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

    def num_frames(self, workload: Workload) -> int:
        return -(-workload.frames // self.vision["temporal_patch_size"])

    def frame(self, config: STTSQwen3VLConfig) -> tuple[list[int], list[int]]:
        blocks = self.grid[0] * self.grid[1]
        ids = [config.vision_start_token_id, *[config.video_token_id] * blocks, config.vision_end_token_id]
        return ids, [0, *[2] * blocks, 0]

    def video_inputs(self, workload: Workload, config: STTSQwen3VLConfig, generator: torch.Generator) -> dict[str, Any]:
        """pixel_values_videos (F * N, values of a patch), block by block; video_grid_thw (V, 3) in patches."""
        side, (rows, cols), frames = self.vision["spatial_merge_size"], self.grid, self.num_frames(workload)
        values = 3 * self.vision["temporal_patch_size"] * self.vision["patch_size"] ** 2
        patches = workload.batch * frames * rows * cols * side**2
        grids = torch.tensor([[frames, side * rows, side * cols]] * workload.batch, device=generator.device)
        return {"pixel_values_videos": random_pixels(workload, generator, patches, values), "video_grid_thw": grids}

    def clip_size(self, config: STTSQwen3VLConfig) -> tuple[int, int]:
        return 12 * self.vision["spatial_merge_size"] * self.vision["patch_size"], 12

    def read_clip(self, frames: np.ndarray, config: STTSQwen3VLConfig) -> dict[str, torch.Tensor]:
        sizes = {name: self.vision[name] for name in ("patch_size", "temporal_patch_size")}
        processor = Qwen3VLVideoProcessor(**sizes, merge_size=self.vision["spatial_merge_size"])
        return dict(processor([frames], do_resize=False, do_sample_frames=False, return_tensors="pt"))


def _molmo2_vision(sizes: tuple[int, ...], pruning_layer: int, side: int = 378) -> dict[str, Any]:
    """sizes: width, MLP, layers, heads, head's width."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    vision = dict(zip(names, sizes, strict=True))
    others = {"num_key_value_heads": vision["num_attention_heads"], "image_size": [side, side], "patch_size": 14}
    return {**vision, **others, "pruning_layer": pruning_layer}


def _qwen_vision(
    sizes: tuple[int, int, int, int], taps: tuple[int, int, int] | tuple[int, int], pruning_layer: int
) -> dict[str, Any]:
    """sizes: width, layers, heads, the language model's width. taps: deepstack's layers."""
    width, layers, heads, out = sizes
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


def _text(sizes: tuple[int, ...], vocabulary: int = 13312, head_dim: int = 128) -> dict[str, Any]:
    """sizes: width, MLP, layers, heads, heads of keys."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    rope = {"rope_type": "default", "rope_theta": 5e6}
    text = dict(zip(names, sizes, strict=True))
    return {**text, "head_dim": head_dim, "vocab_size": vocabulary, "rope_parameters": rope}


def _qwen_text(
    sizes: tuple[int, ...], vocabulary: int = 13312, sections: tuple[int, int, int] = (24, 20, 20)
) -> dict[str, Any]:
    text = _text(sizes, vocabulary, 2 * sum(sections))
    text["rope_parameters"] |= {"mrope_section": list(sections), "mrope_interleaved": True}
    return text


SO400M = _molmo2_vision((1152, 4304, 25, 16, 72), 3)  # Molmo2 uses 25 of the original configuration's 27 layers
TEXT_4B = (2560, 9728, 36, 32, 8)
# Sizes of the released Qwen3-VL-4B; 364 blocks are what 720p has left in 64 frames under the processor's pixel budget,
# 91 in 256 frames.
QWEN_4B = (_qwen_vision((1024, 24, 16, 2560), (5, 11, 17), 3), _qwen_text(TEXT_4B, 151936))
_NONE = (96, 2, 4, 2)  # of a text model as small as it can be, where only the tower is measured
# Smaller towers keep the share of dense layers: 2 of 13, or 1 of 6, are nearly 4 of 25.
GEOMETRIES: dict[str, Geometry] = {
    "tiny": Molmo2(_molmo2_vision((32, 64, 6, 4, 8), 1, 126), _text((48, *_NONE), 512, 16), (5, 3)),
    "so400m": Molmo2(SO400M, _text((2560, 64, 1, 32, 8), 512), (24, 18)),
    "narrow-tower": Molmo2(_molmo2_vision((144, 538, 13, 2, 72), 1), _text((320, *_NONE), 512, 64), (12, 9)),
    "molmo2-4b": Molmo2(SO400M, _text(TEXT_4B, 151936), (24, 18)),
    "molmo2-small": Molmo2(_molmo2_vision((288, 1076, 13, 4, 72), 1, 252), _text((1024, 3888, 8, 12, 3)), (12, 9)),
    "molmo2-small-long": Molmo2(_molmo2_vision((144, 538, 6, 2, 72), 0, 252), _text((640, 2432, 3, 4, 1)), (5, 4)),
    "qwen3-vl-tiny": Qwen3VL(
        _qwen_vision((32, 6, 4, 48), (1, 4), 1), _qwen_text((48, 96, 3, 4, 2), 512, (4, 2, 2)), (2, 3)
    ),
    "qwen3-vl-4b": Qwen3VL(*QWEN_4B, (14, 26)),
    "qwen3-vl-4b-low": Qwen3VL(*QWEN_4B, (7, 13)),
    "qwen3-vl-small": Qwen3VL(
        _qwen_vision((256, 12, 4, 1024), (2, 5, 8), 1), _qwen_text((1024, 3891, 8, 16, 4)), (8, 14)
    ),
    "qwen3-vl-small-long": Qwen3VL(
        _qwen_vision((128, 6, 2, 640), (1, 2, 4), 0), _qwen_text((640, 2432, 3, 4, 1)), (8, 14)
    ),
}


def geometry_config(name: str) -> Any:
    """Configuration of the geometry `name`, a key of `GEOMETRIES`."""
    return GEOMETRIES[name].config()


def workload_inputs(workload: Workload, config: Any, device: torch.device) -> dict[str, Any]:
    """Arguments of `model(...)` of a workload; see `Geometry.inputs`."""
    return GEOMETRIES[workload.geometry].inputs(workload, config, device)
