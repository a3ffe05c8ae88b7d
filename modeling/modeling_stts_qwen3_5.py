"""STTS on Qwen3.5: Qwen3-VL's tower without deepstack, before a text model most of whose layers are recurrent."""

from transformers import GenerationMixin
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5ForConditionalGeneration,
    Qwen3_5Model,
    Qwen3_5TextModel,
)

from .configuration_stts_qwen3_5 import STTSQwen3_5Config
from .outputs_stts import PruningHead
from .recurrent_stts import RecurrentBackbone
from .vision_stts_qwen3_vl import STTSQwen3VLVisionModel


class STTSQwen3_5Model(RecurrentBackbone, Qwen3_5Model):
    """Qwen3.5 without a head, whose videos lose the blocks of least score."""

    config: STTSQwen3_5Config
    visual: STTSQwen3VLVisionModel
    native = Qwen3_5Model
    tower = STTSQwen3VLVisionModel
    text_class = Qwen3_5TextModel


class STTSQwen3_5ForConditionalGeneration(PruningHead, Qwen3_5ForConditionalGeneration, GenerationMixin):
    """Qwen3.5 with video token pruning inside the ViT and the LLM; loads stock Qwen3.5 weights too."""

    config: STTSQwen3_5Config
    model: STTSQwen3_5Model
    native = Qwen3_5ForConditionalGeneration
    backbone = STTSQwen3_5Model


__all__ = ["STTSQwen3_5ForConditionalGeneration", "STTSQwen3_5Model"]
