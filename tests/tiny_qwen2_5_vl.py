"""Tiny Qwen2.5-VL models and inputs: random weights, every part in place.

The tower has 6 layers of width 32 and prunes after layer 2; layers 3 and 5 see whole frames, the others windows of
2 x 2 blocks. The text model has 3 layers of width 48. Samples are those of `tiny_qwen3_vl` without timestamps.
"""

from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any

import torch
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLForConditionalGeneration

from stts_hf.modeling.configuration_stts_qwen2_5_vl import STTSQwen2_5_VLConfig
from stts_hf.modeling.modeling_stts_qwen2_5_vl import STTSQwen2_5_VLForConditionalGeneration
from tests import tiny_qwen3_vl
from tests.tiny_qwen3_vl import SIDE, TEXT, TOKEN_IDS, VISION, Inputs, Part

SECONDS = (3.0, 0.5, 1.0)  # of a tubelet of a sample's videos: the first one's end is ahead of the text after it


def tiny_config(*, full: Sequence[int] = (3, 5), model_overrides: dict[str, Any] | None = None, **vision: Any) -> Any:
    """
    Configuration of a tiny model, whose layers `full` see whole frames; keywords go to the vision config
    (`pruning_ratio=0.3, packing=...`).
    """
    of_vision = {"window_size": 2 * SIDE * 4, "tokens_per_second": 4, "fullatt_block_indexes": list(full)}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}
    return STTSQwen2_5_VLConfig(
        vision_config=VISION | of_vision | vision,
        text_config=TEXT | {"bos_token_id": None, "eos_token_id": None, "rope_parameters": rope},
        **TOKEN_IDS | (model_overrides or {}),
    )


def tiny_model(config: Any = None, seed: int = 0, trained_scorer: bool = True) -> Any:
    """As `tiny_qwen3_vl.tiny_model`."""
    kind = STTSQwen2_5_VLForConditionalGeneration
    return tiny_qwen3_vl.tiny_model(config or tiny_config(), seed, trained_scorer, kind)


def stock_twin(model: Any) -> Any:
    """Stock Qwen2.5-VL with the same settings and weights."""
    return tiny_qwen3_vl.stock_twin(model, Qwen2_5_VLForConditionalGeneration)


def sample(parts: Sequence[Part], seed: int = 0) -> Inputs:
    """As `tiny_qwen3_vl.sample`, with the seconds of the videos' tubelets."""
    inputs = tiny_qwen3_vl.sample(parts, seed, timestamps=False)
    if "video_grid_thw" in inputs:
        inputs["second_per_grid_ts"] = torch.tensor(list(islice(cycle(SECONDS), len(inputs["video_grid_thw"]))))
    return inputs


def samples(rows: Sequence[Sequence[Part]], seed: int = 0) -> list[Inputs]:
    return [sample(row, seed + index) for index, row in enumerate(rows)]
