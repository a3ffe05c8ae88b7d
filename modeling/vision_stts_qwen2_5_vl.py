"""Qwen2.5-VL's vision tower with token scoring: native parts, and the windows that most of its layers see.

A frame is a tubelet. In the layers of `fullatt_block_indexes` its patches see each other, in all others those of their
window alone; blocks lie window by window all through the tower. After the drop a window is what is left of it. How
blocks are scored and dropped is in `mrope_tower_stts`.
"""

from typing import Any, ClassVar

import torch
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
    Qwen2_5_VLVisionAttention,
    Qwen2_5_VLVisionBlock,
    apply_rotary_pos_emb_vision,
)
from transformers.vision_utils import get_vision_window_index

from .configuration_stts_qwen2_5_vl import STTSQwen2_5_VLVisionConfig
from .mrope_tower_stts import FlatTower, FrameAttention, FrameBlock


class STTSQwen2_5_VLVisionAttention(FrameAttention, Qwen2_5_VLVisionAttention):  # type: ignore[misc]  # hands `max_seqlen` on
    """Native attention, and beside it attention within the tubelets of videos and their windows."""

    rotate = staticmethod(apply_rotary_pos_emb_vision)


class STTSQwen2_5_VLVisionBlock(FrameBlock, Qwen2_5_VLVisionBlock):
    """Native layer; as layer `l + 1` it also drops patches."""

    attention = STTSQwen2_5_VLVisionAttention


class STTSQwen2_5_VLVisionModel(FlatTower, Qwen2_5_VisionTransformerPretrainedModel):
    """Qwen2.5-VL's ViT, which for videos scores blocks after layer `pruning_layer` and drops the lowest."""

    config: STTSQwen2_5_VLVisionConfig
    block = STTSQwen2_5_VLVisionBlock
    _no_split_modules: ClassVar[list[str]] = ["STTSQwen2_5_VLVisionBlock", "TokenScorer"]  # type: ignore[misc]

    def cut_windows(self, grids: list[tuple[int, int, int]]) -> tuple[torch.Tensor, torch.Tensor, int]:
        """As in `FlatTower`, by the native rule: windows begin at a frame's corner and end at its border."""
        side = self.spatial_merge_size
        patches = torch.tensor([[frames, side * rows, side * cols] for frames, rows, cols in grids])
        patch_size: Any = self.patch_size  # a number, which the native config's type leaves open
        order, bounds = get_vision_window_index(patches, side, self.window_size, patch_size)
        return order, bounds, int(bounds.diff().max())

    def sees_window(self, layer: int) -> bool:
        return layer not in self.fullatt_block_indexes
