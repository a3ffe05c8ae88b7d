"""Configuration of STTS on Qwen3.5 with a mixture of experts, whose vision tower is that of the dense models."""

from .settings_stts import MropeConfig  # isort: split

from huggingface_hub.dataclasses import strict
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeConfig

from .configuration_stts_qwen3_5 import STTSQwen3_5VisionConfig


@strict
class STTSQwen3_5MoeConfig(MropeConfig, Qwen3_5MoeConfig):
    """As `STTSQwen3_5Config`, with a text model of experts."""

    model_type = "stts_qwen3_5_moe"
    native = Qwen3_5MoeConfig
    family = "Qwen3.5 mixture-of-experts"
    vision_class = STTSQwen3_5VisionConfig


__all__ = ["STTSQwen3_5MoeConfig"]
