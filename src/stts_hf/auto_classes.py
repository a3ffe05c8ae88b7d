"""Every backbone's classes, and their registration with transformers' Auto classes."""

from typing import Any

import transformers

from stts_hf.modeling.configuration_stts import STTSConfig
from stts_hf.modeling.configuration_stts_qwen2_5_vl import STTSQwen2_5_VLConfig
from stts_hf.modeling.configuration_stts_qwen3_5 import STTSQwen3_5Config
from stts_hf.modeling.configuration_stts_qwen3_5_moe import STTSQwen3_5MoeConfig
from stts_hf.modeling.configuration_stts_qwen3_vl import STTSQwen3VLConfig
from stts_hf.modeling.configuration_stts_qwen3_vl_moe import STTSQwen3VLMoeConfig
from stts_hf.modeling.configuration_stts_smolvlm import STTSSmolVLMConfig
from stts_hf.modeling.modeling_stts import STTSForConditionalGeneration
from stts_hf.modeling.modeling_stts_qwen2_5_vl import STTSQwen2_5_VLForConditionalGeneration
from stts_hf.modeling.modeling_stts_qwen3_5 import STTSQwen3_5ForConditionalGeneration
from stts_hf.modeling.modeling_stts_qwen3_5_moe import STTSQwen3_5MoeForConditionalGeneration
from stts_hf.modeling.modeling_stts_qwen3_vl import STTSQwen3VLForConditionalGeneration
from stts_hf.modeling.modeling_stts_qwen3_vl_moe import STTSQwen3VLMoeForConditionalGeneration
from stts_hf.modeling.modeling_stts_smolvlm import STTSSmolVLMForConditionalGeneration
from stts_hf.modeling.processing_stts import STTSProcessor
from stts_hf.modeling.processing_stts_smolvlm import STTSSmolVLMProcessor
from stts_hf.modeling.video_processing_stts import STTSVideoProcessor
from stts_hf.modeling.video_processing_stts_smolvlm import STTSSmolVLMVideoProcessor

MODEL_CLASSES: dict[Any, Any] = {  # of each configuration class
    STTSConfig: STTSForConditionalGeneration,
    STTSQwen3VLConfig: STTSQwen3VLForConditionalGeneration,
    STTSQwen3VLMoeConfig: STTSQwen3VLMoeForConditionalGeneration,
    STTSQwen3_5Config: STTSQwen3_5ForConditionalGeneration,
    STTSQwen3_5MoeConfig: STTSQwen3_5MoeForConditionalGeneration,
    STTSQwen2_5_VLConfig: STTSQwen2_5_VLForConditionalGeneration,
    STTSSmolVLMConfig: STTSSmolVLMForConditionalGeneration,
}


def register_auto_classes() -> None:
    """Registers config, model, processor and video processor with transformers' Auto classes; may be repeated."""
    for config, model in MODEL_CLASSES.items():
        transformers.AutoConfig.register(config.model_type, config, exist_ok=True)
        for auto_model in ("AutoModel", "AutoModelForImageTextToText", "AutoModelForMultimodalLM"):
            getattr(transformers, auto_model).register(config, model, exist_ok=True)
    transformers.AutoProcessor.register(STTSConfig, STTSProcessor, exist_ok=True)
    transformers.AutoProcessor.register(STTSSmolVLMConfig, STTSSmolVLMProcessor, exist_ok=True)
    transformers.AutoVideoProcessor.register(STTSConfig, STTSVideoProcessor, exist_ok=True)
    transformers.AutoVideoProcessor.register(STTSSmolVLMConfig, STTSSmolVLMVideoProcessor, exist_ok=True)
