"""The vision tower and connector against the naive reference and against stock Molmo2, forward and gradients."""

from typing import Any

import pytest
import torch
from transformers.models.molmo2.configuration_molmo2 import Molmo2Config
from transformers.models.molmo2.modeling_molmo2 import Molmo2Model

from stts_hf.benchmark.meters import peak_memory
from stts_hf.modeling import vision_stts
from stts_hf.modeling.attention_stts import AttentionSpans
from stts_hf.modeling.modeling_stts import STTSForConditionalGeneration
from tests.modeling.towers import (
    FFD,
    FORWARD_TOLERANCE,
    assert_features_close,
    assert_gradients_close,
    encode,
    encode_naively,
    gradients,
    largest_difference,
    video_inputs,
    weighted,
)
from tests.naive import NaiveRule, NaiveThreshold
from tests.tiny import image_inputs, tiny_config, tiny_model

# Of settings that other cases have one by one, and of large frames.
COMBINED = {
    *("refill-two-in-three", "threshold-refill", "threshold-borders", "single-frame-threshold", "ratio-30"),
    *("features-everywhere-refilled", "layer-0-features-0-and-1", "borders-8x8-refill", "borders-8x8-cosine"),
    *("borders-ratio-0", "borders-features-everywhere", "window-3x2-borders", "molmo2-27x27", "molmo2-27x27-refill"),
}


def case(name: str, num_frames: list[int] | None = None, ratio: NaiveRule = 0.5, **overrides: Any):
    marks = [pytest.mark.slow] if name in COMBINED else []
    return pytest.param(num_frames or [4, 2, 1], ratio, overrides, id=name, marks=marks)


CASES = [
    case("varlen"),
    case("refill", packing=FFD, refill_single_frame_bins=True),
    case("refill-two-in-three", packing=FFD, refill_single_frame_bins=True, ratio=0.3),
    case("cosine", selector="cosine"),
    case("random", selector="random"),
    case("rescaled-by-frame", score_rescaling="frame"),
    case("not-rescaled", score_rescaling="none"),
    case("ratio-0", ratio=0.0),
    case("ratio-30", ratio=0.3),
    case("ratio-80", ratio=0.8),
    case("ratio-99", ratio=0.99),
    case("threshold", ratio=NaiveThreshold(0.7)),
    case("threshold-refill", ratio=NaiveThreshold(0.7), packing=FFD, refill_single_frame_bins=True),
    case("threshold-cosine", ratio=NaiveThreshold(0.25), selector="cosine"),
    case("threshold-that-keeps-all", ratio=NaiveThreshold(0.0)),
    case("threshold-that-keeps-frame-0", ratio=NaiveThreshold(1.0)),
    case("threshold-within-bounds", ratio=NaiveThreshold(0.7, 0.45, 0.5)),
    case("threshold-and-budget", ratio=NaiveThreshold(0.7, budget=14)),
    case("threshold-borders", ratio=NaiveThreshold(0.7), image_size=[14, 20]),
    case("single-frame", [1]),
    case("single-frame-threshold", [1], ratio=NaiveThreshold(0.7)),
    case("features-at-and-before", feature_layers=[0, 2, 5]),
    case("features-right-after", feature_layers=[3]),
    case("features-everywhere", feature_layers=[4, 2, 5, 3, 1]),
    case("features-everywhere-refilled", feature_layers=[4, 2, 5, 3, 1], packing=FFD, refill_single_frame_bins=True),
    case("features-counted-from-the-end", feature_layers=[-1, -4]),
    case("layer-0", pruning_layer=0),
    case("layer-0-features-0-and-1", pruning_layer=0, feature_layers=[1, 0]),
    case("layer-last", pruning_layer=4),
    case("borders-8x8", image_size=[16, 16]),
    case("borders-8x8-refill", image_size=[16, 16], packing=FFD, refill_single_frame_bins=True),
    case("borders-8x8-cosine", image_size=[16, 16], selector="cosine"),
    case("borders-on-all-sides-7x10", image_size=[14, 20]),
    case("borders-ratio-0", image_size=[14, 20], ratio=0.0),
    case("borders-features-everywhere", image_size=[14, 20], feature_layers=[4, 2, 3, 1]),
    case("not-square", image_size=[12, 18]),
    case("window-2x3", image_size=[12, 18], pooling_size=[2, 3]),
    case("window-3x2-borders", image_size=[14, 18], pooling_size=[3, 2]),
    case("window-1x1", image_size=[6, 8], pooling_size=[1, 1]),
    case("window-of-the-whole-frame", image_size=[6, 6], pooling_size=[3, 3]),
    case("molmo2-27x27", [2, 2], ratio=0.6, image_size=[54, 54]),
    case("molmo2-27x27-refill", [3], ratio=0.4, image_size=[54, 54], packing=FFD, refill_single_frame_bins=True),
]


