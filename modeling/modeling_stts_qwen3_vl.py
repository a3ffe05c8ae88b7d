"""STTS on Qwen3-VL: `STTSQwen3VLModel` sends videos through the pruning tower and shortens the LLM's sequence
accordingly; `STTSQwen3VLForConditionalGeneration` adds head, losses and `generate`.

All but the parts of the model and their names is in `mrope_stts`: a frame is a tubelet, positions are native ones of
the whole prompt, and the native forward takes the features of the kept blocks, deepstack's included.
"""

from transformers import GenerationMixin
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLForConditionalGeneration,
    Qwen3VLModel,
    Qwen3VLTextModel,
)

from .configuration_stts_qwen3_vl import STTSQwen3VLConfig
from .mrope_stts import MropeBackbone
from .outputs_stts import PruningHead
from .vision_stts_qwen3_vl import STTSQwen3VLVisionModel


class STTSQwen3VLModel(MropeBackbone, Qwen3VLModel):
    """Qwen3-VL without a head; drops the lowest-scored blocks of videos."""

    config: STTSQwen3VLConfig
    visual: STTSQwen3VLVisionModel
    native = Qwen3VLModel
    tower = STTSQwen3VLVisionModel
    text_class = Qwen3VLTextModel
    parts = MropeBackbone.parts | {"visual.deepstack_merger_list": "connector"}


class STTSQwen3VLForConditionalGeneration(PruningHead, Qwen3VLForConditionalGeneration, GenerationMixin):
    """Qwen3-VL with video token pruning inside the ViT and the LLM; loads stock Qwen3-VL weights too."""

    config: STTSQwen3VLConfig
    model: STTSQwen3VLModel
    native = Qwen3VLForConditionalGeneration
    backbone = STTSQwen3VLModel


__all__ = ["STTSQwen3VLForConditionalGeneration", "STTSQwen3VLModel", "STTSQwen3VLVisionModel"]
