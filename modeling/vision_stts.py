"""Molmo2's vision tower and connector with token scoring; `raster_tower_stts` has the tower's `forward`."""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.molmo2.modeling_molmo2 import Molmo2Adapter, Molmo2VisionEncoderLayer, Molmo2VisionModel

from .attention_stts import AttentionSpans
from .configuration_stts import STTSVisionConfig
from .plan_stts import check_finite, check_grids, check_tensors
from .raster_tower_stts import RasterSpanLayer, RasterTower

# Per call of the connector: kernels put the batch into a dimension of CUDA's grid, which has this limit.
MAX_GRID_BLOCKS = 65535


def check_video_inputs(vision: dict[str, Any], vision_config: STTSVisionConfig) -> list[tuple[int, int, int]]:
    """
    Returns the grid `(T, rows, cols)` of each video, on the host; raises `ValueError` or `TypeError` where frames
    (F, N, pixels), pooling and grids do not fit each other.
    """
    pixel_values_videos, video_token_pooling, video_grids = check_tensors(
        vision, "pixel_values_videos", "video_token_pooling", "video_grids"
    )
    grids = check_grids("video_grids", video_grids)
    pixels = vision_config.patch_size**2 * vision_config.num_channels
    expected = (int(vision_config.num_position_embeddings or 0), pixels)
    if pixel_values_videos.dim() == 4:
        pixel_values_videos = pixel_values_videos.flatten(0, 1)
    if pixel_values_videos.dim() != 3 or tuple(pixel_values_videos.shape[1:]) != expected:
        raise ValueError(
            f"`pixel_values_videos` has shape {tuple(pixel_values_videos.shape)}, but must be (frames, "
            f"{expected[0]}, {expected[1]}): patches of a frame and values of a patch by `vision_config`."
        )
    num_frames = sum(frames for frames, _, _ in grids)
    if num_frames != pixel_values_videos.shape[0]:
        found = pixel_values_videos.shape[0]
        advice = (
            " `pipeline(batch_size=...)` keeps one frame of each video: leave it at 1." if found == len(grids) else ""
        )
        raise ValueError(f"`video_grids` counts {num_frames} frames, but `pixel_values_videos` holds {found}.{advice}")
    num_blocks = sum(frames * rows * cols for frames, rows, cols in grids)
    window = vision_config.pooling_size[0] * vision_config.pooling_size[1]
    if tuple(video_token_pooling.shape) != (num_blocks, window):
        raise ValueError(
            f"`video_token_pooling` has shape {tuple(video_token_pooling.shape)}, but `video_grids` and "
            f"`vision_config.pooling_size` = {vision_config.pooling_size} make it ({num_blocks}, {window}). The video "
            "processor's `pooling_size` must equal the config's."
        )
    if video_token_pooling.device.type == "cpu":
        lowest, highest = (int(bound) for bound in video_token_pooling.aminmax())
        if lowest < -1 or highest >= num_frames * expected[0]:
            raise ValueError(
                f"`video_token_pooling` goes from {lowest} to {highest}, but must hold rows of the "
                f"{num_frames * expected[0]} patches in `pixel_values_videos`, or -1 for padding."
            )
    check_finite(pixel_values_videos)
    return grids