@pytest.mark.parametrize(("num_frames", "ratio", "overrides"), CASES)
def test_tower_is_the_naive_one(num_frames, ratio, overrides):
    model = tiny_model(tiny_config(**overrides))
    inputs = video_inputs(model.config, num_frames)
    actual, expected = encode(model, inputs, ratio), encode_naively(model, inputs, ratio, num_frames)

    assert [mask.tolist() for mask in actual.keep_mask] == [mask.tolist() for mask in expected.keep_masks]
    features = torch.cat(actual.pooler_output)
    assert_features_close(features, expected.pooled_features)
    assert_gradients_close(gradients(weighted(features), model), gradients(weighted(expected.pooled_features), model))
    if expected.scores is None:
        assert actual.temporal_loss is None
        return
    for scores, expected_scores in zip(actual.token_scores, expected.scores, strict=True):
        torch.testing.assert_close(scores, expected_scores, rtol=0, atol=FORWARD_TOLERANCE)
    torch.testing.assert_close(actual.temporal_loss, expected.temporal_loss, rtol=0, atol=FORWARD_TOLERANCE)


@pytest.mark.parametrize("overrides", [{}, {"image_size": [16, 16]}], ids=["whole", "borders"])
def test_eager_attention_gives_the_same(overrides):
    model = tiny_model(tiny_config(**overrides))
    inputs = video_inputs(model.config, [4, 2])
    expected = torch.cat(encode(model, inputs, 0.5).pooler_output)
    expected_gradients = gradients(weighted(expected), model)
    model.set_attn_implementation("eager")
    actual = torch.cat(encode(model, inputs, 0.5).pooler_output)
    assert_features_close(actual, expected)
    assert_gradients_close(gradients(weighted(actual), model), expected_gradients)


def test_a_leaked_neighbour_in_the_sequence_would_be_seen(monkeypatch):
    model = tiny_model()
    inputs = video_inputs(model.config, [4, 2])
    expected = torch.cat(encode(model, inputs, 0.5).pooler_output)
    exact = AttentionSpans.drop

    def off_by_one(spans: AttentionSpans, slots: torch.Tensor) -> tuple[AttentionSpans, AttentionSpans]:
        dropping, after = exact(spans, slots)
        after.cu_seqlens_q[1] -= 1
        return dropping, after

    monkeypatch.setattr(AttentionSpans, "drop", off_by_one)
    actual = torch.cat(encode(model, inputs, 0.5).pooler_output)
    assert largest_difference(actual, expected) > 100 * FORWARD_TOLERANCE


def test_the_previous_video_taken_for_the_previous_frame_would_be_seen():
    model = tiny_model()
    inputs = video_inputs(model.config, [3, 3])
    actual = torch.cat(encode(model, inputs, 0.5).token_scores)
    (wrong,) = encode_naively(model, inputs, 0.5, [6]).scores or []
    assert (actual[3] - wrong[3]).abs().max() > 100 * FORWARD_TOLERANCE
    torch.testing.assert_close(actual[[0, 1, 2, 4, 5]], wrong[[0, 1, 2, 4, 5]], rtol=0, atol=FORWARD_TOLERANCE)


def test_after_the_pruning_layer_only_survivors_are_computed():
    model = tiny_model()
    inputs = video_inputs(model.config, [4])
    rows = {}
    for index, layer in enumerate(model.model.vision_tower.layers):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.fc1"):

            def count(module, arguments, key=(index, name)):
                rows[key] = arguments[0].shape[:-1].numel()

            layer.get_submodule(name).register_forward_pre_hook(count)
    encode(model, inputs, 0.5)
    everything, survivors = 4 * 81, 2 * 81
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.fc1")
    assert [rows[2, name] for name in names] == [everything] * 4
    assert [rows[3, name] for name in names] == [survivors, everything, survivors, survivors]
    assert [rows[4, name] for name in names] == [survivors] * 4


def test_a_layer_holds_no_more_than_its_mlp_needs():
    """At most: both states of the MLP, and of width `D` the layer's input, sum and norm, a tap, scratch of one more."""
    model = tiny_model(tiny_config(hidden_size=32, intermediate_size=256))
    inputs = video_inputs(model.config, [16])
    with torch.no_grad():
        _, peak = peak_memory(lambda: encode(model, inputs, 0.0), torch.device("cpu"))
    assert peak < 4 * 16 * 81 * (2 * 256 + 6 * 32)


def test_layers_that_no_feature_needs_are_not_run():
    model = tiny_model(tiny_config(feature_layers=[3, 1]))
    ran = []
    for index, layer in enumerate(model.model.vision_tower.layers):
        layer.register_forward_hook(lambda *_, index=index: ran.append(index))
    encode(model, video_inputs(model.config, [3]), 0.5)
    assert ran == [0, 1, 2, 3]


def test_ratio_one_leaves_no_feature():
    model = tiny_model()
    output = encode(model, video_inputs(model.config, [3, 2]), 1.0)
    assert [features.shape for features in output.pooler_output] == [(0, 48), (0, 48)]
    assert not torch.cat(output.keep_mask).any()
    assert [scores.shape for scores in output.token_scores] == [(3, 9), (2, 9)]


