"""The model classes against the authors' numbers: every reference file and checkpoint in the fixtures folder."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stts_hf.checkpoints.original import (
    SPECIAL_TOKENS,
    convert_original_config,
    load_original_config,
)
from stts_hf.modeling import vision_stts
from stts_hf.modeling.configuration_stts import STTSConfig
from stts_hf.modeling.modeling_stts import (
    STTSForConditionalGeneration,
    STTSModel,
)
from stts_hf.modeling.plan_stts import VideoFeatures
from tests.fixture_files import (
    VisionFixture,
    checkpoint_forms,
    load_vision_fixture,
    pooling_table,
    read_safetensors,
    vision_fixtures,
)
from tests.naive import weights_from_original
from tests.stts_hf.checkpoints.original_weights import native_weights, read_original

# The reference is float32 on another build of the same kernels; sums of a few hundred terms agree to about 1e-6.
SCORE_TOLERANCE = 1e-5
FEATURE_TOLERANCE = 1e-4  # of the largest feature
LOSS_TOLERANCE = 1e-5
LOGIT_TOLERANCE = 1e-4
LAYOUTS = {
    "varlen": {"packing": "varlen", "refill_single_frame_bins": False},
    "refill": {"packing": "first_fit_descending", "refill_single_frame_bins": True},
}


def build_model(fixture: VisionFixture) -> STTSModel:
    """Vision tower and connector of a reference file, in front of a text model of no account."""
    weights = weights_from_original(fixture.weights)
    width = weights["vision_tower.positional_embedding"].shape[1]
    heads = {"num_attention_heads": fixture.num_heads, "num_key_value_heads": fixture.num_heads}
    heads["head_dim"] = width // fixture.num_heads
    text_width, connector_width = weights["multi_modal_projector.image_projector.down_proj.weight"].shape
    patch_size = round((fixture.pixel_patches.shape[-1] / 3) ** 0.5)
    config = STTSConfig(
        vision_config={
            "hidden_size": width,
            "intermediate_size": weights["vision_tower.layers.0.mlp.fc1.weight"].shape[0],
            "num_hidden_layers": 1 + max(int(name.split(".")[2]) for name in weights if ".layers." in name),
            "image_size": [side * patch_size for side in fixture.patch_grid],
            "patch_size": patch_size,
            "pruning_ratio": fixture.pruning_ratio,
            "pruning_layer": fixture.pruning_layer,
            "pooling_size": list(fixture.pooling_size),
            **heads,
        },
        adapter_config={
            "vision_feature_layer": fixture.feature_layers,
            "hidden_size": width,
            "intermediate_size": connector_width,
            "text_hidden_size": text_width,
            **heads,
        },
        text_config={"hidden_size": text_width, "num_hidden_layers": 1, "vocab_size": 8, "intermediate_size": 8},
    )
    model = STTSModel(config).eval()
    loaded = model.load_state_dict(weights, strict=False)
    assert not loaded.unexpected_keys
    assert all(name.startswith("language_model.") for name in loaded.missing_keys)
    return model


def set_layout(config: STTSConfig, layout: str) -> None:
    config.vision_config.refill_single_frame_bins = False
    for name, value in LAYOUTS[layout].items():
        setattr(config.vision_config, name, value)


def video_grids(num_frames: list[int], patch_grid: tuple[int, int], pooling_size: tuple[int, int]) -> torch.Tensor:
    rows, cols = (side // window for side, window in zip(patch_grid, pooling_size, strict=True))
    return torch.tensor([[frames, rows, cols] for frames in num_frames])


@pytest.fixture(scope="module", params=vision_fixtures(), ids=lambda path: path.stem)
def fixture(request) -> VisionFixture:
    return load_vision_fixture(request.param)


@pytest.fixture(scope="module")
def model(fixture) -> STTSModel:
    return build_model(fixture)


def encode(model: STTSModel, fixture: VisionFixture, layout: str) -> VideoFeatures:
    set_layout(model.config, layout)
    with torch.no_grad():
        return model.get_video_features(
            fixture.pixel_patches,
            pooling_table(sum(fixture.num_frames), fixture.patch_grid, fixture.pooling_size),
            video_grids(fixture.num_frames, fixture.patch_grid, fixture.pooling_size),
            with_temporal_loss=True,
        )


def assert_features_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=FEATURE_TOLERANCE * expected.abs().max().item())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_are_the_authors(fixture, model, layout):
    counted = fixture.counted_scores
    scores = torch.cat(encode(model, fixture, layout).token_scores)
    expected = fixture.expected["scores"]
    torch.testing.assert_close(scores[counted], expected[counted], rtol=0, atol=SCORE_TOLERANCE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_keep_mask_is_the_authors(fixture, model, layout):
    assert torch.equal(torch.cat(encode(model, fixture, layout).keep_mask), fixture.expected["keep_mask"])


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        pytest.param("varlen", "pooled_features", id="varlen"),
        pytest.param("refill", "pooled_features_refill", id="refill"),
    ],
)
def test_pooled_features_are_the_authors(fixture, model, layout, expected):
    features = torch.cat(encode(model, fixture, layout).pooler_output)
    assert_features_close(features, fixture.expected[expected])


def test_bins_and_refilled_patches_are_as_many_as_the_authors(fixture, model, monkeypatch):
    bins, left = [], []
    first_fit_descending, drop = vision_stts.first_fit_descending, vision_stts.AttentionSpans.drop

    def record_bins(lengths, capacity):
        bins.append(first_fit_descending(lengths, capacity))
        return bins[-1]

    def record_left(spans, slots):
        left.append(len(slots))
        return drop(spans, slots)

    monkeypatch.setattr(vision_stts, "first_fit_descending", record_bins)
    monkeypatch.setattr(vision_stts.AttentionSpans, "drop", record_left)
    encode(model, fixture, "refill")
    kept = int(fixture.expected["keep_mask"].sum()) * fixture.pooling_size[0] * fixture.pooling_size[1]
    assert [len(found) for found in bins] == [fixture.expected["num_bins"].item()]
    assert [found - kept for found in left] == [fixture.expected["num_refilled_patches"].item()]


def test_temporal_loss_is_the_authors(fixture, model):
    if len(fixture.num_frames) > 1:
        pytest.skip("the reference counts the pair across the border of two videos")
    loss = encode(model, fixture, "varlen").temporal_loss
    expected = fixture.expected["temporal_loss"].reshape(())
    torch.testing.assert_close(loss, expected, rtol=0, atol=LOSS_TOLERANCE)


def test_one_video_of_the_wrong_length_would_be_seen(fixture, model):
    if len(fixture.num_frames) == 1:
        pytest.skip("there is no other video to take for a neighbour")
    together = replace(fixture, num_frames=[sum(fixture.num_frames)])
    assert not torch.equal(torch.cat(encode(model, together, "varlen").keep_mask), fixture.expected["keep_mask"])


def test_a_missing_refill_would_be_seen(fixture, model):
    if not fixture.expected["num_refilled_patches"].item():
        pytest.skip("no frame was alone in its bin with patches missing")
    expected = fixture.expected["pooled_features_refill"]
    difference = (torch.cat(encode(model, fixture, "varlen").pooler_output) - expected).abs().max()
    assert difference > 10 * FEATURE_TOLERANCE * expected.abs().max()


class Checkpoint:
    """An original training checkpoint as our model, and what the authors' code made of its prompt."""

    def __init__(self, form: Path):
        self.expected, metadata = read_safetensors(form.parent / "expected.safetensors")
        ids = {name.removeprefix("id:"): int(value) for name, value in metadata.items() if name.startswith("id:")}
        assert set(ids) >= set(SPECIAL_TOKENS.values())
        self.config = STTSConfig(**convert_original_config(load_original_config(form), ids))
        self.model = STTSForConditionalGeneration(self.config).eval()
        self.model.load_state_dict(native_weights(read_original(form)))

    def __call__(self, layout: str, rule: str = "original", ratio: float | None = None) -> Any:
        set_layout(self.config, layout)
        self.config.pruned_position_ids = rule  # type: ignore[assignment]  # one of the two
        vision_config = self.config.vision_config
        rows, cols = (side // vision_config.patch_size for side in vision_config.image_size)
        grid = rows, cols
        window = vision_config.pooling_size[0], vision_config.pooling_size[1]
        pixels = self.expected["pixel_patches"]
        with torch.no_grad():
            return self.model(
                input_ids=self.expected["input_ids"][None],
                mm_token_type_ids=self.expected["mm_token_type_ids"][None],
                pixel_values_videos=pixels,
                video_token_pooling=pooling_table(len(pixels), grid, window),
                video_grids=video_grids([len(pixels)], grid, window),
                pruning_ratio=ratio,
            )


@pytest.fixture(scope="module", params=checkpoint_forms(), ids=lambda form: f"{form.parent.name}-{form.name}")
def checkpoint(request) -> Checkpoint:
    return Checkpoint(request.param)


def assert_logits_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=LOGIT_TOLERANCE)


