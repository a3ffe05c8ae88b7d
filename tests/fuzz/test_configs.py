"""Configurations from any values: refused by the field's name, or the same after saving and loading."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stts_hf.modeling.configuration_stts import STTSVisionConfig
from stts_hf.modeling.configuration_stts_qwen2_5_vl import STTSQwen2_5_VLVisionConfig
from stts_hf.modeling.configuration_stts_qwen3_vl import STTSQwen3VLVisionConfig

KINDS = [STTSVisionConfig, STTSQwen3VLVisionConfig, STTSQwen2_5_VLVisionConfig]
anything = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), st.lists(st.integers(), max_size=2)
)
FIELDS = {
    "pruning_ratio": st.floats(0, 1),
    "pruning_layer": st.integers(-1, 40),
    "selector": st.sampled_from(["scorer", "cosine", "random"]),
    "selector_seed": st.integers(0, 2**70),
    "score_rescaling": st.sampled_from(["row", "frame", "none"]),
    "packing": st.sampled_from(["varlen", "first_fit_descending"]),
    "refill_single_frame_bins": st.booleans(),
}
settings = st.fixed_dictionaries(
    {}, optional={name: st.one_of(values, values, values, anything) for name, values in FIELDS.items()}
)


@pytest.mark.parametrize("vision", KINDS, ids=lambda kind: kind.__name__)
@given(values=settings)
def test_a_vision_config_is_refused_by_name_or_kept(vision: Any, values: dict[str, Any]):
    made, refusal = None, ""
    try:
        made = vision(**values)
    except Exception as error:  # transformers' own errors of a field's kind are no ValueError, but say its name
        refusal = str(error)
    if made is None:
        assert any(name in refusal for name in values), refusal
        return
    for name, value in values.items():
        assert getattr(made, name) == value
    again = vision.from_dict(json.loads(made.to_json_string(use_diff=False)))
    assert again.to_dict() == made.to_dict()
