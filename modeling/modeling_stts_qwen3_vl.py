"""STTS on Qwen3-VL: `STTSQwen3VLModel` sends videos through the pruning tower and shortens the LLM's sequence
accordingly; `STTSQwen3VLForConditionalGeneration` adds head, losses and `generate`.

With videos or images a call goes `plan -> encode (score, bias, drop) -> drop placeholders -> native forward`, else
natively. Positions come from the prompt or the cache's note, never from `rope_deltas`, which others may change.
"""

import math
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import GenerationMixin
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    BaseModelOutputWithDeepstackFeatures,
    Qwen3VLForConditionalGeneration,
    Qwen3VLModel,
    Qwen3VLTextModel,
)
from transformers.utils import can_return_tuple
from transformers.utils.generic import is_flash_attention_requested

from .checks_stts import check_exclusive, check_finite, check_grids, check_settings, check_tensors, holds_packed_rows
from .configuration_stts_qwen3_vl import STTSQwen3VLConfig
from .generation_stts import STTSGeneration
from .outputs_stts import PruningCausalLMOutputWithPast, PruningHead, PruningModelOutputWithPast, check_targets
from .pruning_stts import PrunedInputs, PruningBackbone, PruningPlan, VideoFeatures
from .sequence_stts import CachedPrompt, Tokens, ordered_positions, samples_as_rows, token_order
from .vision_stts_qwen3_vl import STTSQwen3VLVisionModel

IMAGE, VIDEO = 1, 2  # in `mm_token_type_ids`
NATIVE_OUTPUTS = ("last_hidden_state", "past_key_values", "hidden_states", "attentions")


