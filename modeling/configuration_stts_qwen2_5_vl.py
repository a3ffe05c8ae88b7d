"""Configuration of STTS on Qwen2.5-VL: Qwen's own, and what every backbone of STTS has."""

from transformers.utils.versions import require_version

# Before imports that fail without a reason in older versions.
require_version("transformers>=5.20", "Upgrade it with `pip install -U transformers`.")
require_version("torch>=2.9", "Upgrade it with `pip install -U torch torchvision`.")

from typing import TYPE_CHECKING, Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import SubConfigSpec
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLVisionConfig,
)

from .settings_stts import MropeConfig, MropeSettings, TrainingSettings, auto_map


@strict
class STTSQwen2_5_VLVisionConfig(MropeSettings, Qwen2_5_VLVisionConfig):
    """
    Qwen2.5-VL's vision tower with a scorer after layer `pruning_layer` (paper section 3). A frame is one of Qwen's
    tubelets of `temporal_patch_size` video frames, a block the `spatial_merge_size`^2 patches of one token. Fields are
    those of `MropeSettings`; `pruning_layer` defaults to 6, since layer 7 is the first of the released models whose
    patches see their whole frame: in other layers a score's bias tells apart the patches of a window alone.
    """

    model_type = "stts_qwen2_5_vl_vision"
    base_config_key = "vision_config"
    pruning_layer: int = 6

    if TYPE_CHECKING:

        def __init__(self, **settings: Any) -> None: ...


@strict
class STTSQwen2_5_VLConfig(MropeConfig, TrainingSettings, Qwen2_5_VLConfig):
    """
    Qwen2.5-VL's configuration with an `STTSQwen2_5_VLVisionConfig` and the fields of `TrainingSettings`, of which
    `pruned_position_ids` must be `"original"`. Settings of the vision config are arguments too.
    """

    model_type = "stts_qwen2_5_vl"
    native = Qwen2_5_VLConfig
    family = "Qwen2.5-VL"
    vision_model_type = STTSQwen2_5_VLVisionConfig.model_type
    auto_classes = auto_map("_qwen2_5_vl", "Qwen2_5_VL")
    sub_configs_defaults: ClassVar[dict] = {
        **Qwen2_5_VLConfig.sub_configs_defaults,
        "vision_config": SubConfigSpec(config_class=STTSQwen2_5_VLVisionConfig),
    }

    if TYPE_CHECKING:  # dicts and None become these
        vision_config: STTSQwen2_5_VLVisionConfig
        text_config: Qwen2_5_VLTextConfig

        def __init__(self, **settings: Any) -> None: ...


STTSQwen2_5_VLConfig.register_for_auto_class()

__all__ = ["STTSQwen2_5_VLConfig", "STTSQwen2_5_VLVisionConfig"]
