"""
STTS (Spatio-Temporal Token Scoring) for Hugging Face.

The public names below are imported on first use, so that `import stts_hf` takes milliseconds. The first use of a
configuration, model or processor also registers transformers' Auto classes for `model_type` "stts" and the like of
every backbone: from then on checkpoints load without `trust_remote_code`, and by this package's code even with it.
`import stts_hf` alone registers nothing.
"""

import importlib as _importlib
import typing as _typing

from stts_hf.versions import __version__ as __version__

if _typing.TYPE_CHECKING:
    from stts_hf.auto_classes import register_auto_classes as register_auto_classes
    from stts_hf.checkpoints.convert import convert_checkpoint as convert_checkpoint
    from stts_hf.checkpoints.push import push_checkpoint as push_checkpoint
    from stts_hf.data.collator import STTSDataCollator as STTSDataCollator
    from stts_hf.data.encoding import align_labels as align_labels
    from stts_hf.data.loading import load_rows as load_rows
    from stts_hf.data.prefetch import prefetch as prefetch
    from stts_hf.data.preparing import prepare_rows as prepare_rows
    from stts_hf.data.rows import RowError as RowError
    from stts_hf.data.sample_packing import PackedDataset as PackedDataset
    from stts_hf.inference.assistant import VideoAssistant as VideoAssistant
    from stts_hf.inference.assistant import load as load
    from stts_hf.inference.clip import Clip as Clip
    from stts_hf.inference.clip import Dialogue as Dialogue
    from stts_hf.inference.engine import answer_videos as answer_videos
    from stts_hf.inference.requests import Answer as Answer
    from stts_hf.modeling.configuration_stts import STTSConfig as STTSConfig
    from stts_hf.modeling.configuration_stts import STTSVisionConfig as STTSVisionConfig
    from stts_hf.modeling.configuration_stts_qwen2_5_vl import STTSQwen2_5_VLConfig as STTSQwen2_5_VLConfig
    from stts_hf.modeling.configuration_stts_qwen2_5_vl import STTSQwen2_5_VLVisionConfig as STTSQwen2_5_VLVisionConfig
    from stts_hf.modeling.configuration_stts_qwen3_5 import STTSQwen3_5Config as STTSQwen3_5Config
    from stts_hf.modeling.configuration_stts_qwen3_5 import STTSQwen3_5VisionConfig as STTSQwen3_5VisionConfig
    from stts_hf.modeling.configuration_stts_qwen3_5_moe import STTSQwen3_5MoeConfig as STTSQwen3_5MoeConfig
    from stts_hf.modeling.configuration_stts_qwen3_vl import STTSQwen3VLConfig as STTSQwen3VLConfig
    from stts_hf.modeling.configuration_stts_qwen3_vl import STTSQwen3VLVisionConfig as STTSQwen3VLVisionConfig
    from stts_hf.modeling.configuration_stts_qwen3_vl_moe import STTSQwen3VLMoeConfig as STTSQwen3VLMoeConfig
    from stts_hf.modeling.configuration_stts_smolvlm import STTSSmolVLMConfig as STTSSmolVLMConfig
    from stts_hf.modeling.configuration_stts_smolvlm import STTSSmolVLMVisionConfig as STTSSmolVLMVisionConfig
    from stts_hf.modeling.modeling_stts import STTSForConditionalGeneration as STTSForConditionalGeneration
    from stts_hf.modeling.modeling_stts import STTSModel as STTSModel
    from stts_hf.modeling.modeling_stts_qwen2_5_vl import (
        STTSQwen2_5_VLForConditionalGeneration as STTSQwen2_5_VLForConditionalGeneration,
    )
    from stts_hf.modeling.modeling_stts_qwen2_5_vl import STTSQwen2_5_VLModel as STTSQwen2_5_VLModel
    from stts_hf.modeling.modeling_stts_qwen3_5 import (
        STTSQwen3_5ForConditionalGeneration as STTSQwen3_5ForConditionalGeneration,
    )
    from stts_hf.modeling.modeling_stts_qwen3_5 import STTSQwen3_5Model as STTSQwen3_5Model
    from stts_hf.modeling.modeling_stts_qwen3_5_moe import (
        STTSQwen3_5MoeForConditionalGeneration as STTSQwen3_5MoeForConditionalGeneration,
    )
    from stts_hf.modeling.modeling_stts_qwen3_5_moe import STTSQwen3_5MoeModel as STTSQwen3_5MoeModel
    from stts_hf.modeling.modeling_stts_qwen3_vl import (
        STTSQwen3VLForConditionalGeneration as STTSQwen3VLForConditionalGeneration,
    )
    from stts_hf.modeling.modeling_stts_qwen3_vl import STTSQwen3VLModel as STTSQwen3VLModel
    from stts_hf.modeling.modeling_stts_qwen3_vl_moe import (
        STTSQwen3VLMoeForConditionalGeneration as STTSQwen3VLMoeForConditionalGeneration,
    )
    from stts_hf.modeling.modeling_stts_qwen3_vl_moe import STTSQwen3VLMoeModel as STTSQwen3VLMoeModel
    from stts_hf.modeling.modeling_stts_smolvlm import (
        STTSSmolVLMForConditionalGeneration as STTSSmolVLMForConditionalGeneration,
    )
    from stts_hf.modeling.modeling_stts_smolvlm import STTSSmolVLMModel as STTSSmolVLMModel
    from stts_hf.modeling.processing_stts import STTSProcessor as STTSProcessor
    from stts_hf.modeling.processing_stts_smolvlm import STTSSmolVLMProcessor as STTSSmolVLMProcessor
    from stts_hf.modeling.video_processing_stts import STTSVideoProcessor as STTSVideoProcessor
    from stts_hf.modeling.video_processing_stts_smolvlm import STTSSmolVLMVideoProcessor as STTSSmolVLMVideoProcessor
    from stts_hf.modeling.vision_stts import STTSVisionModel as STTSVisionModel
    from stts_hf.modeling.vision_stts_qwen2_5_vl import STTSQwen2_5_VLVisionModel as STTSQwen2_5_VLVisionModel
    from stts_hf.modeling.vision_stts_qwen3_vl import STTSQwen3VLVisionModel as STTSQwen3VLVisionModel
    from stts_hf.modeling.vision_stts_smolvlm import STTSSmolVLMVisionModel as STTSSmolVLMVisionModel
    from stts_hf.training.arguments import STTSTrainingArguments as STTSTrainingArguments
    from stts_hf.training.sft import STTSSFTTrainer as STTSSFTTrainer
    from stts_hf.training.trainer import STTSTrainer as STTSTrainer
    from stts_hf.visualize.contact_sheet import contact_sheet as contact_sheet

