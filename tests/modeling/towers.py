"""What the tests of the vision tower share: running it and the naive reference, and comparing them."""

import math

import torch

from stts_hf.modeling.configuration_stts import STTSConfig
from stts_hf.modeling.modeling_stts import STTSForConditionalGeneration
from stts_hf.modeling.plan_stts import VideoFeatures
from stts_hf.modeling.scoring_stts import random_ranking
from tests.modeling.reference import call_of
from tests.naive import NaiveGeometry, NaiveRule, NaiveVisionOutput, naive_vision_tower, weights_from_native
from tests.tiny import Video, build_inputs, patch_grid

# float32 through six layers; the largest error seen is a few times 1e-6 of the largest entry.
FORWARD_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 5e-5
FFD = "first_fit_descending"


def video_inputs(config: STTSConfig, num_frames: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
    """The tower's part of what the processor returns for these videos."""
    inputs = build_inputs([[Video(frames) for frames in num_frames]], config, seed=seed)
    return {name: inputs[name] for name in ("pixel_values_videos", "video_token_pooling", "video_grids")}


def encode(model: STTSForConditionalGeneration, inputs: dict[str, torch.Tensor], rule: NaiveRule) -> VideoFeatures:
    return model.model.get_video_features(**inputs, **call_of(rule), with_temporal_loss=True)


def encode_naively(
    model: STTSForConditionalGeneration, inputs: dict[str, torch.Tensor], rule: NaiveRule, num_frames: list[int]
) -> NaiveVisionOutput:
    config = model.config.vision_config
    layers = model.config.adapter_config.vision_feature_layer or ()
    geometry = NaiveGeometry(
        num_heads=config.num_attention_heads,
        pruning_layer=config.pruning_layer,
        feature_layers=[layer % config.num_hidden_layers for layer in layers],
        patch_grid=patch_grid(config),
    )
    given = None
    if config.selector == "random":
        rows, cols = config.block_grid
        drawn = [random_ranking([(frames, rows, cols)], torch.device("cpu"), seed=0) for frames in num_frames]
        given = [scores.view(frames, -1) for scores, frames in zip(drawn, num_frames, strict=True)]
    return naive_vision_tower(
        weights_from_native(dict(model.named_parameters())),
        geometry,
        inputs["pixel_values_videos"],
        num_frames,
        inputs["video_token_pooling"],
        rule,
        selector="given" if given else config.selector,
        given_scores=given,
        score_rescaling=config.score_rescaling,
        refill=config.refill_single_frame_bins,
        detach_target=model.config.detach_temporal_target,
    )


def vision_parameters(model: STTSForConditionalGeneration) -> dict[str, torch.nn.Parameter]:
    return {
        name.removeprefix("model."): parameter
        for name, parameter in model.named_parameters()
        if name.startswith(("model.vision_tower.", "model.multi_modal_projector."))
    }


def gradients(value: torch.Tensor, model: STTSForConditionalGeneration) -> dict[str, torch.Tensor]:
    parameters = vision_parameters(model)
    found = torch.autograd.grad(
        value, list(parameters.values()), allow_unused=True, materialize_grads=True, retain_graph=True
    )
    return dict(zip(parameters, found, strict=True))


def weighted(features: torch.Tensor) -> torch.Tensor:
    """A scalar whose gradient tells every entry of `features` from every other."""
    generator = torch.Generator().manual_seed(9)
    return (features * torch.randn(features.shape, generator=generator)).sum() / math.sqrt(max(features.numel(), 1))


def largest_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """In parts of the largest entry."""
    if expected.numel() == 0:
        return 0.0
    return ((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-12)).item()


def assert_features_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    assert largest_difference(actual, expected) < FORWARD_TOLERANCE


def assert_gradients_close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    for name in expected:
        # Some are zero but for rounding: a key's bias shifts all logits of a query alike.
        scale = max(expected[name].abs().max().item(), 3e-2 * largest)
        difference = (actual[name] - expected[name]).abs().max().item()
        assert difference <= GRADIENT_TOLERANCE * scale, name
