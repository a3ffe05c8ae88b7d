"""STTS on Molmo2: `STTSModel` sends videos through the pruning tower and shortens the LLM's sequence accordingly;
`STTSForConditionalGeneration` adds head, losses and `generate`.

Without videos a call is native Molmo2, unless rows are packed or get a length. With videos, `STTSModel.forward` goes
`encode videos -> drop placeholders -> merge features -> mask -> native forward on embeddings`.
"""

import copy
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.masking_utils import and_masks, create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.molmo2.modeling_molmo2 import (
    Molmo2ForConditionalGeneration,
    Molmo2Model,
    Molmo2TextModel,
)
from transformers.utils import can_return_tuple

from .checks_stts import (
    check_finite,
    check_image_inputs,
    check_pruned_length,
    check_shape,
    check_text_attention,
    check_video_inputs,
    flash_tells_samples_apart,
    packed_without_videos,
    read_grids,
)
from .configuration_stts import STTSConfig
from .generation_stts import STTSGeneration
from .inputs_stts import PrunedInputs, prune_inputs
from .outputs_stts import STTSCausalLMOutputWithPast, STTSModelOutputWithPast, STTSVideoFeatures
from .scoring_stts import split_videos
from .sequence_stts import find_samples
from .settings_stts import check_pruning_ratio
from .vision_stts import PruningPlan, STTSAdapter, STTSVisionModel, STTSVisionOutput

if TYPE_CHECKING:
    # Never imported, but transformers saves what it finds named here: so a saved model carries the processor's code.
    from .processing_stts import STTSProcessor  # noqa: F401

RELEASED_NAMES = ("model.transformer.", "model.vision_backbone.")  # how names begin in Molmo2's and our files


