"""STTS on Qwen3-VL with a mixture of experts: the dense models' tower before the native text model."""

from transformers import GenerationMixin
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import (
    Qwen3VLMoeForConditionalGeneration,
    Qwen3VLMoeModel,
    Qwen3VLMoeTextModel,
    load_balancing_loss_func,
)

from .configuration_stts_qwen3_vl_moe import STTSQwen3VLMoeConfig
from .mrope_stts import MropeBackbone
from .outputs_stts import PruningHead
from .vision_stts_qwen3_vl import STTSQwen3VLVisionModel


class STTSQwen3VLMoeModel(MropeBackbone, Qwen3VLMoeModel):
    """Qwen3-VL without a head, whose videos lose the blocks of least score."""

    config: STTSQwen3VLMoeConfig
    visual: STTSQwen3VLVisionModel
    native = Qwen3VLMoeModel
    tower = STTSQwen3VLVisionModel
    text_class = Qwen3VLMoeTextModel
    parts = MropeBackbone.parts | {"visual.deepstack_merger_list": "connector"}


class STTSQwen3VLMoeForConditionalGeneration(PruningHead, Qwen3VLMoeForConditionalGeneration, GenerationMixin):
    """Qwen3-VL with video token pruning inside the ViT and the LLM; loads stock weights too."""

    config: STTSQwen3VLMoeConfig
    model: STTSQwen3VLMoeModel
    native = Qwen3VLMoeForConditionalGeneration
    backbone = STTSQwen3VLMoeModel
    router_loss = staticmethod(load_balancing_loss_func)


__all__ = ["STTSQwen3VLMoeForConditionalGeneration", "STTSQwen3VLMoeModel"]