def first_fit_descending(lengths: list[int], capacity: int) -> list[list[int]]:
    """
    Paper Algorithm 1: frames, longest first, each into the first bin with room for it. Returns the frames of each bin;
    those without patches are in none. No frame may be longer than the `capacity`.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for frame in sorted(range(len(lengths)), key=lambda frame: -lengths[frame]):
        if lengths[frame] == 0:
            break
        fitting = next((number for number, free in enumerate(room) if free >= lengths[frame]), len(bins))
        if fitting == len(bins):
            bins.append([])
            room.append(capacity)
        bins[fitting].append(frame)
        room[fitting] -= lengths[frame]
    return bins


class STTSVisionEncoderLayer(RasterSpanLayer, Molmo2VisionEncoderLayer):
    """Native layer, and beside it attention within the frames of videos."""


class STTSVisionModel(RasterTower, Molmo2VisionModel):
    """Molmo2's ViT, which for videos scores blocks after layer `pruning_layer` and drops the lowest."""

    config: STTSVisionConfig
    layer = STTSVisionEncoderLayer
    _no_split_modules: ClassVar[list[str]] = ["STTSVisionEncoderLayer", "TokenScorer"]  # type: ignore[misc]

    def add_context(self, slots: torch.Tensor, spans: AttentionSpans, valid: torch.Tensor | None) -> torch.Tensor:
        """
        With `refill_single_frame_bins` also all slots of each frame that is alone in its bin, as in the released code.
        valid: (G, S) bool or None, False for padding, which takes no room in a bin. Forces a host-device sync.
        """
        if not self.config.refill_single_frame_bins:
            return slots
        bounds = spans.cu_seqlens_k.long()
        kept = torch.zeros(int(bounds[-1]), dtype=torch.bool, device=slots.device).index_fill(0, slots, True)
        usable = torch.ones_like(kept) if valid is None else valid.flatten()
        whole, left = F.pad(torch.stack([usable, usable & kept]).cumsum(1), (1, 0))[:, bounds].diff().tolist()
        alone = torch.zeros(len(left), dtype=torch.bool)
        alone[[span for span, *others in first_fit_descending(left, max(whole)) if not others]] = True
        return (kept | alone.to(slots.device).repeat_interleave(bounds.diff())).nonzero().squeeze(-1)

    def embed(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """pixel_values: (F, N, patch_size^2 * channels)."""
        patches = self.patch_embedding(pixel_values.to(self.dtype))  # (F, N, D)
        return patches + self.positional_embedding[None].to(patches)


class STTSAdapter(Molmo2Adapter):
    """Molmo2's connector, which also takes blocks that are already gathered."""

    def forward(
        self, image_features: torch.Tensor, pooled_patches_idx: torch.Tensor | None = None, **kwargs: Any
    ) -> BaseModelOutput:
        """
        With `pooled_patches_idx` as in Molmo2. Without: image_features (K, S, D * feature layers) are kept blocks and
        `valid` (K, S) bool or None says which slots are no padding; `last_hidden_state` is (K, text hidden size).
        """
        if pooled_patches_idx is not None:
            return super().forward(image_features, pooled_patches_idx, **kwargs)
        valid = kwargs.pop("valid", None)
        if image_features.shape[0] == 0:
            return BaseModelOutput(last_hidden_state=image_features.new_zeros(0, self.config.text_hidden_size))
        parts = image_features.split(MAX_GRID_BLOCKS)
        valids = [None] * len(parts) if valid is None else valid.split(MAX_GRID_BLOCKS)
        pooled = [self.pool(part, some, **kwargs) for part, some in zip(parts, valids, strict=True)]
        return BaseModelOutput(
            last_hidden_state=self.image_projector(torch.cat(pooled) if len(pooled) > 1 else pooled[0])
        )

    def pool(self, blocks: torch.Tensor, valid: torch.Tensor | None, **kwargs: Any) -> torch.Tensor:
        """(K, S, D * feature layers) -> (K, D'), attention from each block's mean to its patches."""
        if valid is None:
            query, attention_mask = blocks.mean(dim=1, keepdim=True), None  # (K, 1, D * feature layers)
        else:
            counts = valid.sum(dim=1)[:, None, None].to(blocks.dtype)
            query = blocks.sum(dim=1, keepdim=True) / counts
            attention_mask = create_bidirectional_mask(
                config=self.config,
                inputs_embeds=query,
                attention_mask=valid,
                encoder_hidden_states=blocks,
                allow_is_bidirectional_skip=False,  # the check would force a host-device sync
            )
        return self.image_pooling_2d(query, blocks, attention_mask=attention_mask, **kwargs)[0].squeeze(1)
