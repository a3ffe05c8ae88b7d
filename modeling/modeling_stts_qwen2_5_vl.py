"""STTS on Qwen2.5-VL: `STTSQwen2_5_VLModel` sends videos through the pruning tower and shortens the LLM's sequence
accordingly; `STTSQwen2_5_VLForConditionalGeneration` adds head, losses and `generate`.

All but the parts of the model and their names is in `mrope_stts`: a frame is a tubelet, and positions are native ones
of the whole prompt. Those in time follow the clock, by the seconds that `second_per_grid_ts` says of each video's
tubelets, so a video's may be ahead of those of the text that comes after it.
"""

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import GenerationMixin
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLModel,
    Qwen2_5_VLTextModel,
)

from .configuration_stts_qwen2_5_vl import STTSQwen2_5_VLConfig
from .mrope_stts import MropeBackbone
from .outputs_stts import PruningHead, with_native_arguments
from .plan_stts import PruningPlan
from .vision_stts_qwen2_5_vl import STTSQwen2_5_VLVisionModel


class STTSQwen2_5_VLModel(MropeBackbone, Qwen2_5_VLModel):
    """Qwen2.5-VL without a head, whose videos lose the blocks of least score."""

    config: STTSQwen2_5_VLConfig
    visual: STTSQwen2_5_VLVisionModel
    parts: ClassVar[dict[str, str]] = {
        "language_model": "language_model",
        "visual": "vision_tower",
        "visual.scorer": "scorer",
        "visual.merger": "connector",
    }
    video_inputs = ("pixel_values_videos", "second_per_grid_ts", "video_grid_thw")
    run_per_frame = False

    def __init__(self, config: STTSQwen2_5_VLConfig):
        # Skips Qwen2_5_VLModel.__init__, which would build a second vision tower and language model.
        super(Qwen2_5_VLModel, self).__init__(config)
        self.visual = STTSQwen2_5_VLVisionModel(config.vision_config)
        self.language_model = Qwen2_5_VLTextModel(config.text_config)
        self.post_init()

    def native_forward(self, mm_token_type_ids: torch.Tensor | None = None, **arguments: Any) -> Any:
        return Qwen2_5_VLModel.forward(self, **arguments)

    def plan_videos(
        self, vision: dict[str, Any], pruning_ratio: float | None = None, with_temporal_loss: bool = False
    ) -> PruningPlan:
        """As in `MropeBackbone`; second_per_grid_ts: (V,), or absent for a second each, as in the native model."""
        plan = super().plan_videos(vision, pruning_ratio, with_temporal_loss)
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

    def __init__(self, config: STTSQwen2_5_VLConfig):
        super(Qwen2_5_VLForConditionalGeneration, self).__init__(config)
        self.model = STTSQwen2_5_VLModel(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.model_tags = ["stts", "qwen2_5_vl", "video", "token-pruning", "custom_code"]  # of the model card
        self.post_init()

    forward = with_native_arguments(Qwen2_5_VLForConditionalGeneration, PruningHead.forward)


# Released checkpoints name their weights otherwise; without these they would load random, with a warning at most.
for native, ours in (
    (Qwen2_5_VLModel, STTSQwen2_5_VLModel),
    (Qwen2_5_VLForConditionalGeneration, STTSQwen2_5_VLForConditionalGeneration),
):
    renamed = get_checkpoint_conversion_mapping(native.__name__) or []
    register_checkpoint_conversion_mapping(ours.__name__, renamed, overwrite=True)
STTSQwen2_5_VLForConditionalGeneration.register_for_auto_class("AutoModel")

__all__ = ["STTSQwen2_5_VLForConditionalGeneration", "STTSQwen2_5_VLModel", "STTSQwen2_5_VLVisionModel"]