@pytest.fixture(scope="module")
def stock_and_ours() -> tuple[Molmo2Model, STTSForConditionalGeneration]:
    """Stock Molmo2 and ours with the same weights."""
    model = tiny_model()
    settings = model.config.to_dict()
    stock = Molmo2Model(
        Molmo2Config(**{name: settings[name] for name in ("vision_config", "adapter_config", "text_config")})
    )
    loaded = stock.load_state_dict(model.model.state_dict(), strict=False)
    assert not loaded.missing_keys
    assert all(".scorer." in name for name in loaded.unexpected_keys)
    return stock.eval(), model


def test_images_go_through_the_tower_as_in_stock_molmo2(stock_and_ours):
    stock, model = stock_and_ours
    pixels = image_inputs([(1, 2)], model.config)["pixel_values"]
    expected = stock.vision_tower(pixels, output_hidden_states=True)
    actual = model.model.vision_tower(pixels, output_hidden_states=True)
    assert torch.equal(actual.last_hidden_state, expected.last_hidden_state)
    assert len(actual.hidden_states) == len(expected.hidden_states)
    for ours, theirs in zip(actual.hidden_states, expected.hidden_states, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("overrides", [{}, {"image_size": [16, 16]}], ids=["whole", "borders"])
def test_a_connector_of_many_calls_gives_the_same(overrides, monkeypatch):
    model = tiny_model(tiny_config(**overrides))
    inputs = video_inputs(model.config, [4, 2])
    expected = torch.cat(encode(model, inputs, 0.5).pooler_output)
    expected_gradients = gradients(weighted(expected), model)
    sizes = []
    pooling = model.model.multi_modal_projector.image_pooling_2d
    pooling.register_forward_pre_hook(lambda module, arguments: sizes.append(len(arguments[1])))
    monkeypatch.setattr(vision_stts, "MAX_GRID_BLOCKS", 10)
    actual = torch.cat(encode(model, inputs, 0.5).pooler_output)
    assert_features_close(actual, expected)
    assert_gradients_close(gradients(weighted(actual), model), expected_gradients)
    assert max(sizes) == 10
    assert sum(sizes) == len(actual)


def test_blocks_that_leave_out_patches_are_refused():
    model = tiny_model()
    inputs = video_inputs(model.config, [2])
    inputs["video_grids"] = torch.tensor([[2, 2, 2]])
    inputs["video_token_pooling"] = inputs["video_token_pooling"][:8]
    with pytest.raises(ValueError, match="2 x 2 blocks of 9 patches, too few for the 81"):
        encode(model, inputs, 0.5)


def test_an_untrained_scorer_gives_all_blocks_the_same_small_score():
    model = STTSForConditionalGeneration(tiny_config())
    output = encode(model, video_inputs(model.config, [3]), 0.5)
    torch.testing.assert_close(
        output.token_scores[0], torch.full_like(output.token_scores[0], 0.1192), atol=1e-4, rtol=0
    )


def test_grouped_key_heads_are_repeated():
    grouped = tiny_model(tiny_config(num_key_value_heads=2))
    full = tiny_model()
    state = grouped.state_dict()
    for name, weight in state.items():
        if ".vision_tower.layers." in name and (".k_proj." in name or ".v_proj." in name):
            heads = weight.unflatten(0, (2, 8)).repeat_interleave(2, dim=0)
            state[name] = heads.flatten(0, 1)
    full.load_state_dict(state)
    inputs = video_inputs(full.config, [4])
    for ratio in (0.0, 0.5):
        expected = torch.cat(encode(full, inputs, ratio).pooler_output)
        assert_features_close(torch.cat(encode(grouped, inputs, ratio).pooler_output), expected)


def test_hidden_states_of_videos_are_those_of_every_layer():
    model = tiny_model()
    inputs = video_inputs(model.config, [3, 2])
    features = model.model.get_video_features(**inputs, pruning_ratio=0.5, output_hidden_states=True)
    config = model.config.vision_config
    assert len(features.hidden_states) == config.num_hidden_layers + 1
    kept = sum(int(mask.sum()) for mask in features.keep_mask) * inputs["video_token_pooling"].shape[1]
    for index, states in enumerate(features.hidden_states):
        dense = (*inputs["pixel_values_videos"].shape[:2], config.hidden_size)
        assert tuple(states.shape) == (dense if index <= config.pruning_layer + 1 else (kept, config.hidden_size))
    assert torch.equal(features.last_hidden_state, features.hidden_states[-1])


def test_hidden_states_without_pruning_are_stocks():
    model = tiny_model()
    inputs = video_inputs(model.config, [3])
    found = model.model.get_video_features(**inputs, pruning_ratio=0.0, output_hidden_states=True)
    expected = model.model.vision_tower(inputs["pixel_values_videos"], output_hidden_states=True)
    order = inputs["video_token_pooling"].flatten()
    for ours, theirs in zip(found.hidden_states, expected.hidden_states, strict=True):
        theirs = theirs if ours.dim() == 3 else theirs.flatten(0, 1)[order]
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_attention_weights_of_videos_are_refused():
    model = tiny_model()
    with pytest.raises(ValueError, match="`output_attentions` is True, but attention within the frames"):
        model.model.get_video_features(**video_inputs(model.config, [3]), output_attentions=True)
