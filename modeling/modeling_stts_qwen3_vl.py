"""STTS on Qwen3-VL: `STTSQwen3VLModel` sends videos through the pruning tower and shortens the LLM's sequence
accordingly; `STTSQwen3VLForConditionalGeneration` adds head, losses and `generate`.

All but the parts of the model and their names is in `mrope_stts`: a frame is a tubelet, positions are native ones of
the whole prompt, and the native forward takes the features of the kept blocks, deepstack's included.
"""

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import GenerationMixin
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLForConditionalGeneration,
    Qwen3VLModel,
    Qwen3VLTextModel,
)

from .configuration_stts_qwen3_vl import STTSQwen3VLConfig
from .mrope_stts import MropeBackbone
from .outputs_stts import PruningHead, with_native_arguments
from .vision_stts_qwen3_vl import STTSQwen3VLVisionModel


class STTSQwen3VLModel(MropeBackbone, Qwen3VLModel):
    """Qwen3-VL without a head, whose videos lose the blocks of least score."""

    config: STTSQwen3VLConfig
    visual: STTSQwen3VLVisionModel
    parts: ClassVar[dict[str, str]] = {
        "language_model": "language_model",
        "visual": "vision_tower",
        "visual.scorer": "scorer",
        "visual.merger": "connector",
        "visual.deepstack_merger_list": "connector",
    }

    def __init__(self, config: STTSQwen3VLConfig):
        # Skips Qwen3VLModel.__init__, which would build a second vision tower and language model.
        super(Qwen3VLModel, self).__init__(config)
        self.visual = STTSQwen3VLVisionModel(config.vision_config)
        self.language_model = Qwen3VLTextModel(config.text_config)
        self.post_init()

    def native_forward(self, mm_token_type_ids: torch.Tensor | None = None, **arguments: Any) -> Any:
        return Qwen3VLModel.forward(self, **arguments)


class STTSQwen3VLForConditionalGeneration(PruningHead, Qwen3VLForConditionalGeneration, GenerationMixin):
    """Qwen3-VL with video token pruning inside the ViT and the LLM; loads stock Qwen3-VL weights too."""

    config: STTSQwen3VLConfig
    model: STTSQwen3VLModel

    def __init__(self, config: STTSQwen3VLConfig):
        super(Qwen3VLForConditionalGeneration, self).__init__(config)
        self.model = STTSQwen3VLModel(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.model_tags = ["stts", "qwen3_vl", "video", "token-pruning", "custom_code"]  # of the model card
        self.post_init()

    forward = with_native_arguments(Qwen3VLForConditionalGeneration, PruningHead.forward)


STTSQwen3VLForConditionalGeneration.register_for_auto_class("AutoModel")

__all__ = ["STTSQwen3VLForConditionalGeneration", "STTSQwen3VLModel", "STTSQwen3VLVisionModel"]