class STTSModel(Molmo2Model):
    """Molmo2 without a head, whose videos lose the blocks of least score."""

    config: STTSConfig

    def __init__(self, config: STTSConfig):
        # Past Molmo2Model.__init__, which would build a second vision tower and language model.
        super(Molmo2Model, self).__init__(config)
        self.vision_tower = STTSVisionModel(config.vision_config)
        self.multi_modal_projector = STTSAdapter(config.adapter_config)
        self.language_model = Molmo2TextModel(config.text_config)
        self.post_init()

    @can_return_tuple
    def get_video_features(
        self,
        pixel_values_videos: torch.Tensor,
        video_token_pooling: torch.Tensor,
        video_grids: torch.Tensor,
        pruning_ratio: float | None = None,
        with_temporal_loss: bool = False,
        **kwargs,
    ) -> tuple | STTSVideoFeatures:
        """
        Features of the kept blocks of each video.

        pixel_values_videos: (F, N, pixels) frames of all videos. video_token_pooling: (G, S) patches of each block, -1
        for padding. video_grids: (V, 3) = (T, rows, cols). pruning_ratio: in place of the config's. Raises `ValueError`
        where these do not fit each other.
        """
        vision_config = self.config.vision_config
        if pruning_ratio is None:
            pruning_ratio = vision_config.pruning_ratio
        pixel_values_videos = check_video_inputs(pixel_values_videos, video_token_pooling, video_grids, vision_config)
        check_finite(pixel_values_videos)
        num_layers = vision_config.num_hidden_layers
        pruning = PruningPlan(
            video_token_pooling.to(pixel_values_videos.device).long(),
            read_grids(video_grids),
            check_pruning_ratio(pruning_ratio),
            [layer % num_layers for layer in self.config.adapter_config.vision_feature_layer],
            with_temporal_loss,
            self.config.detach_temporal_target,
        )
        vision: STTSVisionOutput = self.vision_tower(pixel_values_videos, pruning)
        features = self.multi_modal_projector(vision.features, valid=vision.valid).last_hidden_state

        def per_video(blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
            videos = zip(split_videos(blocks, pruning.grids), pruning.grids, strict=True)
            return tuple(video.view(frames, rows * cols) for video, (frames, rows, cols) in videos)

        return STTSVideoFeatures(
            pooler_output=features.split(pruning.num_kept),
            token_scores=per_video(vision.token_scores),
            keep_mask=per_video(vision.keep_mask),
            temporal_loss=vision.temporal_loss,
        )

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        pixel_values: torch.Tensor | None = None,
        image_token_pooling: torch.Tensor | None = None,
        image_grids: torch.Tensor | None = None,
        image_num_crops: torch.Tensor | None = None,
        pixel_values_videos: torch.Tensor | None = None,
        video_token_pooling: torch.Tensor | None = None,
        video_grids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        mm_token_type_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        mm_encoder_outputs: dict[str, BaseModelOutputWithPooling] | None = None,
        pruning_ratio: float | None = None,
        pruned_length: int | None = None,
        with_temporal_loss: bool = False,
        **kwargs,
    ) -> tuple | STTSModelOutputWithPast:
        """
        As Molmo2's forward. `pruning_ratio` replaces the config's for this call; `pruned_length` is the length `L'`
        that every row gets; `past_key_values` from an earlier call that dropped tokens takes up where that left off,
        in the caller's positions.
        """
        cached = getattr(past_key_values, "pruned_prompt", None)
        if pixel_values is not None or pixel_values_videos is not None or mm_encoder_outputs:
            check_text_attention(self.config.text_config)
        if pruning_ratio is not None:
            check_pruning_ratio(pruning_ratio)
        tokens = input_ids if input_ids is not None else inputs_embeds
        if pruned_length is not None:
            check_pruned_length(pruned_length)
        unpruned = pixel_values_videos is None and cached is None
        packed = unpruned and packed_without_videos(tokens, attention_mask, position_ids, past_key_values)
        keeps_length = pruned_length is None or (tokens is not None and tokens.shape[1] == pruned_length)
        if packed and keeps_length and pixel_values is None:
            keeps_packing = flash_tells_samples_apart(self.config.text_config, tokens, attention_mask)
        else:
            keeps_packing = not packed
        if unpruned and keeps_length and keeps_packing:
            check_image_inputs(pixel_values, image_token_pooling, image_grids)
            if mm_encoder_outputs and attention_mask is None and past_key_values is None:
                # `generate` without a cache, after dropping: gaps in the positions would pass for packed samples.
                attention_mask = torch.ones(tokens.shape[:2], dtype=torch.int64, device=tokens.device)
            outputs = super().forward(
                input_ids=input_ids,
                pixel_values=pixel_values,
                image_token_pooling=image_token_pooling,
                image_grids=image_grids,
                image_num_crops=image_num_crops,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                mm_token_type_ids=mm_token_type_ids,
                inputs_embeds=inputs_embeds,
                use_cache=use_cache,
                mm_encoder_outputs=mm_encoder_outputs,
                return_dict=True,
                **kwargs,
            )
            result = STTSModelOutputWithPast(**outputs)
            if packed:
                result.kept_indices = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[:2])
            return result

        if mm_encoder_outputs:
            raise ValueError(
                "`mm_encoder_outputs` excludes `pixel_values_videos`, `pruned_length` and packed rows; pass the pixels."
            )
        if "cu_seq_lens_q" in kwargs:
            raise ValueError(
                "`cu_seq_lens_q` describes the sequence before video tokens are dropped. Leave out the flash-attention "
                "arguments; packed samples are told apart by `position_ids` that start over."
            )
        inputs = self.prune_inputs(
            input_ids=input_ids,
            inputs_embeds=inputs_embeds,
            pixel_values=pixel_values,
            image_token_pooling=image_token_pooling,
            image_grids=image_grids,
            pixel_values_videos=pixel_values_videos,
            video_token_pooling=video_token_pooling,
            video_grids=video_grids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            mm_token_type_ids=mm_token_type_ids,
            pruning_ratio=pruning_ratio,
            pruned_length=pruned_length,
            with_temporal_loss=with_temporal_loss,
        )
        inputs_embeds = self.merge_features(inputs)
        outputs = super().forward(
            inputs_embeds=inputs_embeds,
            attention_mask=self.make_mask(inputs, inputs_embeds, past_key_values),
            position_ids=inputs.position_ids,
            past_key_values=past_key_values,
            mm_token_type_ids=inputs.mm_token_type_ids,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        if isinstance(outputs.past_key_values, Cache):
            outputs.past_key_values.pruned_prompt = inputs.cached_after
        result = STTSModelOutputWithPast(**outputs)
        result.kept_indices = inputs.kept_indices
        if inputs.features:
            result.image_hidden_states = inputs.features[0][1]  # the videos', where there are any
        if inputs.video is not None:
            for field in ("temporal_loss", "token_scores", "keep_mask"):
                setattr(result, field, getattr(inputs.video, field))
        return result

    def prune_inputs(self, **inputs) -> PrunedInputs:
        """Encodes videos and images and drops the placeholders of dropped blocks; arguments as in `forward`."""
        return prune_inputs(self, **inputs)

    def merge_features(self, inputs: PrunedInputs) -> torch.Tensor:
        """Embeddings (B, L', text hidden size) of what is left, with features added onto their placeholders."""
        embeds = inputs.inputs_embeds
        if embeds is None:
            embeds = self.get_input_embeddings()(inputs.input_ids)
        for placeholders, features in inputs.features:
            # A stable sort of the flags brings the placeholders to the front. Boolean indexing, or the backward pass of
            # a masked scatter, would wait for their number.
            places = torch.sort((~placeholders).flatten().to(torch.int8), stable=True).indices[: len(features)]
            added = torch.zeros_like(embeds).flatten(0, 1).index_copy(0, places, features.to(embeds))
            embeds = embeds + added.view_as(embeds)
        return embeds

    def make_mask(self, inputs: PrunedInputs, inputs_embeds: torch.Tensor, past_key_values: Cache | None):
        """Causal, but bidirectional among the vision tokens of a sample, and closed between samples of a row."""
        if inputs.attention_mask.dim() == 4:
            return inputs.attention_mask
        samples, padding_mask = inputs.sample_ids, inputs.attention_mask
        # Always given: a plain causal mask may be left out, and gaps in the positions then pass for packed samples.
        blocks = torch.full_like(inputs.kept_indices, -1)
        if inputs.mm_token_type_ids is not None:
            blocks = torch.where(inputs.mm_token_type_ids == 1, 0 if samples is None else samples, blocks)
        past = padding_mask.shape[-1] - blocks.shape[-1]
        blocks = nn.functional.pad(blocks, (past, 0), value=-1)
        text_config = self.config.get_text_config()
        conditions = []  # beside causality; none of them holds in the vision block, which says so itself
        if samples is not None:
            last = samples.shape[-1] - 1  # a static cache has more columns than that, all of them out of sight
            conditions.append(lambda b, h, q, kv: samples[b, q] == samples[b, kv.clamp(max=last)])
        if text_config._attn_implementation == "flex_attention":
            # transformers would look whether anything is hidden, and wait for the device.
            shown, end = padding_mask.bool(), padding_mask.shape[-1] - 1
            blocks = torch.where(shown, blocks, -1)
            conditions.append(lambda b, h, q, kv: shown[b, kv.clamp(max=end)])
            padding_mask = None
        mask = create_causal_mask(
            config=text_config,
            inputs_embeds=inputs_embeds,
            attention_mask=padding_mask,
            past_key_values=past_key_values,
            block_sequence_ids=blocks,
            and_mask_function=and_masks(*conditions) if conditions else None,
        )
        if isinstance(mask, torch.Tensor) and mask.dim() == 4:  # flash attention takes the padding mask, for text alone
            # Filler before a row sees nothing, of which some kernels make NaN in the backward pass: it sees itself.
            filler = ~padding_mask[:, None, past:].bool()  # (B, 1, L')
            mask.diagonal(past, -2, -1).masked_fill_(filler, 1 if mask.dtype == torch.bool else 0)
        return mask


class STTSForConditionalGeneration(STTSGeneration, Molmo2ForConditionalGeneration, GenerationMixin):
    """Molmo2 with video token pruning inside the ViT and the LLM; loads stock Molmo2 weights too."""

    config: STTSConfig

    def __init__(self, config: STTSConfig):
        super(Molmo2ForConditionalGeneration, self).__init__(config)
        self.model = STTSModel(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.vocab_size = config.text_config.vocab_size
        self.model_tags = ["stts", "molmo2", "video", "token-pruning", "custom_code"]  # of the model card
        self.post_init()

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor], strict: bool = True, assign: bool = False):
        """
        As in PyTorch; tensors named as in the files that `save_pretrained` writes are taken too. `Trainer` resumes and
        loads the best model with what it reads there, and would go on with the weights it has, warning at most.
        """
        if any(name.startswith(RELEASED_NAMES) for name in state_dict):
            found: Any = type(self).from_pretrained(
                None, config=copy.deepcopy(self.config), state_dict=dict(state_dict), output_loading_info=True
            )
            loaded, info = found
            state_dict = {n: tensor for n, tensor in loaded.state_dict().items() if n not in info["missing_keys"]}
        return super().load_state_dict(state_dict, strict, assign)

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """As in transformers. Offloaded and quantised weights keep their native names: the released ones join them."""
        for module in self.modules():  # as loading does, so that a model that was never loaded is saved as one that was
            if isinstance(module, PreTrainedModel):
                module.config.dtype = module.dtype
        places = getattr(self, "hf_device_map", {}).values()
        if "cpu" in places or "disk" in places or getattr(self, "hf_quantizer", None) is not None:
            kwargs["save_original_format"] = False
        super().save_pretrained(save_directory, *args, **kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        pixel_values: torch.Tensor | None = None,
        image_token_pooling: torch.Tensor | None = None,
        image_grids: torch.Tensor | None = None,
        image_num_crops: torch.Tensor | None = None,
        pixel_values_videos: torch.Tensor | None = None,
        video_token_pooling: torch.Tensor | None = None,
        video_grids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        mm_token_type_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        mm_encoder_outputs: dict[str, BaseModelOutputWithPooling] | None = None,
        pruning_ratio: float | None = None,
        pruned_length: int | None = None,
        **kwargs,
    ) -> tuple | STTSCausalLMOutputWithPast:
        """
        As Molmo2's forward, on the sequence that is left when the placeholders of dropped blocks are gone.

        pruning_ratio: `k` in [0, 1] in place of the config's, for this call. pruned_length: the length `L'` that every
        row gets, shorter ones by filler where the batch is padded, so that all steps of a training have one shape; for
        calls without a cache. labels: (B, L) like the caller's sequence. logits_to_keep counts in the sequence that is
        left. Several samples may share a row where `position_ids` start over. Returns `STTSCausalLMOutputWithPast`;
        raises `ValueError` for inputs that do not fit.
        """
        if labels is not None and (tokens := input_ids if input_ids is not None else inputs_embeds) is not None:
            labels = check_shape("labels", labels, *tokens.shape[:2])
        outputs: STTSModelOutputWithPast = self.model(
            input_ids=input_ids,
            pixel_values=pixel_values,
            image_token_pooling=image_token_pooling,
            image_grids=image_grids,
            image_num_crops=image_num_crops,
            pixel_values_videos=pixel_values_videos,
            video_token_pooling=video_token_pooling,
            video_grids=video_grids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            mm_token_type_ids=mm_token_type_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            mm_encoder_outputs=mm_encoder_outputs,
            pruning_ratio=pruning_ratio,
            pruned_length=pruned_length,
            with_temporal_loss=labels is not None or self.training,
            return_dict=True,
            **kwargs,
        )
        rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, rows])
        kept_indices = outputs.kept_indices
        loss = task_loss = None
        if labels is not None:
            if kept_indices is not None:
                if position_ids is not None:  # the first token of a sample is not the next of the sample before it
                    padding_mask = attention_mask if attention_mask is not None and attention_mask.dim() == 2 else None
                    samples = find_samples(position_ids.expand(labels.shape), padding_mask)
                    labels = labels.masked_fill(samples.diff(dim=-1, prepend=samples[:, :1]) != 0, -100)
                taken = labels.gather(-1, kept_indices.clamp_min(0))
                is_filler = kept_indices < 0
                after_filler = nn.functional.pad(is_filler[:, :-1], (1, 0))  # nothing predicts a row's first token
                labels = taken.masked_fill(is_filler | after_filler, -100)
            loss = task_loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab_size, **kwargs)
            if outputs.temporal_loss is not None:
                loss = task_loss + self.config.temporal_loss_weight * outputs.temporal_loss.to(task_loss.device)
        if kept_indices is None and past_key_values is None:
            places = torch.arange(outputs.last_hidden_state.shape[1], device=logits.device)
            kept_indices = places.expand(logits.shape[0], -1)
        if kept_indices is not None:
            kept_indices = kept_indices[:, rows]
        return STTSCausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            image_hidden_states=outputs.image_hidden_states,
            task_loss=task_loss,
            temporal_loss=outputs.temporal_loss,
            token_scores=outputs.token_scores,
            keep_mask=outputs.keep_mask,
            kept_indices=kept_indices,
        )


# Without these, original Molmo2 weights would load into random parameters with no more than a warning: transformers
# renames keys only for model types it knows.
register_checkpoint_conversion_mapping("stts", get_checkpoint_conversion_mapping("molmo2"), overwrite=True)

STTSForConditionalGeneration.register_for_auto_class("AutoModel")

__all__ = ["STTSForConditionalGeneration", "STTSModel", "STTSVisionModel"]
