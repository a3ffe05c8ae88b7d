"""Tiny Qwen3.5 models: tower and samples of `tiny_qwen3_vl`; of the text model's 4 layers 3 are recurrent."""

from typing import Any

import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5ForConditionalGeneration,
    Qwen3_5GatedDeltaNet,
    Qwen3_5RMSNorm,
)
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeGatedDeltaNet, Qwen3_5MoeRMSNorm

from stts_hf.modeling.configuration_stts_qwen3_5 import STTSQwen3_5Config
from stts_hf.modeling.modeling_stts_qwen3_5 import STTSQwen3_5ForConditionalGeneration
from tests import tiny_qwen3_vl
from tests.tiny_qwen3_vl import TEXT, TOKEN_IDS, VISION, samples

RECURRENT = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}


def tiny_config(*, model_overrides: dict[str, Any] | None = None, **vision: Any) -> Any:
    """As `tiny_qwen3_vl.tiny_config`."""
    return STTSQwen3_5Config(
        vision_config=VISION | {"num_position_embeddings": 36} | vision,
        text_config=TEXT | RECURRENT,
        **TOKEN_IDS | (model_overrides or {}),
    )


def tiny_model(
    config: Any = None, seed: int = 0, trained_scorer: bool = True, kind: Any = STTSQwen3_5ForConditionalGeneration
) -> Any:
    """As `tiny_qwen3_vl.tiny_model`, with states that hold what they read for some dozen tokens."""
    model = tiny_qwen3_vl.tiny_model(config or tiny_config(), seed, trained_scorer, kind)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Qwen3_5GatedDeltaNet | Qwen3_5MoeGatedDeltaNet):
                module.A_log.sub_(3)
            elif isinstance(module, Qwen3_5RMSNorm | Qwen3_5MoeRMSNorm):  # whose weights are differences from 1
                module.weight.sub_(1)
    return model


def stock_twin(model: Any) -> Any:
    """Stock Qwen3.5 with the same settings and weights."""
    return tiny_qwen3_vl.stock_twin(model, Qwen3_5ForConditionalGeneration)


__all__ = ["samples", "stock_twin", "tiny_config", "tiny_model"]
