"""Qwen3-VL's vision tower with token scoring: native parts, and what is Qwen3-VL's about their positions.

A frame is a tubelet, all of whose patches see each other; they have learned positions, interpolated to each video's
resolution, and rotary ones. How blocks are scored and dropped is in `mrope_tower_stts`.
"""

from typing import ClassVar

import torch
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLVisionBlock,
    Qwen3VLVisionModel,
    apply_rotary_pos_emb_vision,
)
from transformers.vision_utils import get_vision_interpolation_indices_and_weights

from .configuration_stts_qwen3_vl import STTSQwen3VLVisionConfig
from .mrope_tower_stts import FlatTower, RotarySpanLayer


class STTSQwen3VLVisionBlock(RotarySpanLayer, Qwen3VLVisionBlock):
    """Native layer, and beside it attention within the tubelets of videos."""

    rotate = staticmethod(apply_rotary_pos_emb_vision)


class STTSQwen3VLVisionModel(FlatTower, Qwen3VLVisionModel):
    """Qwen3-VL's ViT, which for videos scores blocks after layer `pruning_layer` and drops the lowest."""

    config: STTSQwen3VLVisionConfig
    block = STTSQwen3VLVisionBlock
    _no_split_modules: ClassVar[list[str]] = ["STTSQwen3VLVisionBlock", "TokenScorer"]  # type: ignore[misc]

    def place_patches(self, grids: list[tuple[int, int, int]]) -> tuple[torch.Tensor, ...]:
        """As in `FlatTower`, with learned positions, interpolated as in the native model."""
        tables = get_vision_interpolation_indices_and_weights(
            self.one_frame_each(grids),
            self.num_grid_per_side,
            self.interpolation_mode,
            self.interpolation_align_corners,
            self.spatial_merge_size,
        )
        return (*super().place_patches(grids), *tables)