class STTSQwen3VLModel(PruningBackbone, Qwen3VLModel):
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
    video_inputs = ("pixel_values_videos", "video_grid_thw")
    image_inputs = ("pixel_values", "image_grid_thw")
    num_axes = 3  # time, height, width
    vision_is_causal = True

    def __init__(self, config: STTSQwen3VLConfig):
        # Skips Qwen3VLModel.__init__, which would build a second vision tower and language model.
        super(Qwen3VLModel, self).__init__(config)
        self.visual = STTSQwen3VLVisionModel(config.vision_config)
        self.language_model = Qwen3VLTextModel(config.text_config)
        self.rope_deltas = None
        self.post_init()

    def find_placeholders(self, tokens: Tokens, with_videos: bool, with_images: bool) -> tuple[torch.Tensor, ...]:
        """Placeholders of videos and of images, (B, L) each."""
        places = [self.find_token(tokens, name) for name in (self.config.video_token_id, self.config.image_token_id)]
        return places[0] & with_videos, places[1] & with_images

    def read_grids(self, vision: dict[str, Any], names: tuple[str, ...]) -> list[tuple[int, int, int]]:
        """
        The grid `(T, rows, cols)` of each video or image in blocks, on the host; raises `ValueError` or `TypeError`
        where pixels (patches, values) and grids (V, 3) in patches do not fit each other or the config.
        """
        pixel_values, grid_thw = check_tensors(vision, *names)
        grids, side = check_grids(names[1], grid_thw), self.visual.spatial_merge_size
        if any(rows % side or cols % side for _, rows, cols in grids):
            raise ValueError(
                f"`{names[1]}` is {grids}, but rows and columns must be multiples of `spatial_merge_size` = {side}, "
                "which must be the processor's `merge_size`."
            )
        expected = (sum(map(math.prod, grids)), self.visual.patch_embed.proj.weight[0].numel())
        if tuple(pixel_values.shape) != expected:
            raise ValueError(
                f"`{names[0]}` has shape {tuple(pixel_values.shape)}, but `{names[1]}` and the vision config make it "
                f"{expected}: patches, and values of a patch."
            )
        return [(frames, rows // side, cols // side) for frames, rows, cols in grids]

    def plan_videos(
        self, vision: dict[str, Any], pruning_ratio: float | None = None, with_temporal_loss: bool = False
    ) -> PruningPlan:
        """
        What stays of each video. vision: pixel_values_videos (F * N, values of a patch), block by block, of tubelets of
        all videos; video_grid_thw (V, 3) in patches. Raises `ValueError` where they do not fit each other.
        """
        grids, pixels = self.read_grids(vision, self.video_inputs), vision["pixel_values_videos"]
        check_finite(pixels)
        return PruningPlan(
            torch.arange(len(pixels), device=pixels.device).view(-1, self.visual.spatial_merge_unit),
            grids,
            self.config.vision_config.pruning_ratio if pruning_ratio is None else pruning_ratio,
            with_temporal_loss=with_temporal_loss,
            detach_temporal_target=self.config.detach_temporal_target,
        )

    def encode_videos(self, pixel_values: torch.Tensor, plan: PruningPlan, **kwargs: Any) -> VideoFeatures:
        """Scores the blocks of all tubelets, drops what the plan says and merges the rest into tokens."""
        return self.visual(pixel_values.to(self.visual.dtype), pruning=plan, **kwargs)

    def encode_images(self, vision: dict[str, Any]) -> BaseModelOutputWithPooling:
        """All images of a call, as the native model does."""
        self.read_grids(vision, self.image_inputs)
        return self.get_image_features(*(vision[name] for name in self.image_inputs), return_dict=True)

    def merge_inputs(self, pruned: PrunedInputs) -> dict[str, Any]:
        """Features and deepstack features for the native forward, which scatters them."""
        encoded: dict[str, Any] = {"video": pruned.video, "image": pruned.images}
        there = [(name, encoded[name]) for name in encoded if encoded[name] is not None]
        outputs = {}
        for (name, of), (placeholders, features) in zip(there, pruned.features, strict=True):
            counts = placeholders.sum(-1).tolist()
            taps: Any = [list(torch.cat(list(tap)).split(counts)) for tap in of.deepstack_features]
            by_row: Any = list(features.split(counts))
            outputs[name] = BaseModelOutputWithDeepstackFeatures(pooler_output=by_row, deepstack_features=taps)
        return {"mm_encoder_outputs": outputs} if outputs else {}

    def position_tokens(
        self, tokens: Tokens, cached: CachedPrompt, whole_mask: torch.Tensor | None, vision: dict[str, Any]
    ) -> torch.Tensor:
        """
        Native positions (3, B, L) of the whole prompt, counted anew in each sample of a row; positions of the caller
        that have three axes are taken as they are. Without images and videos, (B, L). Raises `ValueError` where
        `mm_token_type_ids` are missing or not those of the placeholders.
        """
        given, types = tokens.position_ids, tokens.mm_token_type_ids
        if not vision or (given is not None and given.dim() == 3):
            return super().position_tokens(tokens, cached, whole_mask, vision)
        if types is None:
            raise ValueError(
                "`mm_token_type_ids` is None, but positions beside images and videos need it; pass all that the "
                "processor returns, or `position_ids` (3, batch, length)."
            )
        found = self.find_placeholders(tokens, self.video_inputs[0] in vision, self.image_inputs[0] in vision)
        expected = VIDEO * found[0].long() + IMAGE * found[1].long()
        if not torch.equal(types.long(), expected):
            raise ValueError(
                f"`mm_token_type_ids` must be {VIDEO} for placeholders of videos, {IMAGE} for those of images and 0 "
                f"elsewhere, but {int((types != expected).sum())} tokens differ; pass what the processor returns."
            )
        rows, masks = samples_as_rows(expected, tokens.sample_ids, tokens.padding_mask)
        rope: Any = self.get_rope_index  # which says `LongTensor`
        grids = [vision.get(names[1]) for names in (self.image_inputs, self.video_inputs)]
        positions, _ = rope(expected[rows], expected[rows], *grids, masks)
        of_rows = positions.new_zeros(self.num_axes, *expected.shape)
        of_rows.index_add_(1, torch.tensor(rows, device=positions.device), positions)
        return of_rows + cached.next_position

    @can_return_tuple
    def get_video_features(
        self,
        pixel_values_videos: torch.Tensor,
        video_grid_thw: torch.Tensor | None = None,
        pruning_ratio: float | None = None,
        with_temporal_loss: bool = False,
        **kwargs: Any,
    ) -> tuple | VideoFeatures:
        """Features of the kept blocks of each video; arguments as in `plan_videos`."""
        check_settings(pruning_ratio)
        vision = dict(zip(self.video_inputs, (pixel_values_videos, video_grid_thw), strict=True))
        plan = self.plan_videos(vision, pruning_ratio, with_temporal_loss)
        return self.encode_videos(pixel_values_videos, plan, **kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        mm_token_type_ids: torch.Tensor | None = None,
        mm_encoder_outputs: dict[str, BaseModelOutputWithPooling] | None = None,
        pruning_ratio: float | None = None,
        pruned_length: int | None = None,
        packed_rows: bool | None = None,
        with_temporal_loss: bool = False,
        **kwargs: Any,
    ) -> tuple | PruningModelOutputWithPast:
        """
        As Qwen3-VL's forward. pruning_ratio: in place of the config's. pruned_length: the length `L'` that every row
        gets. packed_rows: whether rows hold several samples, which then fill no cache (None: where `position_ids`
        (B, L), or the first of (4, B, L), start over). past_key_values: of an earlier call, which this one continues.
        """
        grids = {names[1]: kwargs.get(names[1]) for names in (self.video_inputs, self.image_inputs)}
        vision = self.take_vision_inputs(kwargs)
        check_settings(pruning_ratio, pruned_length)
        tokens = Tokens(input_ids, inputs_embeds, attention_mask, position_ids, mm_token_type_ids)
        tokens.check_one_source()
        if packed_rows is None:
            ordered = replace(tokens, position_ids=token_order(position_ids, self.num_axes))
            packed_rows = holds_packed_rows(ordered, past_key_values, self.config.text_config, bool(vision))
        extra: dict[str, Any] = {
            "mm_token_type_ids": mm_token_type_ids,
            "mm_encoder_outputs": mm_encoder_outputs,
            **grids,
        }
        pruned = None
        noted = CachedPrompt.of(past_key_values) is not None
        if vision or noted or packed_rows or pruned_length not in (None, tokens.shape[1]):
            check_exclusive(mm_encoder_outputs, kwargs)
            pruned = self.prune(
                tokens, vision, past_key_values, pruning_ratio, pruned_length, packed_rows, with_temporal_loss
            )
            tokens, extra = pruned.tokens, self.merge_inputs(pruned)
            if packed_rows:
                tokens, extra["use_cache"] = self.part_samples(tokens, past_key_values), False
        elif position_ids is None and (past_key_values is None or past_key_values.get_seq_length() == 0):
            self.rope_deltas = None  # of another call
        ids, embeds, mask = tokens.input_ids, tokens.inputs_embeds, tokens.attention_mask
        outputs = super().forward(
            ids, mask, tokens.position_ids, past_key_values, embeds, return_dict=True, **(kwargs | extra)
        )
        if pruned is not None and pruned.cached_after is not None and isinstance(outputs.past_key_values, Cache):
            pruned.cached_after.attach(outputs.past_key_values)
        report = {name: outputs.get(name) for name in NATIVE_OUTPUTS} | (pruned.report if pruned else {})
        return PruningModelOutputWithPast(**report)

    def part_samples(self, left: Tokens, past_key_values: Cache | None) -> Tokens:
        """
        What tells the native model samples of a row apart: neither mask nor cache, but positions (4, B, L'), of which
        the first counts from 0 in each sample, and is 0 in filler, which so parts from everything.
        """
        flash = is_flash_attention_requested(self.config.text_config)
        if left.sample_ids is None or past_key_values is not None or (flash and left.shape[0] > 1):
            raise ValueError(
                "Several samples in a row need `position_ids` that start over, fill no cache, and with flash attention "
                "are told apart in a batch of one row alone: leave out `past_key_values`, or use 'sdpa'."
            )
        return replace(left, position_ids=ordered_positions(left, self.num_axes), attention_mask=None)


class STTSQwen3VLForConditionalGeneration(
    PruningHead, STTSGeneration, Qwen3VLForConditionalGeneration, GenerationMixin
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
        mm_encoder_outputs: dict[str, BaseModelOutputWithPooling] | None = None,
        pruning_ratio: float | None = None,
        pruned_length: int | None = None,
        packed_rows: bool | None = None,
        **kwargs: Any,
    ) -> tuple | PruningCausalLMOutputWithPast:
        """
        As Qwen3-VL's forward, on the sequence that is left when the placeholders of dropped blocks are gone.

        pruning_ratio, pruned_length, packed_rows: as in `STTSQwen3VLModel`. labels (or shift_labels): (B, L) like the
        caller's sequence. logits_to_keep counts in the sequence that is left. Raises `ValueError` for unfit inputs.
        """
        tokens = Tokens(input_ids, inputs_embeds, attention_mask, token_order(position_ids, self.model.num_axes))
        targets = check_targets(tokens, labels=labels, shift_labels=kwargs.pop("shift_labels", None))
        text = (input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, mm_token_type_ids)
        settings = (mm_encoder_outputs, pruning_ratio, pruned_length, packed_rows, bool(targets) or self.training)
        pixels = (pixel_values_videos, video_grid_thw, pixel_values, image_grid_thw)
        vision = dict(zip(self.model.video_inputs + self.model.image_inputs, pixels, strict=True))
        outputs = self.model(*text, *settings, return_dict=True, **vision, **kwargs)
        fields = self.read_out(outputs, tokens, targets, logits_to_keep, past_key_values, packed_rows, **kwargs)
        return PruningCausalLMOutputWithPast(**fields)


STTSQwen3VLForConditionalGeneration.register_for_auto_class("AutoModel")

__all__ = ["STTSQwen3VLForConditionalGeneration", "STTSQwen3VLModel", "STTSQwen3VLVisionModel"]
