"""STTS on Molmo2: `STTSModel` sends videos through the pruning tower and shortens the LLM's sequence accordingly;
`STTSForConditionalGeneration` adds head, losses and `generate`.

With videos a call goes through `PruningBackbone.prune`; without, it is native Molmo2's, unless rows are packed or get a
length.
"""

import os
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.models.molmo2.modeling_molmo2 import (
    Molmo2ForConditionalGeneration,
    Molmo2Model,
    Molmo2ModelOutputWithPast,
    Molmo2TextModel,
)

from .cache_stts import UNKNOWN_VISION, CacheRecord
from .configuration_stts import STTSConfig
from .outputs_stts import PruningHead
from .plan_stts import VideoFeatures, check_tensors
from .pruning_stts import Call, PrunedInputs, PruningBackbone
from .raster_tower_stts import RasterOutput, RasterPlan
from .vision_stts import STTSAdapter, STTSVisionModel, check_video_inputs
from .vision_tokens_stts import (
    MASKED_TEXT_ATTENTION,
    add_features,
    encoder_outputs,
    make_mask,
    pad_types,
    placeholders_of_videos,
)

if TYPE_CHECKING:
    # Never imported. transformers saves every module named here, so a saved model carries the processor's code.
    from .processing_stts import STTSProcessor  # noqa: F401

RELEASED_NAMES = ("model.transformer.", "model.vision_backbone.")  # how names begin in Molmo2's files and in ours


