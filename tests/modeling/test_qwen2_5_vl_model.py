"""Qwen2.5-VL whole: stock where nothing is pruned, a construction token by token where something is, and its files."""

import json
from typing import Any

import pytest
import torch

from stts_hf.modeling.modeling_stts_qwen2_5_vl import STTSQwen2_5_VLForConditionalGeneration, STTSQwen2_5_VLModel
from tests import tiny_qwen3_vl
from tests.modeling.reference import CLOSE
from tests.naive_qwen2_5_vl import naive_forward
from tests.tiny_qwen2_5_vl import samples, stock_twin, tiny_config, tiny_model
from tests.tiny_qwen3_vl import Video, batch, text_of


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def test_positions_in_time_follow_the_seconds_of_each_video(model):
    (row,) = samples([[3, Video(3), 2, Video(2), 4]])
    with torch.no_grad():
        outputs = model(**row, pruning_ratio=0.5).logits[0]
        torch.testing.assert_close(outputs, naive_forward(model, row, 0.5).logits, **CLOSE)
        swapped = row | {"second_per_grid_ts": row["second_per_grid_ts"].flip(0)}
        assert (model(**swapped, pruning_ratio=0.5).logits[0] - outputs).abs().max() > 1e-2
        as_list = row | {"second_per_grid_ts": row["second_per_grid_ts"].tolist()}  # as some versions' processor has it
        assert torch.equal(model(**as_list, pruning_ratio=0.5).logits[0], outputs)
    with pytest.raises(ValueError, match="`second_per_grid_ts` has 1 entries, but must have one for each of the 2"):
        model(**(row | {"second_per_grid_ts": row["second_per_grid_ts"][:1]}))


def test_text_after_a_cached_video_that_is_ahead_of_it(model):
    """The next position follows the last token, not the largest position."""
    (row,) = samples([[3, Video(4), 5]])
    row = text_of(row)
    positions, _ = model.model.get_rope_index(**{n: row[n] for n in row if not n.startswith("pixel")})
    assert positions[0].max() > positions[0, 0, -1] + 10
    first = {name: value[:, :-3] if value.shape == row["input_ids"].shape else value for name, value in row.items()}
    with torch.no_grad():
        whole = model(**row, pruning_ratio=0.5).logits[:, -3:]
        cache = model(**first, pruning_ratio=0.5).past_key_values
        rest = model(input_ids=row["input_ids"][:, -3:], past_key_values=cache).logits
    torch.testing.assert_close(rest, whole, **CLOSE)


@pytest.mark.parametrize("form", ["as-saved", "as-released", "without-a-head"])
def test_a_stock_checkpoint_lacks_exactly_the_scorer(model, tmp_path, form):
    """Released checkpoints have the text model's settings at the top and older names of weights."""
    stock = stock_twin(model)
    stock.save_pretrained(tmp_path)
    if form == "as-released":
        config = json.loads((tmp_path / "config.json").read_text())
        config |= config.pop("text_config") | {"model_type": "qwen2_5_vl"}
        config["rope_scaling"] = config.pop("rope_parameters") | {"type": "mrope", "rope_type": "mrope"}
        config["vision_config"]["model_type"] = "qwen2_5_vl"
        (tmp_path / "config.json").write_text(json.dumps(config))
    kind: Any = STTSQwen2_5_VLModel if form == "without-a-head" else STTSQwen2_5_VLForConditionalGeneration
    loaded, info = kind.from_pretrained(tmp_path, pruning_ratio=0.25, pruning_layer=2, output_loading_info=True)
    prefix = "visual" if form == "without-a-head" else "model.visual"
    assert all(name.startswith(f"{prefix}.scorer.") for name in info["missing_keys"])
    assert len(info["missing_keys"]) == 14
    assert info["unexpected_keys"] <= {"lm_head.weight"}
    assert bool(info["unexpected_keys"]) == (form == "without-a-head")
    weights = (stock.model if form == "without-a-head" else stock).state_dict()
    found = loaded.state_dict()
    assert all(torch.equal(found[name], value) for name, value in weights.items())
    assert loaded.config.text_config.rope_parameters["mrope_section"] == [2, 2, 2]
    assert loaded.config.vision_config.pruning_ratio == 0.25


def test_weights_are_saved_under_the_names_of_released_ones(model, tmp_path):
    """So tools that read Qwen2.5-VL's files find all but the scorer where they expect it."""
    from safetensors import safe_open

    stock_twin(model).save_pretrained(tmp_path / "stock")
    model.save_pretrained(tmp_path / "ours")
    names = []
    for folder in ("stock", "ours"):
        with safe_open(tmp_path / folder / "model.safetensors", "pt") as file:
            names.append(set(file.keys()))
    assert {name for name in names[1] - names[0] if ".scorer." not in name} == set()
    assert names[0] < names[1]


def test_grids_that_are_not_those_of_the_texts_runs_are_refused(model):
    inputs = batch(samples([[3, Video(3), 2, Video(2, 1, 3), 4]]))
    swapped = inputs | {"video_grid_thw": torch.tensor([[2, 2, 6], [3, 4, 6]])}
    by_tubelet = tiny_qwen3_vl.batch(tiny_qwen3_vl.samples([[3, Video(3), 4]]))
    for wrong, message in (
        (swapped, "`video_grid_thw` needs runs"),
        (by_tubelet, "`video_grid_thw` needs runs"),
    ):
        with pytest.raises(ValueError, match=message):
            model(**wrong)
        with pytest.raises(ValueError, match=message):
            model.generate(**text_of(wrong), max_new_tokens=2)


def test_the_layer_that_takes_the_bias_sees_whole_frames_by_default():
    config = type(tiny_config())()
    assert config.vision_config.pruning_layer + 1 == min(config.vision_config.fullatt_block_indexes)
