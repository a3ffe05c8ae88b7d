"""STTS on Qwen3-VL: `STTSQwen3VLModel` sends videos through the pruning tower and shortens the LLM's sequence
accordingly; `STTSQwen3VLForConditionalGeneration` adds head, losses and `generate`.

All but the parts of the model and their names is in `mrope_stts`: a frame is a tubelet, positions are native ones of
the whole prompt, and the native forward takes the features of the kept blocks, deepstack's included.
"""

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import GenerationMixin
from transformers.cache_utils import Cache
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLForConditionalGeneration,
    Qwen3VLModel,
    Qwen3VLTextModel,
)
from transformers.utils import can_return_tuple

from .configuration_stts_qwen3_vl import STTSQwen3VLConfig
from .mrope_stts import MropeBackbone, MropeGeneration
from .outputs_stts import PruningCausalLMOutputWithPast, PruningHead, check_targets
from .sequence_stts import Tokens, token_order
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
        self.rope_deltas = None
        self.post_init()


class STTSQwen3VLForConditionalGeneration(
    PruningHead, MropeGeneration, Qwen3VLForConditionalGeneration, GenerationMixin
):
    """Qwen3-VL with video token pruning inside the ViT and the LLM; loads stock Qwen3-VL weights too."""

    config: STTSQwen3VLConfig
    model: STTSQwen3VLModel

    def __init__(self, config: STTSQwen3VLConfig):
        super(Qwen3VLForConditionalGeneration, self).__init__(config)
        self.model = STTSQwen3VLModel(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.model_tags = ["stts", "qwen3_vl", "video", "token-pruning", "custom_code"]  # of the model card
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        pixel_values: torch.Tensor | None = None,
        pixel_values_videos: torch.Tensor | None = None,
        image_grid_thw: torch.LongTensor | None = None,
        video_grid_thw: torch.LongTensor | None = None,
        mm_token_type_ids: torch.LongTensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        mm_encoder_outputs: dict[str, Any] | None = None,
        pruning_ratio: float | None = None,
        pruned_length: int | None = None,
        packed_rows: bool | None = None,
        **kwargs: Any,
    ) -> tuple | PruningCausalLMOutputWithPast:
        """
        As Qwen3-VL's forward, on the sequence that is left when the placeholders of dropped blocks are gone.

        pruning_ratio, pruned_length, packed_rows: as in `MropeBackbone`. labels (or shift_labels): (B, L) like the
        caller's sequence. logits_to_keep counts in the sequence that is left. Raises `ValueError` for unfit inputs.
        """
        tokens = Tokens(input_ids, inputs_embeds, attention_mask, token_order(position_ids, self.model.num_axes))
        targets = check_targets(tokens, labels=labels, shift_labels=kwargs.pop("shift_labels", None))
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            pixel_values=pixel_values,
            pixel_values_videos=pixel_values_videos,
            image_grid_thw=image_grid_thw,
            video_grid_thw=video_grid_thw,
            mm_token_type_ids=mm_token_type_ids,
            mm_encoder_outputs=mm_encoder_outputs,
            pruning_ratio=pruning_ratio,
            pruned_length=pruned_length,
            packed_rows=packed_rows,
            with_temporal_loss=bool(targets) or self.training,
            return_dict=True,
            **kwargs,
        )
        fields = self.read_out(outputs, tokens, targets, logits_to_keep, past_key_values, packed_rows, **kwargs)
        return PruningCausalLMOutputWithPast(**fields)


STTSQwen3VLForConditionalGeneration.register_for_auto_class("AutoModel")

__all__ = ["STTSQwen3VLForConditionalGeneration", "STTSQwen3VLModel", "STTSQwen3VLVisionModel"]
