"""STTS on Qwen2.5-VL: `STTSQwen2_5_VLModel` sends videos through the pruning tower and shortens the LLM's sequence
accordingly; `STTSQwen2_5_VLForConditionalGeneration` adds head, losses and `generate`.

All but the parts of the model and their names is in `mrope_stts`: a frame is a tubelet, and positions are native ones
of the whole prompt. Those in time follow the clock, by the seconds that `second_per_grid_ts` says of each video's
tubelets, so a video's may be ahead of those of the text that comes after it.
"""

from typing import Any

import torch
from transformers import GenerationMixin
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLModel,
    Qwen2_5_VLTextModel,
)

from .configuration_stts_qwen2_5_vl import STTSQwen2_5_VLConfig
from .mrope_stts import MropeBackbone
from .outputs_stts import PruningHead
from .plan_stts import PruningPlan, VideoFeatures
from .vision_stts_qwen2_5_vl import STTSQwen2_5_VLVisionModel


class STTSQwen2_5_VLModel(MropeBackbone, Qwen2_5_VLModel):
    """Qwen2.5-VL without a head; drops the lowest-scored blocks of videos."""

    config: STTSQwen2_5_VLConfig
    visual: STTSQwen2_5_VLVisionModel
    native = Qwen2_5_VLModel
    tower = STTSQwen2_5_VLVisionModel
    text_class = Qwen2_5_VLTextModel
    video_inputs = ("pixel_values_videos", "second_per_grid_ts", "video_grid_thw")
    run_per_frame = False

    def get_video_features(
        self, pixel_values_videos: torch.Tensor, video_grid_thw: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple | VideoFeatures:
        """As in `PruningBackbone`; grids come second, as in the native model."""
        return super().get_video_features(pixel_values_videos, video_grid_thw=video_grid_thw, **kwargs)

    def plan_videos(self, vision: dict[str, Any]) -> PruningPlan:
        """As in `MropeBackbone`; second_per_grid_ts: (V,), or absent for a second each, as in the native model."""
        plan = super().plan_videos(vision)
        seconds = vision.get("second_per_grid_ts")
        if seconds is not None and len(seconds) != len(plan.grids):
            raise ValueError(
                f"`second_per_grid_ts` has {len(seconds)} entries, but must have one for each of the "
                f"{len(plan.grids)} videos of `video_grid_thw`: the seconds from one tubelet to the next."
            )
        return plan


class STTSQwen2_5_VLForConditionalGeneration(PruningHead, Qwen2_5_VLForConditionalGeneration, GenerationMixin):
    """Qwen2.5-VL with video token pruning inside the ViT and the LLM; loads stock Qwen2.5-VL weights too."""

    config: STTSQwen2_5_VLConfig
    model: STTSQwen2_5_VLModel
    native = Qwen2_5_VLForConditionalGeneration
    backbone = STTSQwen2_5_VLModel


__all__ = ["STTSQwen2_5_VLForConditionalGeneration", "STTSQwen2_5_VLModel", "STTSQwen2_5_VLVisionModel"]
