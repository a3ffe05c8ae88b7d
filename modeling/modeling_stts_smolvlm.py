"""STTS on SmolVLM2: `STTSSmolVLMModel` sends videos through the pruning tower and shortens the LLM's sequence
accordingly; `STTSSmolVLMForConditionalGeneration` adds head, losses and `generate`.

All but the parts of the model, their names and its images is in `causal_stts`.
"""

from typing import Any, ClassVar

import torch
from transformers import AutoModel, GenerationMixin
from transformers.models.smolvlm.modeling_smolvlm import (
    SmolVLMConnector,
    SmolVLMForConditionalGeneration,
    SmolVLMModel,
)

from .causal_stts import CausalBackbone
from .configuration_stts_smolvlm import STTSSmolVLMConfig
from .outputs_stts import PruningHead
from .vision_stts_smolvlm import STTSSmolVLMVisionModel


class STTSSmolVLMModel(CausalBackbone, SmolVLMModel):
    """SmolVLM2 without a head; drops the lowest-scored blocks of videos."""

    config: STTSSmolVLMConfig
    native = SmolVLMModel
    tower_name = "vision_model"
    image_inputs = ("pixel_values", "pixel_attention_mask")
    parts: ClassVar[dict[str, str]] = {
        "text_model": "language_model",
        "vision_model": "vision_tower",
        "vision_model.scorer": "scorer",
        "connector": "connector",
    }

    def __init__(self, config: Any):
        super(SmolVLMModel, self).__init__(config)  # the native `__init__` would build the stock tower
        self.vision_model = STTSSmolVLMVisionModel(config.vision_config)
        self.connector = SmolVLMConnector(config)
        self.text_model = AutoModel.from_config(config.text_config)
        self.post_init()

    @property
    def block_side(self) -> int:  # type: ignore[override]
        return self.config.scale_factor

    def connect(self, features: torch.Tensor) -> torch.Tensor:
        """As in `CausalBackbone`: native pixel shuffle makes one token of a block, as of that part of a frame."""
        return self.connector(features).squeeze(1)

    def count_image_tokens(self, vision: dict[str, Any]) -> list[int]:
        """Tokens of each image or tile; native code takes images of zeros for padding and skips them."""
        pictures, config = vision["pixel_values"].flatten(0, 1), self.config.vision_config
        side = config.image_size // config.patch_size // self.block_side
        return [side**2] * int((pictures != 0).flatten(1).any(-1).sum())


class STTSSmolVLMForConditionalGeneration(PruningHead, SmolVLMForConditionalGeneration, GenerationMixin):
    """SmolVLM2 with video token pruning inside the ViT and the LLM; loads stock SmolVLM2 weights too."""

    config: STTSSmolVLMConfig
    model: STTSSmolVLMModel
    native = SmolVLMForConditionalGeneration
    backbone = STTSSmolVLMModel

    def get_video_features(self, *args: Any, **kwargs: Any) -> Any:
        """As of `model`."""
        return self.model.get_video_features(*args, **kwargs)


__all__ = ["STTSSmolVLMForConditionalGeneration", "STTSSmolVLMModel", "STTSSmolVLMVisionModel"]
