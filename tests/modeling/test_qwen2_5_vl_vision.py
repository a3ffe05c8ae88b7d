"""The tower with windows: features, losses and gradients against the dense masked reference."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from transformers.vision_utils import get_vision_window_index

from stts_hf.modeling.attention_stts import AttentionSpans
from tests.modeling.test_qwen3_vl_vision import check_gradients, encode, encode_naively, flat, found, videos
from tests.modeling.towers import assert_features_close, largest_difference
from tests.naive_qwen2_5_vl import naive_video
from tests.tiny_qwen2_5_vl import tiny_config, tiny_model
from tests.tiny_qwen3_vl import SIDE, Video

# Windows of 2 x 2 blocks: whole ones, narrow ones at either border, and videos of a single one.
MIXED = [Video(4, 3, 3), Video(3, 2, 5), Video(3, 1, 2), Video(2, 5, 2)]
naively = partial(encode_naively, naive=naive_video)

# By whether layers l and l + 1 see whole frames (l = 2).
CASES: dict[str, dict[str, Any]] = {
    "windows-then-frames": {"full": (3, 5)},
    "frames-then-windows": {"full": (2, 5)},
    "windows-twice": {"full": (0, 4)},
    "frames-twice": {"full": (2, 3)},
    "windows-alone": {"full": ()},
    "last-layer-takes-the-bias": {"pruning_layer": 4, "full": (1,)},
    "cosine": {"selector": "cosine"},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_features_equal_the_dense_masked_reference(options):
    model, inputs = tiny_model(tiny_config(**options)), videos(MIXED)
    with torch.no_grad():
        for ratio in (0.0, 0.3, 0.5, 0.9):
            output, naive = encode(model, inputs, ratio), naively(model, inputs, ratio)
            assert all(torch.equal(a, b.keep_mask) for a, b in zip(output.keep_mask, naive, strict=True))
            assert_features_close(found(output)[0], flat(naive)[0])
            for video, expected in zip(output.pooler_output, naive, strict=True):
                assert_features_close(video, expected.features)


@pytest.mark.parametrize("options", [CASES["windows-then-frames"], CASES["windows-twice"]], ids=str)
@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.9])
def test_gradients_equal_those_of_the_reference(ratio, options):
    model, inputs = tiny_model(tiny_config(**options)), videos(MIXED)
    check_gradients(model, encode(model, inputs, ratio), naively(model, inputs, ratio))


def test_scores_are_in_the_callers_order_of_blocks():
    """Blocks of a frame that differ from the others in one place are told apart in that place."""
    model, inputs = tiny_model(tiny_config(selector="cosine")), videos([Video(2, 3, 3)])
    pixels = inputs["pixel_values_videos"].view(2, 9, 4, -1)
    pixels[1] = pixels[0]
    pixels[1, 5] = -pixels[0, 5]  # row 1, column 2: in the second window
    inputs["pixel_values_videos"] = pixels.flatten(0, 2)
    with torch.no_grad():
        assert encode(model, inputs, 0.5).token_scores[0][1].argmax() == 5


@pytest.mark.parametrize("side", [1, 2, 3])
def test_windows_are_the_native_ones(side):
    tower = tiny_model(tiny_config(window_size=4 * SIDE * side)).model.visual
    grids = [(2, 3, 7), (1, 1, 2), (3, 4, 4)]
    order, spans = tower.cut_windows(grids, torch.device("cpu"))
    patches = torch.tensor([[frames, 2 * rows, 2 * cols] for frames, rows, cols in grids])
    expected_order, expected_bounds = get_vision_window_index(patches, 2, tower.window_size, tower.patch_size)
    assert torch.equal(order, expected_order)
    assert torch.equal(spans.cu_seqlens_k, expected_bounds)
    assert spans.max_seqlen == expected_bounds.diff().max()


def test_windows_that_lost_everything():
    model, inputs = tiny_model(), videos([Video(6, 1, 6)])
    with torch.no_grad():
        output = encode(model, inputs, 0.6)
        left = output.keep_mask[0].view(6, 3, 2).any(-1)
        assert not left.all()
        assert left.any(-1)[1:].any()
        assert_features_close(found(output)[0], flat(naively(model, inputs, 0.6))[0])
        assert found(encode(model, inputs, 1.0))[0].shape == (0, 48)


@pytest.mark.parametrize("mistake", ["windows-as-frames", "the-callers-order"])
def test_the_comparison_notices(monkeypatch, mistake):
    model, inputs = tiny_model(), videos(MIXED)
    if mistake == "windows-as-frames":
        monkeypatch.setattr(model.model.visual, "sees_window", lambda layer: False)
    else:
        exact = AttentionSpans.drop

        def first_ones(spans, slots):
            dropping, after = exact(spans, slots)
            return replace(dropping, queries=torch.arange(len(slots))), after

        monkeypatch.setattr(AttentionSpans, "drop", first_ones)
    with torch.no_grad():
        wrong = found(encode(model, inputs, 0.5))[0]
        assert largest_difference(wrong, flat(naively(model, inputs, 0.5))[0]) > 1e-3
