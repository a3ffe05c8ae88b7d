"""Shared by backbones whose tower takes frames in raster, and whose text is causal with one position per token.

Images and videos share a placeholder: `mm_token_type_ids` tell them apart. The native `forward` gets `inputs_embeds`
with features in place of the placeholders' embeddings, native `generate` gets them as `mm_encoder_outputs` of images.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, ClassVar

import torch

from .cache_stts import CacheRecord
from .plan_stts import VideoFeatures, check_finite, check_grids, check_tensors
from .pruning_stts import Call, PrunedInputs, PruningBackbone
from .raster_tower_stts import RasterPlan
from .sequence_stts import IMAGE, VIDEO, Tokens
from .vision_tokens_stts import MASKED_TEXT_ATTENTION, add_features, encoder_outputs, make_mask


class CausalBackbone(PruningBackbone):
    """
    Mixin for the model without a head.

    tower_name: name of the `RasterTower` module. block_side: `w`, the side of a block in patches.
    """

    tower_name: ClassVar[str]
    block_side: int
    video_inputs = ("pixel_values_videos", "video_grids")
    image_inputs: tuple[str, ...] = ("pixel_values",)
    vision_is_causal = True

    def connect(self, features: torch.Tensor) -> torch.Tensor:
        """Hook: tokens (K, text hidden size) of kept blocks, whose patches (K, w^2, D) lie row by row."""
        raise NotImplementedError

    def find_placeholders(
        self, input_ids: torch.Tensor, vision: Collection[str], types: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Masks (B, L) of video and image placeholders. With both in a call and no types (B, L), all are images'."""
        with_videos, with_images = (name in vision for name in self.pixels)
        placeholders = input_ids == self.config.image_token_id
        is_video = torch.full_like(placeholders, not with_images)
        if with_videos and with_images and types is not None:
            is_video = types == VIDEO
        return placeholders & is_video, placeholders & ~is_video

    def resume(self, call: Call) -> tuple[CacheRecord, torch.Tensor, Tokens]:
        """As in `PruningBackbone`. Raises `ValueError` too where nothing tells images from videos."""
        if call.tokens.mm_token_type_ids is None and all(name in call.vision for name in self.pixels):
            raise ValueError(
                f"`mm_token_type_ids` is None, but `{'` and `'.join(self.pixels)}` share a placeholder in the text. "
                f"Pass it with {VIDEO} for placeholders of videos, {IMAGE} for those of images and 0 elsewhere, as the "
                "processor returns it."
            )
        return super().resume(call)

    def plan_videos(self, vision: dict[str, Any]) -> RasterPlan:
        """
        vision: pixel_values_videos (F, channels, height, width) frames of all videos, video_grids (V, 3) = (T, rows,
        cols) in blocks. Raises `ValueError` where they do not fit each other or the config.
        """
        of_pixels, of_grids = self.video_inputs
        pixel_values, video_grids = check_tensors(vision, of_pixels, of_grids)
        grids, config, side = check_grids(of_grids, video_grids), self.config.vision_config, self.block_side
        num_frames, sizes = sum(frames for frames, _, _ in grids), as_pair(config.image_size)
        rows, cols = (size // patch // side for size, patch in zip(sizes, as_pair(config.patch_size), strict=True))
        shape = (num_frames, config.num_channels, *sizes)
        if tuple(pixel_values.shape) != shape or any(grid[1:] != (rows, cols) for grid in grids):
            raise ValueError(
                f"`{of_pixels}` has shape {tuple(pixel_values.shape)} and `{of_grids}` is {grids}, but by "
                f"`vision_config` these {num_frames} frames are {shape}, each with {rows} rows and {cols} columns of "
                "blocks. The sizes in the processor must be the config's."
            )
        check_finite(pixel_values)
        patches = torch.arange(num_frames * rows * cols * side**2, device=pixel_values.device)
        by_block = patches.view(num_frames * rows, side, cols, side).transpose(1, 2)
        return RasterPlan(by_block.reshape(-1, side**2), grids)

    def encode_videos(self, pixel_values: torch.Tensor, plan: RasterPlan, **kwargs: Any) -> VideoFeatures:
        """Scores the blocks of all frames, drops what the plan says and makes tokens of the rest."""
        vision = self.get_submodule(self.tower_name)(pixel_values, plan, **kwargs)
        return vision.connected(self.connect(vision.features), plan)

    def check_gaps(self, pruned: PrunedInputs, in_chunks: bool = False) -> None:
        """Raises `ValueError` where flash attention would take gaps in positions behind a cache for packed samples."""
        tokens, implementation = pruned.tokens, self.config.text_config._attn_implementation
        behind = tokens.padding_mask is not None and tokens.padding_mask.shape[1] > tokens.shape[1]
        if pruned.features and (behind or in_chunks) and implementation not in MASKED_TEXT_ATTENTION:
            raise ValueError(
                f"`attn_implementation` {implementation!r} of the text model cannot read a pruned video behind a cache "
                "or in chunks of a prompt: it would take dropped tokens for the ends of samples. Use 'sdpa' there."
            )

    def merge(self, call: Call, pruned: PrunedInputs) -> dict[str, Any]:
        """Features take the place of their placeholders' embeddings. Raises `ValueError` for rows it cannot part."""
        self.check_gaps(pruned)
        tokens, text_config = pruned.tokens, self.config.text_config
        embeds, mask = self.get_input_embeddings()(tokens.input_ids), tokens.attention_mask
        for placeholders, _ in pruned.features:
            embeds = embeds.masked_fill(placeholders[..., None].to(embeds.device), 0)
        embeds = add_features(embeds, pruned.features)
        if tokens.sample_ids is not None:
            if text_config._attn_implementation not in MASKED_TEXT_ATTENTION:
                raise ValueError(
                    f"`attn_implementation` {text_config._attn_implementation!r} of the text model cannot part the "
                    "samples of a row, which `position_ids` may hold. Use 'sdpa' or 'flex_attention', or pass "
                    "`packed_rows=False` where each row is one sample."
                )
            causal = replace(pruned, tokens=replace(tokens, mm_token_type_ids=None))
            mask = make_mask(text_config, causal, embeds, call.cache)
        return tokens.arguments | {"input_ids": None, "inputs_embeds": embeds, "attention_mask": mask}

    def merge_rows(self, pruned: PrunedInputs, setting: Callable[[str], Any]) -> dict[str, Any]:
        """Videos' features with images', since they share a placeholder."""
        self.check_gaps(pruned, in_chunks=setting("prefill_chunk_size") is not None)
        return encoder_outputs(pruned, "image")


def as_pair(size: Any) -> tuple[int, int]:
    """Height and width of a config's field, which may be one number for both."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])
