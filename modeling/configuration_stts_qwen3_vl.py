"""Configuration of STTS on Qwen3-VL: Qwen's own, and what every backbone of STTS has."""

from .settings_stts import MropeConfig, MropeSettings  # isort: split

from typing import Literal

from huggingface_hub.dataclasses import strict
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig, Qwen3VLVisionConfig


@strict
class STTSQwen3VLVisionConfig(MropeSettings, Qwen3VLVisionConfig):
    """
    `MropeSettings` of Qwen3-VL's vision tower, with a scorer after layer `pruning_layer` (paper section 3). A frame is
    a tubelet of `temporal_patch_size` video frames, a block the `spatial_merge_size`^2 patches of one token.
    """

    model_type = "stts_qwen3_vl_vision"
    refill_single_frame_bins: Literal[False] = False  # a detail of code for frames of one size


@strict
class STTSQwen3VLConfig(MropeConfig, Qwen3VLConfig):
    """
    Qwen3-VL's configuration with an `STTSQwen3VLVisionConfig` and the fields of `TrainingSettings`, of which
    `pruned_position_ids` must be `"original"`. Settings of the vision config are arguments too.
    """

    model_type = "stts_qwen3_vl"
    native = Qwen3VLConfig
    family = "dense Qwen3-VL"
    vision_class = STTSQwen3VLVisionConfig


__all__ = ["STTSQwen3VLConfig", "STTSQwen3VLVisionConfig"]
