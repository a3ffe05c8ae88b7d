"""The tower's features, deepstack features, losses and gradients against the dense masked reference."""

from typing import Any

import pytest
import torch

from stts_hf.modeling.attention_stts import AttentionSpans
from tests.modeling.reference import assert_gradients_equal, gradients
from tests.modeling.towers import assert_features_close, largest_difference, weighted
from tests.naive import naive_temporal_loss
from tests.naive_qwen3_vl import NaiveVideo, naive_video
from tests.tiny_qwen3_vl import Inputs, Video, sample, tiny_config, tiny_model

MIXED = [Video(4, 2, 3), Video(3, 3, 2), Video(2, 1, 4)]


def videos(parts=MIXED, seed: int = 0) -> Inputs:
    inputs = sample(parts, seed)
    return {name: inputs[name] for name in ("pixel_values_videos", "video_grid_thw")}


def encode(model, inputs: Inputs, ratio: float) -> Any:
    return model.model.get_video_features(**inputs, pruning_ratio=ratio, with_temporal_loss=True)


def encode_naively(model, inputs: Inputs, ratio: float, naive: Any = naive_video) -> list[NaiveVideo]:
    grids = inputs["video_grid_thw"]
    pixels = inputs["pixel_values_videos"].split(grids.prod(-1).tolist())
    return [naive(model, some, grid, ratio) for some, grid in zip(pixels, grids.tolist(), strict=True)]


def flat(videos: list[NaiveVideo]) -> list[torch.Tensor]:
    """Features, then those of each tap, of all videos."""
    taps = [torch.cat(tap) for tap in zip(*(video.deepstack for video in videos), strict=True)]
    return [torch.cat([video.features for video in videos]), *taps]


def found(output) -> list[torch.Tensor]:
    taps = output.deepstack_features or ()
    return [torch.cat(list(output.pooler_output)), *(torch.cat(list(tap)) for tap in taps)]


CASES: dict[str, dict[str, Any]] = {
    "taps-before-and-after": {},
    "taps-at-and-right-after": {"taps": (2, 3)},
    "taps-before-only": {"taps": (0, 2)},
    "taps-after-only": {"taps": (4, 5)},
    "layer-0": {"pruning_layer": 0},
    "last-layer-takes-the-bias": {"pruning_layer": 4, "taps": (1, 5)},
    "cosine": {"selector": "cosine"},
    "rescaled-by-frame": {"score_rescaling": "frame"},
    "plain-logarithm": {"score_rescaling": "none"},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_features_equal_the_dense_masked_reference(options):
    model, inputs = tiny_model(tiny_config(**options)), videos()
    with torch.no_grad():
        for ratio in (0.3, 0.5, 0.9):
            output, naive = encode(model, inputs, ratio), encode_naively(model, inputs, ratio)
            assert all(torch.equal(a, b.keep_mask) for a, b in zip(output.keep_mask, naive, strict=True))
            assert 0 < int(torch.cat([mask.flatten() for mask in output.keep_mask]).sum()) < 50
            for ours, expected in zip(found(output), flat(naive), strict=True):
                assert_features_close(ours, expected)


@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.9])
def test_gradients_equal_those_of_the_reference(ratio):
    model, inputs = tiny_model(), videos()
    check_gradients(model, encode(model, inputs, ratio), encode_naively(model, inputs, ratio))


def check_gradients(model, output, naive: list[NaiveVideo]) -> None:
    """Those of features and temporal loss."""
    ours = sum(weighted(features) for features in found(output)) + output.temporal_loss
    scores = [video.scores for video in naive if video.scores is not None]
    expected_loss = naive_temporal_loss(scores, [video.similarity for video in naive])
    torch.testing.assert_close(output.temporal_loss, expected_loss, atol=1e-6, rtol=0)
    expected = sum(weighted(features) for features in flat(naive)) + expected_loss
    assert_gradients_equal(gradients(model, ours), gradients(model, expected))


def test_a_frame_that_lost_everything_and_no_frame_at_all():
    model, inputs = tiny_model(), videos([Video(6, 1, 2)])
    with torch.no_grad():
        output = encode(model, inputs, 0.8)
        kept = output.keep_mask[0].sum(-1)
        assert (kept == 0).any()
        assert_features_close(found(output)[0], flat(encode_naively(model, inputs, 0.8))[0])
        nothing = encode(model, inputs, 1.0)
    assert [tuple(features.shape) for features in found(nothing)] == [(0, 48)] * 3


def test_the_comparison_notices_survivors_that_see_another_frame(monkeypatch):
    exact = AttentionSpans.drop

    def one_frame_too_far(spans, slots):
        dropping, after = exact(spans, slots)
        after.cu_seqlens_k[1] = after.cu_seqlens_k[2]
        return dropping, after

    model, inputs = tiny_model(), videos()
    monkeypatch.setattr(AttentionSpans, "drop", one_frame_too_far)
    with torch.no_grad():
        wrong = found(encode(model, inputs, 0.5))[0]
        assert largest_difference(wrong, flat(encode_naively(model, inputs, 0.5))[0]) > 1e-3


def test_hidden_states_are_those_of_every_layer():
    model, inputs = tiny_model(), videos([Video(3)])
    output = model.model.get_video_features(**inputs, pruning_ratio=0.5, output_hidden_states=True)
    kept = 4 * int(output.keep_mask[0].sum())
    assert [len(states) for states in output.hidden_states] == [72] * 4 + [kept] * 3
    assert torch.equal(output.hidden_states[-1], output.last_hidden_state)


def test_attention_weights_are_refused():
    with pytest.raises(ValueError, match="`output_attentions` is True"):
        tiny_model().model.get_video_features(**videos(), output_attentions=True)
