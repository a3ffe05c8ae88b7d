"""Every backbone's classes, and their registration with transformers' Auto classes."""

import importlib
from typing import Any

import transformers

from stts_hf.modeling.configuration_stts import STTSConfig
from stts_hf.modeling.configuration_stts_qwen2_5_vl import STTSQwen2_5_VLConfig
from stts_hf.modeling.configuration_stts_qwen3_5 import STTSQwen3_5Config
from stts_hf.modeling.configuration_stts_qwen3_5_moe import STTSQwen3_5MoeConfig
from stts_hf.modeling.configuration_stts_qwen3_vl import STTSQwen3VLConfig
from stts_hf.modeling.configuration_stts_qwen3_vl_moe import STTSQwen3VLMoeConfig
from stts_hf.modeling.configuration_stts_smolvlm import STTSSmolVLMConfig

_QWEN3 = (STTSQwen3VLConfig, STTSQwen3VLMoeConfig, STTSQwen3_5Config, STTSQwen3_5MoeConfig)
CONFIGS: tuple[Any, ...] = (STTSConfig, *_QWEN3, STTSQwen2_5_VLConfig, STTSSmolVLMConfig)


def class_of(config: Any, auto_class: str = "AutoModel") -> Any:
    """The class that the `auto_map` of a configuration's checkpoints names, in this package."""
    module, name = config.auto_classes[auto_class].split(".")
    return getattr(importlib.import_module(f"stts_hf.modeling.{module}"), name)


def register_auto_classes() -> None:
    """Registers config, model, processor and video processor with transformers' Auto classes; may be repeated."""
    for config in CONFIGS:
        transformers.AutoConfig.register(config.model_type, config, exist_ok=True)
        for auto_class in config.auto_classes.keys() - {"AutoConfig"}:
            getattr(transformers, auto_class).register(config, class_of(config, auto_class), exist_ok=True)
