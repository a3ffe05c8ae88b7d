"""Configuration of STTS on Qwen3.5, whose vision tower is Qwen3-VL's without deepstack."""

from .settings_stts import MropeConfig  # isort: split

from huggingface_hub.dataclasses import strict
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config

from .configuration_stts_qwen3_vl import STTSQwen3VLVisionConfig


@strict
class STTSQwen3_5VisionConfig(STTSQwen3VLVisionConfig):
    """As `STTSQwen3VLVisionConfig`, without layers whose features go to the text model's first layers."""

    model_type = "stts_qwen3_5_vision"
    deepstack_visual_indexes: list[int] | tuple[int, ...] = ()


@strict
class STTSQwen3_5Config(MropeConfig, Qwen3_5Config):
    """As `STTSQwen3VLConfig`, with a text model most of whose layers are recurrent."""

    model_type = "stts_qwen3_5"
    native = Qwen3_5Config
    family = "dense Qwen3.5"
    vision_class = STTSQwen3_5VisionConfig


__all__ = ["STTSQwen3_5Config", "STTSQwen3_5VisionConfig"]