def test_scores_and_keep_mask_of_a_checkpoint_are_the_authors(checkpoint):
    output = checkpoint("varlen")
    expected = checkpoint.expected
    torch.testing.assert_close(output.token_scores[0], expected["scores"], rtol=0, atol=SCORE_TOLERANCE)
    assert torch.equal(output.keep_mask[0], expected["keep_mask"])


def test_pooled_features_of_a_checkpoint_are_the_authors(checkpoint):
    assert_features_close(checkpoint("varlen").image_hidden_states, checkpoint.expected["pooled_features"])


@pytest.mark.parametrize("rule", ["original", "compact"])
def test_pruned_logits_of_a_checkpoint_are_the_authors(checkpoint, rule):
    assert_logits_close(checkpoint("varlen", rule).logits[0], checkpoint.expected[f"logits_{rule}_positions"])


def test_dense_logits_of_a_checkpoint_are_the_authors(checkpoint):
    assert_logits_close(checkpoint("varlen", ratio=0).logits[0], checkpoint.expected["logits_dense"])


def test_the_other_position_rule_would_be_seen(checkpoint):
    actual, expected = checkpoint("varlen", "compact").logits[0], checkpoint.expected["logits_original_positions"]
    assert (actual - expected).abs().max() > 10 * LOGIT_TOLERANCE
