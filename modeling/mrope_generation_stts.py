"""The head of backbones whose tokens have a position in time, height and width: `forward` with losses, `generate`."""

from typing import Any

import torch
from transformers.cache_utils import Cache
from transformers.utils import can_return_tuple

from .generation_stts import STTSGeneration
from .mrope_stts import MropeBackbone
from .outputs_stts import PruningCausalLMOutputWithPast, PruningHead, check_targets
from .sequence_stts import Tokens, token_order


class MropeGeneration(PruningHead, STTSGeneration):
    """`forward` and `generate` of a model with a head whose `model` is a `MropeBackbone`."""

    model: MropeBackbone

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
        *,
        pruning_ratio: float | None = None,
        pruned_length: int | None = None,
        packed_rows: bool | None = None,
        **kwargs: Any,
    ) -> tuple | PruningCausalLMOutputWithPast:
        """
        As the native forward, on the sequence that is left when the placeholders of dropped blocks are gone.

        Args:
            labels: (B, L) like the caller's sequence, as are `shift_labels` in their place.
            logits_to_keep: counts in the sequence that is left.
            pruning_ratio: `k` in [0, 1] in place of the config's, for this call.
            pruned_length: the length `L'` that every row gets, shorter ones by filler where the batch is padded.
            packed_rows: whether rows hold several samples; None looks where `position_ids` start over.
            kwargs: of the native forward.

        Raises:
            ValueError: inputs do not fit.
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
