"""Sizes of the models that presets measure, and their inputs: what each backbone's processor makes of one video."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from stts_hf.benchmark.presets import Workload
from stts_hf.checkpoints.families import OWN
from stts_hf.modeling.configuration_stts import STTSConfig
from stts_hf.modeling.configuration_stts_smolvlm import STTSSmolVLMConfig

START = 3  # text tokens before the video
NUM_SPECIAL = 4  # ids at the end of the text vocabulary that random text leaves out


def _molmo2(
    vision: Sequence[int], pruning_layer: int, feature_layers: Sequence[int], text: dict[str, Any], side: int = 378
) -> STTSConfig:
    """vision: width, MLP, layers, heads, head's width. feature_layers: of the ViT, which the connector takes."""
    width, mlp, layers, heads, head_dim = vision
    shared = {"hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": head_dim}
    tower = {"intermediate_size": mlp, "num_hidden_layers": layers, "image_size": [side, side]}
    connector = {"vision_feature_layer": list(feature_layers), "intermediate_size": text["intermediate_size"]}
    first = text["vocab_size"]  # special tokens are numbered from the end of the text vocabulary
    special = {"image_start": 0, "image_end": 1, "low_res_image_start": 4, "frame_start": 7, "frame_end": 8}
    return STTSConfig(
        vision_config={**shared, **tower, "pruning_layer": pruning_layer},
        adapter_config={**shared, **connector, "text_hidden_size": text["hidden_size"]},
        text_config=text,
        image_patch_id=first + 2,
        **{f"{name}_token_id": first + offset for name, offset in special.items()},
    )