_NAMES = {
    "auto_classes": ("register_auto_classes",),
    "checkpoints.convert": ("convert_checkpoint",),
    "checkpoints.push": ("push_checkpoint",),
    "data.collator": ("STTSDataCollator",),
    "data.encoding": ("align_labels",),
    "data.loading": ("load_rows",),
    "data.prefetch": ("prefetch",),
    "data.preparing": ("prepare_rows",),
    "data.sample_packing": ("PackedDataset",),
    "data.rows": ("RowError",),
    "inference.requests": ("Answer",),
    "inference.engine": ("answer_videos",),
    "inference.assistant": ("VideoAssistant", "load"),
    "inference.clip": ("Clip", "Dialogue"),
    "modeling.configuration_stts": ("STTSConfig", "STTSVisionConfig"),
    "modeling.configuration_stts_qwen2_5_vl": ("STTSQwen2_5_VLConfig", "STTSQwen2_5_VLVisionConfig"),
    "modeling.configuration_stts_qwen3_5": ("STTSQwen3_5Config", "STTSQwen3_5VisionConfig"),
    "modeling.configuration_stts_qwen3_5_moe": ("STTSQwen3_5MoeConfig",),
    "modeling.configuration_stts_qwen3_vl": ("STTSQwen3VLConfig", "STTSQwen3VLVisionConfig"),
    "modeling.configuration_stts_qwen3_vl_moe": ("STTSQwen3VLMoeConfig",),
    "modeling.configuration_stts_smolvlm": ("STTSSmolVLMConfig", "STTSSmolVLMVisionConfig"),
    "modeling.modeling_stts": ("STTSForConditionalGeneration", "STTSModel"),
    "modeling.modeling_stts_qwen2_5_vl": ("STTSQwen2_5_VLForConditionalGeneration", "STTSQwen2_5_VLModel"),
    "modeling.modeling_stts_qwen3_5": ("STTSQwen3_5ForConditionalGeneration", "STTSQwen3_5Model"),
    "modeling.modeling_stts_qwen3_5_moe": ("STTSQwen3_5MoeForConditionalGeneration", "STTSQwen3_5MoeModel"),
    "modeling.modeling_stts_qwen3_vl": ("STTSQwen3VLForConditionalGeneration", "STTSQwen3VLModel"),
    "modeling.modeling_stts_qwen3_vl_moe": ("STTSQwen3VLMoeForConditionalGeneration", "STTSQwen3VLMoeModel"),
    "modeling.modeling_stts_smolvlm": ("STTSSmolVLMForConditionalGeneration", "STTSSmolVLMModel"),
    "modeling.processing_stts": ("STTSProcessor",),
    "modeling.processing_stts_smolvlm": ("STTSSmolVLMProcessor",),
    "modeling.video_processing_stts": ("STTSVideoProcessor",),
    "modeling.video_processing_stts_smolvlm": ("STTSSmolVLMVideoProcessor",),
    "modeling.vision_stts": ("STTSVisionModel",),
    "modeling.vision_stts_qwen2_5_vl": ("STTSQwen2_5_VLVisionModel",),
    "modeling.vision_stts_qwen3_vl": ("STTSQwen3VLVisionModel",),
    "modeling.vision_stts_smolvlm": ("STTSSmolVLMVisionModel",),
    "training.arguments": ("STTSTrainingArguments",),
    "training.sft": ("STTSSFTTrainer",),
    "training.trainer": ("STTSTrainer",),
    "visualize.contact_sheet": ("contact_sheet",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

_EXTRAS = {"datasets": "train", "peft": "train", "pyarrow": "train", "trl": "trl"}

__all__ = list(_MODULES)


def __getattr__(name: str) -> object:
    if name == "VideoAnswer":
        import warnings

        warnings.warn("stts_hf.VideoAnswer is now stts_hf.Answer.", DeprecationWarning, stacklevel=2)
        name = "Answer"
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _importlib.import_module(f"{__name__}.versions").check_versions()
    if _MODULES[name].startswith("modeling."):
        _importlib.import_module(f"{__name__}.auto_classes").register_auto_classes()
    try:
        return getattr(_importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    except ModuleNotFoundError as error:
        missing: _typing.Any = error
        while missing.name is None and isinstance(missing.__cause__, ModuleNotFoundError):  # within transformers
            missing = missing.__cause__
        package = (missing.name or __name__).partition(".")[0]
        if package == __name__:
            raise
        needed = f"'stts-hf[{_EXTRAS[package]}]'" if package in _EXTRAS else package
        raise ImportError(f"stts_hf.{name} needs {package}, which is not installed: pip install {needed}.") from error


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
