"""STTS on Qwen3.5 with a mixture of experts: the dense models' tower before the native text model."""

from transformers import GenerationMixin
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeModel,
    Qwen3_5MoeTextModel,
    load_balancing_loss_func,
)

from .configuration_stts_qwen3_5_moe import STTSQwen3_5MoeConfig
from .outputs_stts import PruningHead
from .recurrent_stts import RecurrentBackbone
from .vision_stts_qwen3_vl import STTSQwen3VLVisionModel


class STTSQwen3_5MoeModel(RecurrentBackbone, Qwen3_5MoeModel):
    """Qwen3.5 without a head, whose videos lose the blocks of least score."""

    config: STTSQwen3_5MoeConfig
    visual: STTSQwen3VLVisionModel
    native = Qwen3_5MoeModel
    tower = STTSQwen3VLVisionModel
    text_class = Qwen3_5MoeTextModel


class STTSQwen3_5MoeForConditionalGeneration(PruningHead, Qwen3_5MoeForConditionalGeneration, GenerationMixin):
    """Qwen3.5 with video token pruning inside the ViT and the LLM; loads stock weights too."""

    config: STTSQwen3_5MoeConfig
    model: STTSQwen3_5MoeModel
    native = Qwen3_5MoeForConditionalGeneration
    backbone = STTSQwen3_5MoeModel
    router_loss = staticmethod(load_balancing_loss_func)


__all__ = ["STTSQwen3_5MoeForConditionalGeneration", "STTSQwen3_5MoeModel"]
