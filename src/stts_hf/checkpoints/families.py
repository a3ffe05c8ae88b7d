"""The classes and settings of each backbone's checkpoints, by the `model_type` in `config.json`, ours or stock."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import (
    Molmo2ImageProcessor,
    PreTrainedConfig,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen3VLProcessor,
    SmolVLMImageProcessor,
)
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from stts_hf.auto_classes import CONFIGS, class_of, register_auto_classes
from stts_hf.modeling.processing_stts import STTSProcessor
from stts_hf.modeling.processing_stts_smolvlm import STTSSmolVLMProcessor
from stts_hf.modeling.settings_stts import PruningConfig
from stts_hf.modeling.video_processing_stts import STTSVideoProcessor
from stts_hf.modeling.video_processing_stts_smolvlm import STTSSmolVLMVideoProcessor

from .files import check_folder, check_has_config, read_json, remedy_for, usable
from .original import SPECIAL_TOKENS


def _molmo2_settings(config: Any) -> dict[str, dict[str, Any]]:
    vision = config.vision_config
    height, width = vision.image_size
    shared = {"patch_size": vision.patch_size, "size": {"height": height, "width": width}}
    return {"image_processor": shared, "video_processor": shared | {"pooling_size": vision.pooling_size}}


def _qwen_vl_settings(config: Any) -> dict[str, dict[str, Any]]:
    vision = config.vision_config
    shared = {"patch_size": vision.patch_size, "temporal_patch_size": vision.temporal_patch_size}
    shared["merge_size"] = vision.spatial_merge_size
    return {"image_processor": shared, "video_processor": shared}


def _smolvlm_settings(config: Any) -> dict[str, dict[str, Any]]:
    vision = config.vision_config
    shared = {"max_image_size": {"longest_edge": vision.image_size}}
    blocks = (vision.image_size // max(vision.patch_size * config.scale_factor, 1)) ** 2
    return {"image_processor": shared, "video_processor": shared | {"image_seq_len": blocks}}


@dataclass(frozen=True)
class Family:
    """
    processor, image_processor, video_processor: classes. special_tokens: the config's fields for them, and their texts.
    settings: what a config wants the image and the video processor to have. video_reader: the package by which
    the processor reads video files, as one who installs it needs to know it.
    """

    config: type[PruningConfig]
    processor: Any
    image_processor: Any
    video_processor: Any
    special_tokens: Mapping[str, str]
    settings: Callable[[Any], dict[str, dict[str, Any]]]
    video_reader: str = "torchcodec (`pip install torchcodec`)"

    @property
    def model(self) -> Any:
        """The class with the head."""
        return class_of(self.config)

    @property
    def tags(self) -> list[str]:
        """Of a model card."""
        return ["stts", self.config.native.model_type, "video", "token-pruning", "custom_code"]


_QWEN_VL_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
_QWEN_VL = (_QWEN_VL_TOKENS, _qwen_vl_settings)
_QWEN3_VL = (Qwen3VLProcessor, Qwen2VLImageProcessor, Qwen3VLVideoProcessor, *_QWEN_VL)
_SMOLVLM = (STTSSmolVLMProcessor, SmolVLMImageProcessor, STTSSmolVLMVideoProcessor)
_MOLMO2 = (STTSProcessor, Molmo2ImageProcessor, STTSVideoProcessor, SPECIAL_TOKENS, _molmo2_settings)
_FIELDS: dict[str, Any] = {  # by our `model_type`: a family's fields but for the configuration
    "stts": (*_MOLMO2, "PyAV (`pip install av`)"),
    "stts_qwen3_vl": _QWEN3_VL,
    "stts_qwen3_vl_moe": _QWEN3_VL,
    "stts_qwen3_5": _QWEN3_VL,
    "stts_qwen3_5_moe": _QWEN3_VL,
    "stts_qwen2_5_vl": (Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor, *_QWEN_VL),
    "stts_smolvlm": (*_SMOLVLM, {"image_token_id": "<image>"}, _smolvlm_settings),
}
OWN = {config.model_type: Family(config, *_FIELDS[config.model_type]) for config in CONFIGS}
STOCK = {family.config.native.model_type: family for family in OWN.values()}


def family_of(model_type: object, subject: object) -> Family:
    """Returns the family of a `model_type`, ours or stock. Raises `ValueError` about `subject` for any other."""
    found = (OWN | STOCK).get(str(model_type))
    if found is None:
        raise ValueError(f"{subject} is of a {model_type!r} model, not of {', '.join(map(repr, STOCK | OWN))}.")
    return found


def own_family(folder: Path) -> Family:
    """Returns the family of an STTS checkpoint's folder. Raises `ValueError` for any other folder."""
    path = folder / "config.json"
    kind = read_json(path).get("model_type")
    if str(kind) not in OWN:
        what = f"is of a {kind!r} model, not of {' or '.join(map(repr, OWN))}" if path.is_file() else "is missing"
        raise ValueError(f"{path} {what}: name a checkpoint folder, or make one with stts-hf convert")
    return OWN[str(kind)]


def model_type_of(checkpoint: str | Path, revision: str | None = None) -> object:
    """Returns `model_type` in the `config.json` of a folder, which is checked, or Hub repository; or `ValueError`."""
    with usable(f"checkpoint {checkpoint} cannot be loaded", remedy_for(checkpoint)):
        if (folder := Path(checkpoint).expanduser()).is_dir():  # else it is one of the Hub
            check_has_config(folder)
            check_folder(folder)
            return read_json(folder / "config.json").get("model_type")
        config, _ = PreTrainedConfig.get_config_dict(checkpoint, revision=revision)
        return config.get("model_type")


def family_of_checkpoint(checkpoint: str | Path, revision: str | None = None) -> Family:
    """Returns the family of a folder or Hub repository, and registers the Auto classes. Raises `ValueError`."""
    register_auto_classes()
    return family_of(model_type_of(checkpoint, revision), checkpoint)