class STTSModel(PruningBackbone, Molmo2Model):
    """Molmo2 without a head; drops the lowest-scored blocks of videos."""

    config: STTSConfig
    native = Molmo2Model
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

    def native_forward(self, **arguments: Any) -> Molmo2ModelOutputWithPast:
        ids, cache = arguments["input_ids"], arguments["past_key_values"]
        if ids is not None:
            types = pad_types(arguments["mm_token_type_ids"], cache, ids.shape[1])
            arguments["mm_token_type_ids"] = types
        return Molmo2Model.forward(self, **arguments)

    def read_call(self, call: Call, kwargs: dict[str, Any]) -> None:
        """As in `PruningBackbone`, with what native Molmo2 would get wrong without a word."""
        super().read_call(call, kwargs)
        if call.vision or kwargs.get("mm_encoder_outputs"):
            check_text_attention(self.config.text_config)
        if self.image_inputs[0] in call.vision:
            check_tensors(call.vision, *self.image_inputs)
        tokens, implementation = call.tokens, self.config.text_config._attn_implementation
        if call.packed_rows and not call.vision and implementation not in MASKED_TEXT_ATTENTION:
            if tokens.shape[0] > 1 or tokens.attention_mask is not None:
                raise ValueError(
                    f"`position_ids` start over, so rows are packed, which `attn_implementation` {implementation!r} "
                    "supports only in a batch of one row without `attention_mask`. Use 'sdpa' or 'flex_attention' for "
                    "the text model."
                )
            call.packed_rows = False  # flash attention goes by the positions itself

    def find_placeholders(
        self, input_ids: torch.Tensor, vision: Collection[str], types: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Placeholders of videos and of images, (B, L) each; Molmo2 has one id for both."""
        config, placeholders = self.config, input_ids == self.config.image_patch_id
        if self.image_inputs[0] not in vision:
            return placeholders, torch.zeros_like(placeholders)
        if self.video_inputs[0] not in vision:
            return torch.zeros_like(placeholders), placeholders
        frame_starts, image_starts = (
            input_ids == token for token in (config.frame_start_token_id, config.image_start_token_id)
        )
        # Where the processor wraps frames in an image's tokens (`use_frame_special_tokens=False`, as the released
        # models do), a frame's start follows its timestamp, while an image's large view directly follows the end of
        # its small one.
        follows_end = nn.functional.pad(input_ids[:, :-1] == config.image_end_token_id, (1, 0))
        frame_starts = torch.where(frame_starts.any(), frame_starts, image_starts & ~follows_end)
        image_starts = (image_starts & ~frame_starts) | (input_ids == config.low_res_image_start_token_id)
        videos = placeholders_of_videos(placeholders, frame_starts, image_starts)
        return videos, placeholders & ~videos

    def plan_videos(self, vision: dict[str, Any]) -> RasterPlan:
        """
        vision: pixel_values_videos (F, N, pixels) frames of all videos, video_token_pooling
        (G, S) patches of each block, -1 for padding, video_grids (V, 3) = (T, rows, cols). Raises `ValueError` where
        they do not fit each other.
        """
        self.config.validate_vision_config()
        grids = check_video_inputs(vision, self.config.vision_config)
        num_layers = self.config.vision_config.num_hidden_layers
        return RasterPlan(
            vision["video_token_pooling"].to(vision["pixel_values_videos"].device).long(),
            grids,
            feature_layers=[layer % num_layers for layer in self.config.adapter_config.vision_feature_layer or ()],
        )

    def encode_videos(self, pixel_values: torch.Tensor, plan: RasterPlan, **kwargs: Any) -> VideoFeatures:
        """Scores the blocks of all frames (F, N, pixels), drops what the plan says and pools the rest."""
        if pixel_values.dim() == 4:
            pixel_values = pixel_values.flatten(0, 1)
        vision: RasterOutput = self.vision_tower(pixel_values, plan, **kwargs)
        return vision.connected(self.multi_modal_projector(vision.features, valid=vision.valid).last_hidden_state, plan)

    def count_image_tokens(self, vision: dict[str, Any]) -> list[int]:
        """Those of the small view and of the crops."""
        *_, grids = check_tensors(vision, *self.image_inputs)
        return (grids[:, 0] * grids[:, 1] + grids[:, 2] * grids[:, 3]).tolist()

    def merge(self, call: Call, pruned: PrunedInputs) -> dict[str, Any]:
        """Features are added onto the embeddings of their placeholders."""
        tokens, embeds = pruned.tokens, self.embed_pruned(pruned)
        mask = make_mask(self.config.text_config, pruned, embeds, call.cache)
        return tokens.arguments | {"input_ids": None, "inputs_embeds": embeds, "attention_mask": mask}

    def merge_rows(self, pruned: PrunedInputs, setting: Callable[[str], Any]) -> dict[str, Any]:
        """Images' and videos' features as one modality, since they share a placeholder."""
        merged = encoder_outputs(pruned, "video")
        chunk_size, types = setting("prefill_chunk_size"), pruned.tokens.mm_token_type_ids
        if chunk_size is not None and types is not None:  # no chunk may end between tokens that attend both ways
            merged["prefill_chunk_size"] = max(chunk_size, *types.any(0).nonzero()[-1:, 0].add(1).tolist(), 1)
        return merged

    def embed_pruned(self, pruned: PrunedInputs) -> torch.Tensor:
        """Embeddings (B, L', text hidden size) of what is left, with features added onto their placeholders."""
        return add_features(self.get_input_embeddings()(pruned.tokens.input_ids), pruned.features)

    def check_new_vision(self, cache: Cache | None, arguments: Collection[str]) -> None:
        record, pixels = CacheRecord.of(cache), [name for name in self.pixels if name in arguments]
        if not pixels or record is None:
            return
        if bool(((record.token_ids == self.config.image_patch_id) | (record.token_ids == UNKNOWN_VISION)).any()):
            raise ValueError(
                f"`{pixels[0]}` came with `past_key_values` that hold a video or image already. Vision tokens attend "
                "to each other in both directions, so the cached ones would not be the same. Leave out what the cache "
                "has seen; for anything new, pass the whole conversation with all its videos and images again, without "
                "`past_key_values`."
            )

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


class STTSForConditionalGeneration(  # type: ignore[misc]  # the mixin names fewer arguments than Molmo2 does
    PruningHead, Molmo2ForConditionalGeneration, GenerationMixin
):
    """Molmo2 with video token pruning inside the ViT and the LLM; loads stock Molmo2 weights too."""

    config: STTSConfig
    model: STTSModel
    native = Molmo2ForConditionalGeneration
    backbone = STTSModel

    def __init__(self, config: STTSConfig):
        super().__init__(config)
        self.register_load_state_dict_post_hook(refuse_saved_names)

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """As in transformers. Offloaded and quantised weights keep their native names: released ones fuse several."""
        places = getattr(self, "hf_device_map", {}).values()
        if "cpu" in places or "disk" in places or getattr(self, "hf_quantizer", None) is not None:
            kwargs["save_original_format"] = False
        super().save_pretrained(save_directory, *args, **kwargs)

    @staticmethod
    def create_masks_for_generate(
        config: Any,
        inputs_embeds: torch.Tensor,
        attention_mask: torch.Tensor | None,
        past_key_values: Cache | None,
        position_ids: torch.Tensor | None,
        mm_token_type_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """As in Molmo2, with the types of new tokens in their columns of the cache."""
        types = pad_types(mm_token_type_ids, past_key_values, inputs_embeds.shape[1])
        return Molmo2ForConditionalGeneration.create_masks_for_generate(
            config, inputs_embeds, attention_mask, past_key_values, position_ids, types, **kwargs
        )


def check_text_attention(text_config: PreTrainedConfig) -> None:
    """Raises `ValueError` for a text attention that would silently be causal among the vision tokens."""
    implementation = text_config._attn_implementation
    if implementation not in MASKED_TEXT_ATTENTION:
        raise ValueError(
            f"`attn_implementation` is {implementation!r} for the text model, but Molmo2's vision tokens attend to "
            "each other in both directions, which it cannot express. Use 'sdpa' or 'flex_attention' there, for example "
            "attn_implementation={'text_config': 'sdpa', 'vision_config': 'flash_attention_2'}."
        )


def refuse_saved_names(model: nn.Module, incompatible: Any) -> None:
    """Raises `RuntimeError` for names of a checkpoint's files, which `load_state_dict(strict=False)` passes over."""
    saved = [name for name in incompatible.unexpected_keys if name.startswith(RELEASED_NAMES)]
    if saved:
        raise RuntimeError(
            f"`state_dict` has names of Molmo2's files, such as {saved[0]!r}, which the model's modules do not have. "
            "Load the folder with `from_pretrained`; to resume, use `STTSTrainer`, or call "
            "`stts_hf.training.checkpointing.accept_saved_names(model)` before."
        )


__all__ = ["STTSForConditionalGeneration", "STTSModel", "STTSVisionModel"]