def _qwen3_vl(
    vision: Sequence[int],
    pruning_layer: int,
    deepstack_layers: Sequence[int],
    text: dict[str, Any],
    kind: str = "stts_qwen3_vl",
) -> Any:
    """vision: width, layers, heads. kind: the configuration's `model_type`; Qwen3.5's rotates a quarter of a head."""
    width, layers, heads = vision
    rotated = 0.25 if kind.startswith("stts_qwen3_5") else 1.0
    half = int(rotated * text["head_dim"]) // 2
    sections = [half - 2 * (5 * half // 16), *[5 * half // 16] * 2]  # as (24, 20, 20) of 64
    rope = {**text["rope_parameters"], "mrope_section": sections, "mrope_interleaved": True}
    rope |= {} if rotated == 1 else {"partial_rotary_factor": rotated}
    last = text["vocab_size"] - 1  # special tokens end the text vocabulary
    build: Any = OWN[kind].config
    return build(
        vision_config={
            "hidden_size": width,
            "intermediate_size": 4 * width,
            "depth": layers,
            "num_heads": heads,
            "out_hidden_size": text["hidden_size"],
            "deepstack_visual_indexes": list(deepstack_layers),
            "pruning_layer": pruning_layer,
        },
        text_config={**text, "rope_parameters": rope},
        image_token_id=last - 3,
        video_token_id=last - 2,
        vision_start_token_id=last - 1,
        vision_end_token_id=last,
        tie_word_embeddings=True,
    )


def _smolvlm(
    vision: Sequence[int], pruning_layer: int, text: dict[str, Any], side: int = 512, scale_factor: int = 4
) -> STTSSmolVLMConfig:
    """vision: width, layers, heads. side: of a frame in pixels. scale_factor: side of a block in patches."""
    sizes = dict(zip(("hidden_size", "num_hidden_layers", "num_attention_heads"), vision, strict=True))
    of_frames = {"image_size": side, "patch_size": 16, "pruning_layer": pruning_layer}
    return STTSSmolVLMConfig(
        vision_config={**sizes, **of_frames, "intermediate_size": 4 * vision[0]},
        text_config={"model_type": "llama", **text},
        scale_factor=scale_factor,
        image_token_id=text["vocab_size"] - 1,
        tie_word_embeddings=True,
    )


def _text(sizes: Sequence[int], vocabulary: int = 13312, head_dim: int = 128) -> dict[str, Any]:
    """sizes: width, MLP, layers, heads, heads of keys."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    rope = {"rope_type": "default", "rope_theta": 5e6}
    text = dict(zip(names, sizes, strict=True))
    return {**text, "head_dim": head_dim, "vocab_size": vocabulary, "rope_parameters": rope}


class Geometry:
    """grid: rows and columns of blocks of a frame of the tower. config: makes a new configuration, from `sizes`."""

    def __init__(self, grid: tuple[int, int], build: Callable[..., Any], *sizes: Any) -> None:
        self.grid, self.config = grid, partial(build, *sizes)


_SO400M = ((1152, 4304, 25, 16, 72), 3, (24, 18))  # Molmo2 uses 25 of the original configuration's 27 layers
_QWEN_4B = ((1024, 24, 16), 3, (5, 11, 17))
_TEXT_4B = _text((2560, 9728, 36, 32, 8), 151936)
_QWEN_SMALL = ((128, 6, 2), 0, (1, 2, 4))
# A quarter of the width and experts of Qwen3-VL-30B-A3B, of which as many are used; a quarter of Qwen3.5-4B's width,
# and the same with experts.
_EXPERTS = {"num_experts": 32, "num_experts_per_tok": 8, "moe_intermediate_size": 192}
_TEXT_MOE = _text((512, 1536, 4, 8, 1)) | _EXPERTS
_TEXT_3_5 = _text((640, 2304, 4, 8, 2)) | {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
_TEXT_3_5_MOE = _TEXT_3_5 | _EXPERTS | {"shared_expert_intermediate_size": 192}
_NO_TEXT = (96, 2, 4, 2)  # of a text model as small as it can be, where only the tower is measured
# Smaller towers keep the share of dense layers: 2 of 13, or 1 of 6, are nearly 4 of 25. Qwen3-VL-4B has 364 blocks per
# tubelet of 720p in 64 frames under the processor's pixel budget, 91 in 256 frames.
GEOMETRIES: dict[str, Geometry] = {
    "tiny": Geometry((3, 3), _molmo2, (32, 64, 6, 4, 8), 1, (5, 3), _text((48, *_NO_TEXT), 512, 16), 126),
    "so400m": Geometry((9, 9), _molmo2, *_SO400M, _text((2560, 64, 1, 32, 8), 512)),
    "narrow-tower": Geometry((9, 9), _molmo2, (144, 538, 13, 2, 72), 1, (12, 9), _text((320, *_NO_TEXT), 512, 64)),
    "molmo2-4b": Geometry((9, 9), _molmo2, *_SO400M, _TEXT_4B),
    "molmo2-4b-short": Geometry((9, 9), _molmo2, *_SO400M, _text((2560, 9728, 36, 32, 8))),  # whose vocabulary is short
    "molmo2-small": Geometry((6, 6), _molmo2, (288, 1076, 13, 4, 72), 1, (12, 9), _text((1024, 3888, 8, 12, 3)), 252),
    "molmo2-small-long": Geometry((6, 6), _molmo2, (144, 538, 6, 2, 72), 0, (5, 4), _text((640, 2432, 3, 4, 1)), 252),
    "qwen3-vl-tiny": Geometry((2, 3), _qwen3_vl, (32, 6, 4), 1, (1, 4), _text((48, 96, 3, 4, 2), 512, 16)),
    "qwen3-vl-4b": Geometry((14, 26), _qwen3_vl, *_QWEN_4B, _TEXT_4B),
    "qwen3-vl-4b-low": Geometry((7, 13), _qwen3_vl, *_QWEN_4B, _TEXT_4B),
    "qwen3-vl-small": Geometry((8, 14), _qwen3_vl, (256, 12, 4), 1, (2, 5, 8), _text((1024, 3891, 8, 16, 4))),
    "qwen3-vl-small-long": Geometry((8, 14), _qwen3_vl, *_QWEN_SMALL, _text((640, 2432, 3, 4, 1))),
    "qwen3-vl-moe-small": Geometry((8, 14), _qwen3_vl, *_QWEN_SMALL, _TEXT_MOE, "stts_qwen3_vl_moe"),
    "qwen3-5-small": Geometry((8, 14), _qwen3_vl, *_QWEN_SMALL[:2], (), _TEXT_3_5, "stts_qwen3_5"),
    "qwen3-5-moe-small": Geometry((8, 14), _qwen3_vl, *_QWEN_SMALL[:2], (), _TEXT_3_5_MOE, "stts_qwen3_5_moe"),
    "smolvlm2-tiny": Geometry((3, 3), _smolvlm, (32, 6, 4), 1, _text((48, 96, 3, 4, 2), 512, 16), 96, 2),
    "smolvlm2-500m": Geometry((8, 8), _smolvlm, (768, 12, 12), 3, _text((960, 2560, 32, 15, 5), 49280, 64)),
    "smolvlm2-small": Geometry((8, 8), _smolvlm, (384, 6, 6), 1, _text((576, 1536, 12, 9, 3), head_dim=64)),
}


class Layout(NamedTuple):
    """
    frame: ids of one frame of the tower in the text (start, placeholders, end). token_types: their
    `mm_token_type_ids`. size: a video frame's height and width in pixels. processor: the backbone's for videos, which
    neither samples nor resizes such frames.
    """

    frame: list[int]
    token_types: list[int]
    size: tuple[int, int]
    processor: Callable[..., Any]


def lay_out(config: Any, grid: tuple[int, int]) -> Layout:
    """How a backbone's processor lays out frames of so many rows and columns of blocks."""
    vision, family, (rows, cols) = config.vision_config, OWN[config.model_type], grid
    settings = family.settings(config)["video_processor"] | {"do_sample_frames": False}
    if isinstance(config, STTSConfig):
        start, block, end = config.frame_start_token_id, config.image_patch_id, config.frame_end_token_id
        height, width = vision.image_size
    elif isinstance(config, STTSSmolVLMConfig):
        start, block, end = config.image_token_id - 1, config.image_token_id, config.image_token_id - 1
        height = width = vision.image_size
        settings |= {"size": settings["max_image_size"]}
    else:
        start, block, end = config.vision_start_token_id, config.video_token_id, config.vision_end_token_id
        height, width = (side * vision.spatial_merge_size * vision.patch_size for side in grid)
        settings |= {"do_resize": False, "cap_pixels_per_frame": False}
    frame = [start, *[block] * (rows * cols), end]
    types = [1] * len(frame) if isinstance(config, STTSConfig) else [0, *[2] * (rows * cols), 0]
    return Layout(frame, types, (height, width), family.video_processor(**settings))


def workload_inputs(workload: Workload, config: Any, device: torch.device) -> dict[str, Any]:
    """Arguments of `model(...)`, random: each row has some text, one video, more text, and in training labels."""
    generator = torch.Generator(device).manual_seed(0)
    layout = lay_out(config, GEOMETRIES[workload.geometry].grid)
    black = np.zeros((workload.frames, *layout.size, 3), np.uint8)
    videos = dict(layout.processor([black] * workload.batch, return_tensors="pt"))
    num_frames = int(next(tensor for name, tensor in videos.items() if "grid" in name)[0, 0])  # of the tower
    time, answer = [0] * workload.timestamp_tokens, max(workload.text_tokens - START, 1)
    frames = ((time + of_frame) * num_frames for of_frame in (layout.frame, layout.token_types))
    rows = [torch.tensor([0] * START + of_frames + [0] * answer, device=device) for of_frames in frames]
    input_ids, token_types = (row.repeat(workload.batch, 1) for row in rows)
    words = random_words(config, input_ids.shape, generator)
    pixels = torch.randn(videos["pixel_values_videos"].shape, generator=generator, device=device)
    # Molmo2's grids stay on the host, so that planning forces no host-device sync.
    videos = {name: tensor if name == "video_grids" else tensor.to(device) for name, tensor in videos.items()}
    inputs = {
        "input_ids": torch.where(input_ids == 0, words, input_ids),
        "attention_mask": torch.ones_like(input_ids),
        "mm_token_type_ids": token_types,
        **videos,
        "pixel_values_videos": pixels.to(getattr(torch, workload.dtype)),
    }
    if workload.mode == "training":
        inputs["labels"] = torch.full_like(input_ids, -100)
        inputs["labels"][:, -answer:] = inputs["input_ids"][:, -answer:]
    return inputs


def random_words(config: Any, shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Ids of text, on the generator's device."""
    words = config.text_config.vocab_size - NUM_SPECIAL
    return torch.randint(1, words, tuple(shape), generator=generator, device=generator.device)
