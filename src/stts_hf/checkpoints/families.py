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

from stts_hf.auto_classes import MODEL_CLASSES, register_auto_classes
from stts_hf.modeling.configuration_stts import STTSConfig
from stts_hf.modeling.configuration_stts_qwen2_5_vl import STTSQwen2_5_VLConfig
from stts_hf.modeling.configuration_stts_qwen3_5 import STTSQwen3_5Config
from stts_hf.modeling.configuration_stts_qwen3_5_moe import STTSQwen3_5MoeConfig
from stts_hf.modeling.configuration_stts_qwen3_vl import STTSQwen3VLConfig
from stts_hf.modeling.configuration_stts_qwen3_vl_moe import STTSQwen3VLMoeConfig
from stts_hf.modeling.configuration_stts_smolvlm import STTSSmolVLMConfig
from stts_hf.modeling.processing_stts import STTSProcessor
from stts_hf.modeling.processing_stts_smolvlm import STTSSmolVLMProcessor
from stts_hf.modeling.settings_stts import PruningConfig
from stts_hf.modeling.video_processing_stts import STTSVideoProcessor
from stts_hf.modeling.video_processing_stts_smolvlm import STTSSmolVLMVideoProcessor

from .files import read_json
from .original import SPECIAL_TOKENS


def _molmo2_settings(vision: Any) -> dict[str, dict[str, Any]]:
    height, width = vision.image_size
    shared = {"patch_size": vision.patch_size, "size": {"height": height, "width": width}}
    return {"image_processor": shared, "video_processor": shared | {"pooling_size": vision.pooling_size}}


def _qwen_vl_settings(vision: Any) -> dict[str, dict[str, Any]]:
    shared = {"patch_size": vision.patch_size, "temporal_patch_size": vision.temporal_patch_size}
    shared["merge_size"] = vision.spatial_merge_size
    return {"image_processor": shared, "video_processor": shared}


def _smolvlm_settings(vision: Any) -> dict[str, dict[str, Any]]:
    shared = {"max_image_size": {"longest_edge": vision.image_size}}
    return {"image_processor": shared, "video_processor": shared}


@dataclass(frozen=True)
class Family:
    """
    processor, image_processor, video_processor: classes. special_tokens: the config's fields for them, and their texts.
    settings: what a vision config wants the image and the video processor to have. video_reader: the package by which
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
        return MODEL_CLASSES[self.config]

    @property
    def tags(self) -> list[str]:
        """Of a model card."""
        return ["stts", self.config.native.model_type, "video", "token-pruning", "custom_code"]


_MOLMO2 = (SPECIAL_TOKENS, _molmo2_settings, "PyAV (`pip install av`)")
_QWEN_VL = (
    {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    },
    _qwen_vl_settings,
)
_SMOLVLM = ({"image_token_id": "<image>"}, _smolvlm_settings)
FAMILIES = [
    Family(STTSConfig, STTSProcessor, Molmo2ImageProcessor, STTSVideoProcessor, *_MOLMO2),
    Family(STTSQwen3VLConfig, Qwen3VLProcessor, Qwen2VLImageProcessor, Qwen3VLVideoProcessor, *_QWEN_VL),
    Family(STTSQwen3VLMoeConfig, Qwen3VLProcessor, Qwen2VLImageProcessor, Qwen3VLVideoProcessor, *_QWEN_VL),
    Family(STTSQwen3_5Config, Qwen3VLProcessor, Qwen2VLImageProcessor, Qwen3VLVideoProcessor, *_QWEN_VL),
    Family(STTSQwen3_5MoeConfig, Qwen3VLProcessor, Qwen2VLImageProcessor, Qwen3VLVideoProcessor, *_QWEN_VL),
    Family(STTSQwen2_5_VLConfig, Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor, *_QWEN_VL),
    Family(STTSSmolVLMConfig, STTSSmolVLMProcessor, SmolVLMImageProcessor, STTSSmolVLMVideoProcessor, *_SMOLVLM),
]
OWN = {family.config.model_type: family for family in FAMILIES}
STOCK = {family.config.native.model_type: family for family in FAMILIES}


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
    """Returns `model_type` of the `config.json` in a folder or Hub repository. Raises `OSError` without one."""
    folder = Path(checkpoint).expanduser()
    if folder.is_dir():
        config = read_json(folder / "config.json")
    else:
        config, _ = PreTrainedConfig.get_config_dict(checkpoint, revision=revision)
    if not config:
        raise OSError(f"{checkpoint} holds no config.json. Pass a checkpoint's folder or Hub id.")
    return config.get("model_type")


def family_of_checkpoint(checkpoint: str | Path, revision: str | None = None) -> Family:
    """Returns the family of a folder or Hub repository, and registers the Auto classes. Raises as `family_of`."""
    register_auto_classes()
    return family_of(model_type_of(checkpoint, revision), checkpoint)
