"""STTS on Molmo2: `STTSModel` sends videos through the pruning tower and shortens the LLM's sequence accordingly;
`STTSForConditionalGeneration` adds head, losses and `generate`.

With videos a call goes `plan -> encode (score, bias, drop) -> drop placeholders -> merge -> native forward`; without,
it is native Molmo2's, unless rows are packed or get a length.
"""

import copy
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from transformers import GenerationMixin
from transformers.cache_utils import Cache
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.molmo2.modeling_molmo2 import (
    Molmo2CausalLMOutputWithPast,
    Molmo2ForConditionalGeneration,
    Molmo2Model,
    Molmo2ModelOutputWithPast,
    Molmo2TextModel,
)
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple

from .cache_stts import forget_marks, mark_cache, needs_note
from .checks_stts import check_exclusive, check_names, check_settings, check_tensors, holds_packed_rows
from .configuration_stts import STTSConfig
from .generation_stts import STTSGeneration
from .outputs_stts import PruningHead, PruningOutput, TaskOutput, check_targets
from .plan_stts import VideoFeatures
from .pruning_stts import PrunedInputs, PruningBackbone
from .sequence_stts import Tokens
from .vision_stts import STTSAdapter, STTSVisionModel, STTSVisionOutput, STTSVisionPlan, check_video_inputs
from .vision_tokens_stts import add_features, check_text_attention, features_of_rows, make_mask, placeholders_of_videos

if TYPE_CHECKING:
    # Never imported. transformers saves every module named here, so a saved model carries the processor's code.
    from .processing_stts import STTSProcessor  # noqa: F401

SCORER = ".scorer."  # in the names of its weights, which end alike in all files
RELEASED_NAMES = ("model.transformer.", "model.vision_backbone.")  # how names begin in Molmo2's and our files


@dataclass
class STTSModelOutputWithPast(PruningOutput, Molmo2ModelOutputWithPast):
    """Molmo2's, and the fields of `PruningOutput`."""


@dataclass
class STTSCausalLMOutputWithPast(PruningOutput, TaskOutput, Molmo2CausalLMOutputWithPast):
    """
    Molmo2's output on the sequence that is left, and what was left.

    Attributes:
        loss: `task_loss + temporal_loss_weight * temporal_loss`.
        image_hidden_states: features of the videos' kept blocks.
    """


