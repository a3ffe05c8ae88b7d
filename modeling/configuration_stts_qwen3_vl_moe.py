"""Configuration of STTS on Qwen3-VL with a mixture of experts, whose vision tower is that of the dense models."""

from .settings_stts import MropeConfig  # isort: split

from huggingface_hub.dataclasses import strict
from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeConfig

from .configuration_stts_qwen3_vl import STTSQwen3VLVisionConfig


@strict
class STTSQwen3VLMoeConfig(MropeConfig, Qwen3VLMoeConfig):
    """As `STTSQwen3VLConfig`, with a text model of experts."""

    model_type = "stts_qwen3_vl_moe"
    native = Qwen3VLMoeConfig
    family = "Qwen3-VL mixture-of-experts"
    vision_class = STTSQwen3VLVisionConfig


__all__ = ["STTSQwen3VLMoeConfig"]
