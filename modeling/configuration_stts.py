"""Configuration of STTS on Molmo2: what is scored, how much is dropped, and how the survivors are laid out."""

from transformers.utils.versions import require_version

# Before imports that fail without a reason in older versions.
require_version("transformers>=5.20", "Upgrade it with `pip install -U transformers`.")
require_version("torch>=2.9", "Upgrade it with `pip install -U torch torchvision`.")

import math
import os
from dataclasses import field
from typing import TYPE_CHECKING, Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import SubConfigSpec
from transformers.models.molmo2.configuration_molmo2 import (
    Molmo2AdapterConfig,
    Molmo2Config,
    Molmo2TextConfig,
    Molmo2VisionConfig,
)
from transformers.utils import logging

from .settings_stts import PRUNING_FIELDS, PruningSettings, TrainingSettings, with_settings

logger = logging.get_logger(__name__)


def check_vision_config(value: object) -> None:
    """Raises `ValueError` for a vision config that cannot prune, such as a stock Molmo2's."""
    if not hasattr(value, "pruning_ratio"):
        kind = getattr(value, "model_type", type(value).__name__)
        raise ValueError(f"`vision_config` has `model_type` {kind!r}, but must be 'stts_vision'.")


VISION_SETTINGS = (*PRUNING_FIELDS, "pooling_size")
AUTO_MAP = {
    "AutoConfig": "configuration_stts.STTSConfig",
    "AutoModel": "modeling_stts.STTSForConditionalGeneration",
    "AutoModelForImageTextToText": "modeling_stts.STTSForConditionalGeneration",
    "AutoModelForMultimodalLM": "modeling_stts.STTSForConditionalGeneration",
    "AutoProcessor": "processing_stts.STTSProcessor",
    "AutoVideoProcessor": "video_processing_stts.STTSVideoProcessor",
}