class STTSModel(PruningBackbone, Molmo2Model):
    """Molmo2 without a head, whose videos lose the blocks of least score."""

    config: STTSConfig
    vision_tower: STTSVisionModel
    multi_modal_projector: STTSAdapter
    language_model: Molmo2TextModel
    parts: ClassVar[dict[str, str]] = {
        "language_model": "language_model",
        "vision_tower": "vision_tower",
        "vision_tower.scorer": "scorer",
        "multi_modal_projector": "connector",
    }
    video_inputs = ("pixel_values_videos", "video_token_pooling", "video_grids")
    image_inputs = ("pixel_values", "image_token_pooling", "image_grids")
    unread_inputs = ("image_num_crops",)

    def __init__(self, config: STTSConfig):
        # Skips Molmo2Model.__init__, which would build a second vision tower and language model.
        super(Molmo2Model, self).__init__(config)
        self.vision_tower = STTSVisionModel(config.vision_config)
        self.multi_modal_projector = STTSAdapter(config.adapter_config)
        self.language_model = Molmo2TextModel(config.text_config)
        self.post_init()

    # The hooks of `PruningBackbone`.

    def find_placeholders(self, tokens: Tokens, with_videos: bool, with_images: bool) -> tuple[torch.Tensor, ...]:
        """Placeholders of videos and of images, (B, L) each; Molmo2 has one id for both."""
        config, find = self.config, functools.partial(self.find_token, tokens)
        placeholders = find(config.image_patch_id)
        if not with_images:
            return placeholders, torch.zeros_like(placeholders)
        if not with_videos:
            return torch.zeros_like(placeholders), placeholders
        frame_starts, image_starts = find(config.frame_start_token_id), find(config.image_start_token_id)
        # Where the processor wraps frames in an image's tokens (`use_frame_special_tokens=False`, as the released
        # models do), a frame's start follows its timestamp, while an image's large view directly follows the end of
        # its small one.
        follows_end = nn.functional.pad(find(config.image_end_token_id)[:, :-1], (1, 0))
        frame_starts = torch.where(frame_starts.any(), frame_starts, image_starts & ~follows_end)
        image_starts = (image_starts & ~frame_starts) | find(config.low_res_image_start_token_id)
        videos = placeholders_of_videos(placeholders, frame_starts, image_starts)
        return videos, placeholders & ~videos

    def plan_videos(
        self, vision: dict[str, Any], pruning_ratio: float | None = None, with_temporal_loss: bool = False
    ) -> STTSVisionPlan:
        """
        What stays of each video. vision: pixel_values_videos (F, N, pixels) frames of all videos, video_token_pooling
        (G, S) patches of each block, -1 for padding, video_grids (V, 3) = (T, rows, cols). Raises `ValueError` where
        they do not fit each other.
        """
        self.config.validate_vision_config()
        grids = check_video_inputs(vision, self.config.vision_config)
        num_layers = self.config.vision_config.num_hidden_layers
        return STTSVisionPlan(
            vision["video_token_pooling"].to(vision["pixel_values_videos"].device).long(),
            grids,
            self.config.vision_config.pruning_ratio if pruning_ratio is None else pruning_ratio,
            with_temporal_loss,
            self.config.detach_temporal_target,
            [layer % num_layers for layer in self.config.adapter_config.vision_feature_layer or ()],
        )

    def encode_videos(  # type: ignore[override]  # its own plan
        self, pixel_values: torch.Tensor, plan: STTSVisionPlan, **kwargs: Any
    ) -> VideoFeatures:
        """Scores the blocks of all frames (F, N, pixels), drops what the plan says and pools the rest."""
        if pixel_values.dim() == 4:
            pixel_values = pixel_values.flatten(0, 1)
        vision: STTSVisionOutput = self.vision_tower(pixel_values, plan, **kwargs)
        features = self.multi_modal_projector(vision.features, valid=vision.valid).last_hidden_state
        return VideoFeatures(
            pooler_output=features.split(plan.num_kept),
            token_scores=plan.per_video(vision.token_scores),
            keep_mask=plan.per_video(vision.keep_mask),
            temporal_loss=vision.temporal_loss,
            last_hidden_state=vision.last_hidden_state,
            hidden_states=vision.hidden_states,
        )

    def encode_images(self, vision: dict[str, Any]) -> BaseModelOutputWithPooling:
        """All images of a call; per image (image tokens, text hidden size)."""
        return self.get_image_features(*check_tensors(vision, *self.image_inputs))

    def merge_inputs(self, pruned: PrunedInputs, by_row: bool = False) -> dict[str, Any]:
        """Images' and videos' features as one modality, since they share a placeholder."""
        if not pruned.features:
            return {}
        if pruned.tokens.inputs_embeds is not None:
            return {"inputs_embeds": self.embed_pruned(pruned)}
        return {"mm_encoder_outputs": {"video": BaseModelOutputWithPooling(pooler_output=features_of_rows(pruned))}}

    def check_generation(self, cache: Cache | None, setting: Callable[[str], Any]) -> None:
        """Raises `ValueError` where decoding would silently treat vision tokens as causal."""
        check_text_attention(self.config.text_config)
        if "prepare_inputs_for_generation" in vars(Molmo2ForConditionalGeneration):  # since transformers 5.23
            return
        static = "static" in (setting("cache_implementation") or "") or getattr(cache, "is_compileable", False)
        if static or setting("prefill_chunk_size") is not None:
            raise ValueError(
                f"{'A static cache' if static else '`prefill_chunk_size`'} with video tokens needs transformers 5.23 "
                "or later: before, Molmo2's vision tokens would silently attend causally. Upgrade, or leave it out."
            )

    # The forward pass.

    @can_return_tuple
    def get_video_features(
        self,
        pixel_values_videos: torch.Tensor,
        video_token_pooling: torch.Tensor | None = None,
        video_grids: torch.Tensor | None = None,
        *,
        pruning_ratio: float | None = None,
        with_temporal_loss: bool = False,
        **kwargs: Any,
    ) -> tuple | VideoFeatures:
        """Features of the kept blocks of each video; arguments as in `plan_videos`."""
        vision = dict(zip(self.video_inputs, (pixel_values_videos, video_token_pooling, video_grids), strict=True))
        return self.encode_call(vision, pruning_ratio, with_temporal_loss, **kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        mm_token_type_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        mm_encoder_outputs: dict[str, BaseModelOutputWithPooling] | None = None,
        *,
        pruning_ratio: float | None = None,
        pruned_length: int | None = None,
        packed_rows: bool | None = None,
        with_temporal_loss: bool = False,
        **kwargs: Any,
    ) -> tuple | STTSModelOutputWithPast:
        """
        As Molmo2's forward, whose arguments it takes by name. `pruning_ratio` replaces the config's for this call;
        `pruned_length` is the length `L'` that every row gets; `packed_rows` says whether rows hold several samples
        (None: where `position_ids` start over); `past_key_values` from an earlier call that dropped tokens
        continues it, in the caller's positions.
        """
        vision = self.take_vision_inputs(kwargs)
        check_names(kwargs)
        check_settings(pruning_ratio, pruned_length)
        if vision or mm_encoder_outputs:
            check_text_attention(self.config.text_config)
        tokens = Tokens(input_ids, inputs_embeds, attention_mask, position_ids, mm_token_type_ids)
        tokens.check_one_source()
        forget_marks(past_key_values, tokens.shape[1])
        shortens = self.video_inputs[0] in vision or needs_note(past_key_values, tokens)
        is_packed = packed_rows
        if packed_rows is None:
            is_packed = not shortens and holds_packed_rows(
                tokens, past_key_values, self.config.text_config, bool(vision)
            )
        if not shortens and not is_packed and pruned_length in (None, tokens.shape[1]):
            if self.image_inputs[0] in vision:
                check_tensors(vision, *self.image_inputs)
            if packed_rows is False and attention_mask is None and past_key_values is None:
                # Gaps in the positions, or those of padding, would look like packed samples.
                attention_mask = torch.ones(tokens.shape, dtype=torch.int64, device=tokens.device)
            outputs = super().forward(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                mm_token_type_ids=mm_token_type_ids,
                inputs_embeds=inputs_embeds,
                mm_encoder_outputs=mm_encoder_outputs,
                return_dict=True,
                **vision,
                **kwargs,
            )
            mark_cache(outputs.past_key_values, vision=bool(vision or mm_encoder_outputs))
            return STTSModelOutputWithPast(**outputs)
        check_exclusive(kwargs | {"mm_encoder_outputs": mm_encoder_outputs})
        pruned = self.prune(
            tokens, vision, past_key_values, pruning_ratio, pruned_length, packed_rows, with_temporal_loss
        )
        embeds = self.embed_pruned(pruned)
        outputs = super().forward(
            inputs_embeds=embeds,
            attention_mask=make_mask(self.config.text_config, pruned, embeds, past_key_values),
            position_ids=pruned.tokens.position_ids,
            past_key_values=past_key_values,
            mm_token_type_ids=pruned.tokens.mm_token_type_ids,
            return_dict=True,
            **kwargs,
        )
        if pruned.cached_after is not None and isinstance(outputs.past_key_values, Cache):
            pruned.cached_after.attach(outputs.past_key_values)
        mark_cache(outputs.past_key_values, vision=bool(pruned.features))
        result = STTSModelOutputWithPast(**outputs, **pruned.report)
        if pruned.features:
            result.image_hidden_states = pruned.features[0][1]  # the videos', where there are any
        return result

    def embed_pruned(self, pruned: PrunedInputs) -> torch.Tensor:
        """Embeddings (B, L', text hidden size) of what is left, with features added onto their placeholders."""
        embeds = pruned.tokens.inputs_embeds
        if embeds is None:
            embeds = self.get_input_embeddings()(pruned.tokens.input_ids)
        return add_features(embeds, pruned.features)


