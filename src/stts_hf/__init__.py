"""
STTS (Spatio-Temporal Token Scoring) for Hugging Face.

The public names below are imported on first use, and that registers all of transformers' Auto classes for
`model_type` "stts", so that checkpoints load without `trust_remote_code`. `import stts_hf` alone registers nothing:
registered classes win over a checkpoint's own code, and the command line runs the checkpoint's code.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stts_hf.checkpoints.convert import convert_checkpoint
    from stts_hf.checkpoints.push import push_checkpoint
    from stts_hf.data.collator import STTSDataCollator
    from stts_hf.data.lengths import measure_lengths
    from stts_hf.data.loading import check_rows, load_rows
    from stts_hf.data.rows import RowError
    from stts_hf.data.sample_packing import PackedDataset
    from stts_hf.inference.answering import answer_videos
    from stts_hf.inference.prefetch import prefetch
    from stts_hf.modeling.configuration_stts import STTSConfig, STTSVisionConfig
    from stts_hf.modeling.modeling_stts import STTSForConditionalGeneration, STTSModel
    from stts_hf.modeling.processing_stts import STTSProcessor
    from stts_hf.modeling.video_processing_stts import STTSVideoProcessor
    from stts_hf.modeling.vision_stts import STTSVisionModel
    from stts_hf.training.arguments import STTSTrainingArguments
    from stts_hf.training.sft import STTSSFTTrainer
    from stts_hf.training.trainer import STTSTrainer
    from stts_hf.visualize.contact_sheet import contact_sheet

_MODULES = {
    "STTSConfig": "modeling.configuration_stts",
    "STTSVisionConfig": "modeling.configuration_stts",
    "STTSForConditionalGeneration": "modeling.modeling_stts",
    "STTSModel": "modeling.modeling_stts",
    "STTSVisionModel": "modeling.vision_stts",
    "STTSProcessor": "modeling.processing_stts",
    "STTSVideoProcessor": "modeling.video_processing_stts",
    "PackedDataset": "data.sample_packing",
    "RowError": "data.rows",
    "STTSDataCollator": "data.collator",
    "check_rows": "data.loading",
    "load_rows": "data.loading",
    "measure_lengths": "data.lengths",
    "STTSTrainer": "training.trainer",
    "STTSTrainingArguments": "training.arguments",
    "STTSSFTTrainer": "training.sft",
    "convert_checkpoint": "checkpoints.convert",
    "push_checkpoint": "checkpoints.push",
    "answer_videos": "inference.answering",
    "prefetch": "inference.prefetch",
    "contact_sheet": "visualize.contact_sheet",
}

__version__ = "0.1.0"
__all__ = [
    "PackedDataset",
    "RowError",
    "STTSConfig",
    "STTSDataCollator",
    "STTSForConditionalGeneration",
    "STTSModel",
    "STTSProcessor",
    "STTSSFTTrainer",
    "STTSTrainer",
    "STTSTrainingArguments",
    "STTSVideoProcessor",
    "STTSVisionConfig",
    "STTSVisionModel",
    "answer_videos",
    "check_rows",
    "contact_sheet",
    "convert_checkpoint",
    "load_rows",
    "measure_lengths",
    "prefetch",
    "push_checkpoint",
    "register_auto_classes",
]


def register_auto_classes() -> None:
    """Registers config, model, processor and video processor with transformers' Auto classes; may be repeated."""
    from transformers import (
        AutoConfig,
        AutoModel,
        AutoModelForImageTextToText,
        AutoModelForMultimodalLM,
        AutoProcessor,
        AutoVideoProcessor,
    )

    from stts_hf.modeling.configuration_stts import STTSConfig
    from stts_hf.modeling.modeling_stts import STTSForConditionalGeneration
    from stts_hf.modeling.processing_stts import STTSProcessor
    from stts_hf.modeling.video_processing_stts import STTSVideoProcessor

    AutoConfig.register(STTSConfig.model_type, STTSConfig, exist_ok=True)
    for auto_model in (AutoModel, AutoModelForImageTextToText, AutoModelForMultimodalLM):
        auto_model.register(STTSConfig, STTSForConditionalGeneration, exist_ok=True)
    AutoProcessor.register(STTSConfig, STTSProcessor, exist_ok=True)
    AutoVideoProcessor.register(STTSConfig, STTSVideoProcessor, exist_ok=True)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _MODULES[name].startswith("modeling."):
        register_auto_classes()
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
