"""Qwen2.5-VL's vision tower with token scoring: native parts, and the windows that most of its layers see.

A frame is a tubelet. In the layers of `fullatt_block_indexes` its patches see each other, in all others those of their
window alone; blocks lie window by window all through the tower. After the drop a window is what is left of it. How
blocks are scored and dropped is in `mrope_tower_stts`.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
    Qwen2_5_VLVisionBlock,
    apply_rotary_pos_emb_vision,
)

from .attention_stts import AttentionSpans
from .configuration_stts_qwen2_5_vl import STTSQwen2_5_VLVisionConfig
from .mrope_tower_stts import FlatTower, RotarySpanLayer


class STTSQwen2_5_VLVisionBlock(RotarySpanLayer, Qwen2_5_VLVisionBlock):
    """Native layer, and beside it attention within the tubelets of videos and their windows."""

    rotate = staticmethod(apply_rotary_pos_emb_vision)


class STTSQwen2_5_VLVisionModel(FlatTower, Qwen2_5_VisionTransformerPretrainedModel):
    """Qwen2.5-VL's ViT, which for videos scores blocks after layer `pruning_layer` and drops the lowest."""

    config: STTSQwen2_5_VLVisionConfig
    block = STTSQwen2_5_VLVisionBlock
    _no_split_modules: ClassVar[list[str]] = ["STTSQwen2_5_VLVisionBlock", "TokenScorer"]  # type: ignore[misc]

    def cut_windows(
        self, grids: list[tuple[int, int, int]], device: torch.device
    ) -> tuple[torch.Tensor, AttentionSpans]:
        """
        As in `FlatTower`, by the native rule: windows begin at a frame's corner and end at its border. Native code
        reads tensors for it, which no graph can hold; here every size follows from the grids.
        """
        patch_size: Any = self.patch_size  # a number, which the native config's type leaves open
        side = self.window_size // self.spatial_merge_size // patch_size  # in blocks
        orders, lengths, start = [], [], 0
        for frames, rows, cols in grids:
            row, col = torch.arange(rows, device=device) // side, torch.arange(cols, device=device) // side
            num_windows = (-(-rows // side), -(-cols // side))
            window = row[:, None] * num_windows[1] + col  # of each block of a frame
            within = torch.sort(window.flatten(), stable=True).indices
            frame_starts = start + rows * cols * torch.arange(frames, device=device)
            orders.append((frame_starts[:, None] + within).flatten())
            heights, widths = (
                (extent - side * torch.arange(count, device=device)).clamp_max(side)
                for extent, count in zip((rows, cols), num_windows, strict=True)
            )
            lengths.append((heights[:, None] * widths).flatten().repeat(frames))
            start += frames * rows * cols
        bounds = (self.spatial_merge_unit * F.pad(torch.cat(lengths).cumsum(0), (1, 0))).to(torch.int32)
        longest = max(min(rows, side) * min(cols, side) for _, rows, cols in grids)
        return torch.cat(orders), AttentionSpans(bounds, bounds, self.spatial_merge_unit * longest)

    def sees_window(self, layer: int) -> bool:
        return layer not in self.fullatt_block_indexes
