"""What callers of Qwen3-VL may give beside a prompt: positions, and features made beforehand."""

from typing import Any

import pytest
import torch

from tests.modeling.reference import CLOSE
from tests.tiny_qwen3_vl import Image, Video, batch, samples, text_of, tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.mark.parametrize("form", ["axes", "order-and-axes"])
def test_positions_of_the_caller_are_followed(model, form):
    (row,) = samples([[3, Video(4), 5]])
    grids = {"video_grid_thw": row["video_grid_thw"]}
    axes, _ = model.model.get_rope_index(row["input_ids"], row["mm_token_type_ids"], **grids)
    jump = axes + 7 * (axes > 12)
    order = torch.arange(axes.shape[-1]).expand(1, 1, -1)

    def logits(positions):
        given = positions if form == "axes" else torch.cat([order, positions])
        return model(**row, position_ids=given, pruning_ratio=0.5).logits

    with torch.no_grad():
        expected = model(**row, pruning_ratio=0.5).logits
        torch.testing.assert_close(logits(axes), expected, **CLOSE)
        assert (logits(jump) - expected).abs().max() > 1e-2


def test_generate_follows_positions_of_the_caller(model):
    inputs = text_of(batch(samples([[2, Image(), 2, Video(3), 4, Video(2, 1, 3), 2], [2, Video(2), 3]])))
    grids = (inputs["image_grid_thw"], inputs["video_grid_thw"], inputs["attention_mask"])
    axes, _ = model.model.get_rope_index(inputs["input_ids"], inputs["mm_token_type_ids"], *grids)
    settings: Any = {"max_new_tokens": 4, "eos_token_id": None, "pad_token_id": 0, "do_sample": False}
    expected = model.generate(**inputs, **settings)
    assert torch.equal(model.generate(**inputs, **settings, position_ids=axes), expected)
    order = (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0)[None]
    assert torch.equal(model.generate(**inputs, **settings, position_ids=torch.cat([order, axes])), expected)
