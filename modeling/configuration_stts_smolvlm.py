"""Configuration of STTS on SmolVLM2: SmolVLM's own, and what every backbone of STTS has."""

from .settings_stts import PruningConfig, PruningSettings  # isort: split

from typing import ClassVar, Literal

from huggingface_hub.dataclasses import strict
from transformers.models.smolvlm.configuration_smolvlm import SmolVLMConfig, SmolVLMVisionConfig


@strict
class STTSSmolVLMVisionConfig(PruningSettings, SmolVLMVisionConfig):
    """
    `PruningSettings` of SmolVLM2's vision tower, with a scorer after layer `pruning_layer` (paper section 3). A frame
    is one video frame without tiles, a block the `scale_factor`^2 patches of one token.
    """

    model_type = "stts_smolvlm_vision"
    refill_single_frame_bins: Literal[False] = False  # a detail of code for Molmo2


@strict
class STTSSmolVLMConfig(PruningConfig, SmolVLMConfig):
    """
    SmolVLM2's configuration with an `STTSSmolVLMVisionConfig` and the fields of `TrainingSettings`. Settings of the
    vision config are arguments too.
    """

    model_type = "stts_smolvlm"
    native = SmolVLMConfig
    family = "SmolVLM2"
    needs_transformers = "5.23"
    vision_class = STTSSmolVLMVisionConfig
    auto_classes: ClassVar[dict[str, str]] = {
        "AutoProcessor": "processing_stts_smolvlm.STTSSmolVLMProcessor",
        "AutoVideoProcessor": "video_processing_stts_smolvlm.STTSSmolVLMVideoProcessor",
    }


__all__ = ["STTSSmolVLMConfig", "STTSSmolVLMVisionConfig"]