class STTSForConditionalGeneration(  # type: ignore[misc]  # the mixin names fewer arguments than Molmo2 does
    PruningHead, STTSGeneration, Molmo2ForConditionalGeneration, GenerationMixin
):
    """Molmo2 with video token pruning inside the ViT and the LLM; loads stock Molmo2 weights too."""

    config: STTSConfig
    model: STTSModel

    def __init__(self, config: STTSConfig):
        super(Molmo2ForConditionalGeneration, self).__init__(config)
        self.model = STTSModel(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.vocab_size = config.text_config.vocab_size
        self.model_tags = ["stts", "molmo2", "video", "token-pruning", "custom_code"]  # of the model card
        self.post_init()

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor], strict: bool = True, assign: bool = False) -> Any:
        """
        As in PyTorch; tensors named as in the files that `save_pretrained` writes are taken too. `Trainer` passes
        such tensors to resume and to load the best model; without this it would keep its weights and only warn. The
        scorer's keep their precision, which is higher than the model's where it alone is trained.
        """
        if any(name.startswith(RELEASED_NAMES) for name in state_dict):
            found: Any = type(self).from_pretrained(
                None, config=copy.deepcopy(self.config), state_dict=dict(state_dict), output_loading_info=True
            )
            loaded, info = found
            scorer = {name.rpartition(SCORER)[2]: tensor for name, tensor in state_dict.items() if SCORER in name}
            state_dict = {n: tensor for n, tensor in loaded.state_dict().items() if n not in info["missing_keys"]}
            state_dict |= {name: scorer[name.rpartition(SCORER)[2]] for name in state_dict if SCORER in name}
        return super().load_state_dict(state_dict, strict, assign)

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """As in transformers. Offloaded and quantised weights keep their native names: released ones fuse several."""
        places = getattr(self, "hf_device_map", {}).values()
        if "cpu" in places or "disk" in places or getattr(self, "hf_quantizer", None) is not None:
            kwargs["save_original_format"] = False
        super().save_pretrained(save_directory, *args, **kwargs)

    @can_return_tuple
    def forward(  # type: ignore[misc]  # transformers' own signatures name `position_ids` twice, too
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
        *,
        pruning_ratio: float | None = None,
        pruned_length: int | None = None,
        packed_rows: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple | STTSCausalLMOutputWithPast:
        """
        As Molmo2's forward, on the sequence that is left when the placeholders of dropped blocks are gone.

        Args:
            labels: (B, L) like the caller's sequence, as are `shift_labels` in their place.
            logits_to_keep: counts in the sequence that is left.
            pruning_ratio: `k` in [0, 1] in place of the config's, for this call.
            pruned_length: the length `L'` that every row gets, shorter ones by filler where the batch is padded, so
                that all steps of a training have one shape; for calls without a cache.
            packed_rows: whether rows hold several samples; None looks where `position_ids` start over, which forces a
                host-device sync.
            kwargs: of the native forward.

        Raises:
            ValueError: inputs do not fit.
        """
        tokens = Tokens(input_ids, inputs_embeds, attention_mask, position_ids)
        targets = check_targets(tokens, labels=labels, shift_labels=kwargs.pop("shift_labels", None))
        outputs: STTSModelOutputWithPast = self.model(
            input_ids=input_ids,
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
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            mm_encoder_outputs=mm_encoder_outputs,
            pruning_ratio=pruning_ratio,
            pruned_length=pruned_length,
            packed_rows=packed_rows,
            with_temporal_loss=bool(targets) or self.training,
            return_dict=True,
            **kwargs,
        )
        fields = self.read_out(outputs, tokens, targets, logits_to_keep, past_key_values, packed_rows, **kwargs)
        return STTSCausalLMOutputWithPast(image_hidden_states=outputs.image_hidden_states, **fields)


# Without these, original Molmo2 weights would load into random parameters with no more than a warning: transformers
# renames keys only for model types it knows.
register_checkpoint_conversion_mapping("stts", get_checkpoint_conversion_mapping("molmo2"), overwrite=True)

STTSForConditionalGeneration.register_for_auto_class("AutoModel")

__all__ = ["STTSForConditionalGeneration", "STTSModel", "STTSVisionModel"]
