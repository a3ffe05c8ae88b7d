"""Tiny Qwen3.5 models with a mixture of experts: `tiny_qwen3_5`'s, each of whose text layers has 4 experts."""

from typing import Any

from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForConditionalGeneration

from stts_hf.modeling.configuration_stts_qwen3_5_moe import STTSQwen3_5MoeConfig
from stts_hf.modeling.modeling_stts_qwen3_5_moe import STTSQwen3_5MoeForConditionalGeneration
from tests import tiny_qwen3_5, tiny_qwen3_vl
from tests.tiny_qwen3_vl import samples

EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


def tiny_config(**vision: Any) -> Any:
    """As `tiny_qwen3_5.tiny_config`."""
    dense = tiny_qwen3_5.tiny_config(**vision).to_dict()
    settings = {name: dense["text_config"][name] for name in dense["text_config"] if name != "model_type"}
    ids = {name: dense[name] for name in dense if name.endswith("_token_id")}
    return STTSQwen3_5MoeConfig(vision_config=dense["vision_config"], text_config=settings | EXPERTS, **ids)


def tiny_model(config: Any = None, seed: int = 0, trained_scorer: bool = True) -> Any:
    """As `tiny_qwen3_5.tiny_model`."""
    return tiny_qwen3_5.tiny_model(
        config or tiny_config(), seed, trained_scorer, STTSQwen3_5MoeForConditionalGeneration
    )


def stock_twin(model: Any) -> Any:
    """The stock model with the same settings and weights."""
    return tiny_qwen3_vl.stock_twin(model, Qwen3_5MoeForConditionalGeneration)


__all__ = ["samples", "stock_twin", "tiny_config", "tiny_model"]
