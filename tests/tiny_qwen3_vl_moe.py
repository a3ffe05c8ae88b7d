"""Tiny Qwen3-VL models with a mixture of experts: `tiny_qwen3_vl`'s, whose text layers but one have 4 experts."""

from typing import Any

from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeForConditionalGeneration

from stts_hf.modeling.configuration_stts_qwen3_vl_moe import STTSQwen3VLMoeConfig
from stts_hf.modeling.modeling_stts_qwen3_vl_moe import STTSQwen3VLMoeForConditionalGeneration
from tests import tiny_qwen3_vl
from tests.tiny_qwen3_vl import samples

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [1]}


def tiny_config(*, text: dict[str, Any] | None = None, **vision: Any) -> Any:
    """As `tiny_qwen3_vl.tiny_config`. text: settings of the text config."""
    dense = tiny_qwen3_vl.tiny_config(**vision).to_dict()
    settings = {name: value for name, value in dense["text_config"].items() if name != "model_type"}
    ids = {name: dense[name] for name in dense if name.endswith("_token_id")}
    mixture = settings | EXPERTS | (text or {})
    return STTSQwen3VLMoeConfig(vision_config=dense["vision_config"], text_config=mixture, **ids)


def tiny_model(config: Any = None, seed: int = 1, trained_scorer: bool = True) -> Any:
    """As `tiny_qwen3_vl.tiny_model`; with another seed, answers without a cache would hold placeholders."""
    kind = STTSQwen3VLMoeForConditionalGeneration
    return tiny_qwen3_vl.tiny_model(config or tiny_config(), seed, trained_scorer, kind)


def stock_twin(model: Any) -> Any:
    """The stock model with the same settings and weights."""
    return tiny_qwen3_vl.stock_twin(model, Qwen3VLMoeForConditionalGeneration)


__all__ = ["samples", "stock_twin", "tiny_config", "tiny_model"]
