"""Configuration of STTS on Qwen3-VL: Qwen's own, and what every backbone of STTS has."""

from transformers.utils.versions import require_version

# Before imports that fail without a reason in older versions.
require_version("transformers>=5.20", "Upgrade it with `pip install -U transformers`.")
require_version("torch>=2.9", "Upgrade it with `pip install -U torch torchvision`.")

from typing import TYPE_CHECKING, Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import SubConfigSpec
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig, Qwen3VLTextConfig, Qwen3VLVisionConfig

from .settings_stts import MropeConfig, MropeSettings, TrainingSettings, auto_map


@strict
class STTSQwen3VLVisionConfig(MropeSettings, Qwen3VLVisionConfig):
    """
    Qwen3-VL's vision tower with a scorer after layer `pruning_layer` (paper section 3). A frame is one of Qwen's
    tubelets of `temporal_patch_size` video frames, a block the `spatial_merge_size`^2 patches of one token. Fields are
    those of `MropeSettings`.
    """

    model_type = "stts_qwen3_vl_vision"
    base_config_key = "vision_config"

    if TYPE_CHECKING:

        def __init__(self, **settings: Any) -> None: ...


@strict
class STTSQwen3VLConfig(MropeConfig, TrainingSettings, Qwen3VLConfig):
    """
    Qwen3-VL's configuration with an `STTSQwen3VLVisionConfig` and the fields of `TrainingSettings`, of which
    `pruned_position_ids` must be `"original"`. Settings of the vision config are arguments too.
    """

    model_type = "stts_qwen3_vl"
    native = Qwen3VLConfig
    family = "dense Qwen3-VL"
    vision_model_type = STTSQwen3VLVisionConfig.model_type
    auto_classes = auto_map("_qwen3_vl", "Qwen3VL")
    sub_configs_defaults: ClassVar[dict] = {
        **Qwen3VLConfig.sub_configs_defaults,
        "vision_config": SubConfigSpec(config_class=STTSQwen3VLVisionConfig),
    }

    if TYPE_CHECKING:  # dicts and None become these
        vision_config: STTSQwen3VLVisionConfig
        text_config: Qwen3VLTextConfig

        def __init__(self, **settings: Any) -> None: ...


STTSQwen3VLConfig.register_for_auto_class()

__all__ = ["STTSQwen3VLConfig", "STTSQwen3VLVisionConfig"]
