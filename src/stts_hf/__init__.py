"""
STTS (Spatio-Temporal Token Scoring) for Hugging Face.

The public names below are imported on first use, and that registers all of transformers' Auto classes for
`model_type` "stts", so that checkpoints load without `trust_remote_code`. `import stts_hf` alone registers nothing:
registered classes win over a checkpoint's own code, and the command line runs the checkpoint's code.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stts_hf.inference.answering import answer_videos
    from stts_hf.inference.prefetch import prefetch
    from stts_hf.modeling.configuration_stts import STTSConfig, STTSVisionConfig
    from stts_hf.modeling.modeling_stts import STTSForConditionalGeneration, STTSModel, STTSVisionModel
    from stts_hf.modeling.processing_stts import STTSProcessor
    from stts_hf.modeling.video_processing_stts import STTSVideoProcessor
    from stts_hf.visualize.contact_sheet import contact_sheet

_MODULES = {
    "STTSConfig": "modeling.configuration_stts",
    "STTSVisionConfig": "modeling.configuration_stts",
    "STTSForConditionalGeneration": "modeling.modeling_stts",
    "STTSModel": "modeling.modeling_stts",
    "STTSVisionModel": "modeling.modeling_stts",
    "STTSProcessor": "modeling.processing_stts",
    "STTSVideoProcessor": "modeling.video_processing_stts",
    "answer_videos": "inference.answering",
    "contact_sheet": "visualize.contact_sheet",
    "prefetch": "inference.prefetch",
}

__version__ = "0.1.0"
__all__ = [
    "STTSConfig",
    "STTSForConditionalGeneration",
    "STTSModel",
    "STTSProcessor",
    "STTSVideoProcessor",
    "STTSVisionConfig",
    "STTSVisionModel",
    "answer_videos",
    "contact_sheet",
    "prefetch",
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
    return sorted([*globals(), *_MODULES])