@strict
class STTSVisionConfig(PruningSettings, Molmo2VisionConfig):
    r"""
    Molmo2's vision tower with a scorer after layer `pruning_layer` (paper section 3). Fields are those of
    `PruningSettings` and

    pooling_size (`list[int]`, *optional*, defaults to `[3, 3]`):
        `[height, width]` in patches of a block, which is also the connector's pooling window `w x w`. Must equal the
        video processor's.

    A value that a field cannot have is refused whenever it is set, and the one before stays: transformers'
    `StrictDataclassFieldValidationError`. Fields that do not fit each other are refused at construction, at loading and
    by `save_pretrained` with `StrictDataclassClassValidationError`, by the tower's next call with `ValueError`.
    """

    model_type = "stts_vision"
    base_config_key = "vision_config"

    pooling_size: list[int] = field(default_factory=lambda: [3, 3])

    if TYPE_CHECKING:  # filled in where it is left out
        image_size: list[int]

        def __init__(self, **settings: Any) -> None: ...

    def validate_pruning(self) -> None:
        super().validate_pruning()
        sizes, windows = self.image_size, self.pooling_size
        if len(sizes) != 2 or not 1 <= self.patch_size <= min(sizes):
            raise ValueError(
                f"`image_size` is {sizes} and `patch_size` {self.patch_size}, but they must be "
                "[height, width] and the side of a patch, in pixels, with room for at least one patch."
            )
        grid = [side // self.patch_size for side in sizes]
        fits = len(windows) == 2 and all(1 <= window <= side for window, side in zip(windows, grid, strict=True))
        if not fits:
            raise ValueError(
                f"`pooling_size` is {windows}, but must be [height, width] in patches, each from 1 up to "
                f"the side of the patch grid {grid} (`image_size` {sizes} over `patch_size` {self.patch_size})."
            )

    @property
    def block_grid(self) -> tuple[int, int]:
        """Rows and columns of blocks in a frame; `n` is their product. A window over the border counts in full."""
        rows, cols = (
            math.ceil(side // self.patch_size / window)
            for side, window in zip(self.image_size, self.pooling_size, strict=True)
        )
        return rows, cols


@strict
class STTSConfig(TrainingSettings, Molmo2Config):
    r"""
    Molmo2's configuration with an `STTSVisionConfig` and the fields of `TrainingSettings`, checked like that one's.

    Settings of the vision config (`pruning_ratio`, `selector`, ...) are taken as arguments too, here and in
    `from_pretrained`, and go there.
    """

    model_type = "stts"
    keys_to_ignore_at_inference: ClassVar[list[str]] = [
        "past_key_values",
        "image_hidden_states",
        "task_loss",
        "temporal_loss",
        "token_scores",
        "keep_mask",
        "kept_indices",
    ]
    sub_configs_defaults: ClassVar[dict] = {
        **Molmo2Config.sub_configs_defaults,
        "vision_config": SubConfigSpec(config_class=STTSVisionConfig),
    }

    if TYPE_CHECKING:  # dicts and None become these
        vision_config: STTSVisionConfig
        adapter_config: Molmo2AdapterConfig
        text_config: Molmo2TextConfig

        def __init__(self, **settings: Any) -> None: ...

    def __post_init__(self, **kwargs: Any) -> None:
        given = {name: kwargs.pop(name) for name in VISION_SETTINGS if name in kwargs}
        if self.vision_config is None and "vit_config" in kwargs:  # the released checkpoints' name
            kwargs["vit_config"] = with_settings(kwargs["vit_config"], given)
        else:
            self.vision_config = with_settings(self.vision_config, given)
        super().__post_init__(**kwargs)

    def validate_vision_config(self) -> None:
        """Raises `ValueError` for a stock vision config, and where the pruning fields do not fit each other."""
        check_vision_config(self.vision_config)
        self.vision_config.validate_pruning()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> "STTSConfig":
        """As in transformers; settings of the vision config may be given as `kwargs`."""
        given = {name: kwargs.pop(name) for name in VISION_SETTINGS if name in kwargs}
        return super().from_dict(config_dict | given, **kwargs)

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """
        As in transformers; a Molmo2 checkpoint's configuration becomes an STTS one, with a note on the scorer. Raises
        `OSError` where there is no `config.json` (transformers would use the sizes of an 8B model) and
        `ValueError` for any other model's.
        """
        config, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        if not config:
            raise OSError(
                f"{pretrained_model_name_or_path} holds no config.json. Pass a checkpoint's folder or Hub id."
            )
        model_type = config.get("model_type", cls.model_type)
        if model_type not in (cls.model_type, Molmo2Config.model_type):
            raise ValueError(
                f"{pretrained_model_name_or_path} is a {model_type!r} model, but must be an STTS or Molmo2 checkpoint."
            )
        if model_type == Molmo2Config.model_type:
            if kwargs.get("selector", "scorer") == "scorer" and kwargs.get("pruning_ratio") != 0:
                logger.warning(
                    f"{pretrained_model_name_or_path} is a Molmo2 checkpoint: all its weights are used, but STTS's "
                    "scorer is new and untrained, and what it drops means nothing. Train it, or pass "
                    "selector='cosine', which needs no training, or pruning_ratio=0."
                )
            config = as_stts(config)
        return config, kwargs

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any) -> None:
        """As in transformers, with an entry in `auto_map` for every auto class that a checkpoint serves."""
        self.auto_map = dict(AUTO_MAP)  # entries of a Hub repository it was loaded from would point back there
        super().save_pretrained(save_directory, push_to_hub, **kwargs)


def as_stts(config: dict[str, Any]) -> dict[str, Any]:
    """The contents of a Molmo2 checkpoint's `config.json`, native or original, as those of an STTS checkpoint."""
    config = {key: value for key, value in config.items() if key not in ("auto_map", "architectures")}
    config["model_type"] = STTSConfig.model_type
    for key in ("vision_config", "vit_config"):  # the original's name is the latter
        if isinstance(config.get(key), dict):
            config[key] = config[key] | {"model_type": STTSVisionConfig.model_type}
    return config


STTSConfig.register_for_auto_class()

__all__ = ["STTSConfig", "STTSVisionConfig"]
