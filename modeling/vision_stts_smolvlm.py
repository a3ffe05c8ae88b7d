"""SmolVLM2's vision tower, a SigLIP, with token scoring: native parts. `raster_tower_stts` scores and drops blocks."""

from typing import ClassVar

import torch
from transformers.models.smolvlm.modeling_smolvlm import SmolVLMEncoderLayer, SmolVLMVisionTransformer

from .configuration_stts_smolvlm import STTSSmolVLMVisionConfig
from .raster_tower_stts import RasterSpanLayer, RasterTower


class STTSSmolVLMEncoderLayer(RasterSpanLayer, SmolVLMEncoderLayer):
    """Native layer, and beside it attention within the frames of videos."""

    names = ("layer_norm1", "self_attn", "out_proj", "layer_norm2")
    options = ("scale", "dropout")


class STTSSmolVLMVisionModel(RasterTower, SmolVLMVisionTransformer):
    """SmolVLM2's ViT, which for videos scores blocks after layer `pruning_layer` and drops the lowest."""

    config: STTSSmolVLMVisionConfig
    layer = STTSSmolVLMEncoderLayer
    layers_name = "encoder.layers"
    norm_name = "post_layernorm"
    _no_split_modules: ClassVar[list[str]] = ["STTSSmolVLMEncoderLayer", "TokenScorer"]  # type: ignore[misc]

    def embed(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """As in `RasterTower`, by native code for pictures without padding."""
        side = self.embeddings.num_patches_per_side
        whole = torch.ones(len(pixel_values), side, side, dtype=torch.bool, device=pixel_values.device)
        return self.embeddings(pixel_values.to(self.dtype), whole)
