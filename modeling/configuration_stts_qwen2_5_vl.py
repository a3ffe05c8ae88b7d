"""Configuration of STTS on Qwen2.5-VL: Qwen's own, and what every backbone of STTS has."""

from .settings_stts import MropeConfig, MropeSettings  # isort: split

from typing import Literal

from huggingface_hub.dataclasses import strict
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLConfig, Qwen2_5_VLVisionConfig


@strict
class STTSQwen2_5_VLVisionConfig(MropeSettings, Qwen2_5_VLVisionConfig):
    """
    Qwen2.5-VL's vision tower with a scorer after layer `pruning_layer` (paper section 3). A frame is one of Qwen's
    tubelets of `temporal_patch_size` video frames, a block the `spatial_merge_size`^2 patches of one token. Fields are
    those of `MropeSettings`; `pruning_layer` defaults to 6, since layer 7 is the first of the released models whose
    patches see their whole frame. In other layers the score bias only compares patches of one window.
    """

    model_type = "stts_qwen2_5_vl_vision"
    refill_single_frame_bins: Literal[False] = False  # a detail of code for frames of one size
    pruning_layer: int = 6


@strict
class STTSQwen2_5_VLConfig(MropeConfig, Qwen2_5_VLConfig):
    """
    Qwen2.5-VL's configuration with an `STTSQwen2_5_VLVisionConfig` and the fields of `TrainingSettings`, of which
    `pruned_position_ids` must be `"original"`. Settings of the vision config are arguments too.
    """

    model_type = "stts_qwen2_5_vl"
    native = Qwen2_5_VLConfig
    family = "Qwen2.5-VL"
    vision_class = STTSQwen2_5_VLVisionConfig


__all__ = ["STTSQwen2_5_VLConfig", "STTSQwen2_5_VLVisionConfig"]
