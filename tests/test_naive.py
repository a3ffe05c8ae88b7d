"""The naive reference against the authors' numbers: what every other parity test leans on."""

import pytest
import torch

from tests.fixture_files import VisionFixture, load_vision_fixture, pooling_table, vision_fixtures
from tests.naive import (
    NaiveGeometry,
    NaiveVisionOutput,
    naive_bias,
    naive_vision_tower,
    weights_from_original,
)

# The reference is float32 on another build of the same kernels; sums of a few hundred terms agree to about 1e-6.
SCORE_TOLERANCE = 1e-5
FEATURE_TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=vision_fixtures(), ids=lambda path: path.stem)
def fixture(request) -> VisionFixture:
    return load_vision_fixture(request.param)


def run(fixture: VisionFixture, refill: bool = False) -> NaiveVisionOutput:
    geometry = NaiveGeometry(fixture.num_heads, fixture.pruning_layer, fixture.feature_layers, fixture.patch_grid)
    table = pooling_table(sum(fixture.num_frames), fixture.patch_grid, fixture.pooling_size)
    weights = weights_from_original(fixture.weights)
    with torch.no_grad():
        return naive_vision_tower(
            weights,
            geometry,
            fixture.pixel_patches,
            fixture.num_frames,
            table,
            fixture.pruning_ratio,
            refill=refill,
        )


@pytest.fixture(scope="module")
def output(fixture) -> NaiveVisionOutput:
    return run(fixture)


@pytest.fixture(scope="module")
def refilled_output(fixture) -> NaiveVisionOutput:
    return run(fixture, refill=True)


def assert_features_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=FEATURE_TOLERANCE * expected.abs().max().item())


def test_scores_are_the_authors(fixture, output):
    counted = fixture.counted_scores
    expected = fixture.expected["scores"][counted]
    torch.testing.assert_close(torch.cat(output.scores)[counted], expected, rtol=0, atol=SCORE_TOLERANCE)


def test_keep_mask_is_the_authors(fixture, output):
    assert torch.equal(torch.cat(output.keep_masks), fixture.expected["keep_mask"])


def test_pooled_features_are_the_authors(fixture, output):
    assert_features_close(output.pooled_features, fixture.expected["pooled_features"])


def test_refilled_features_are_the_authors(fixture, refilled_output):
    assert_features_close(refilled_output.pooled_features, fixture.expected["pooled_features_refill"])


def test_bins_are_as_many_as_the_authors(fixture, output):
    assert len(output.bins) == fixture.expected["num_bins"].item()


def test_refilled_patches_are_as_many_as_the_authors(fixture, refilled_output):
    assert refilled_output.num_refilled_patches == fixture.expected["num_refilled_patches"].item()


def test_temporal_loss_is_the_authors(fixture, output):
    if len(fixture.num_frames) > 1:
        pytest.skip("the reference counts the pair across the border of two videos")
    expected = fixture.expected["temporal_loss"].reshape(())
    torch.testing.assert_close(output.temporal_loss, expected, rtol=0, atol=1e-5)


def test_bias_of_border_blocks_follows_the_patch_grid():
    # One 2 x 3 patch grid a frame, windows of two patches a row: the second window of a row has one patch only.
    table = torch.tensor([[0, 1], [2, -1], [3, 4], [5, -1]])
    scores = torch.tensor([[0.5, 0.5, 0.5, 0.5], [0.2, 0.6, 0.9, 0.1]])
    bias = naive_bias(scores, torch.cat([table, torch.where(table >= 0, table + 6, -1)]), patch_grid=(2, 3))
    expected = torch.tensor([[0.0] * 6, [-2.0, -2.0, 0.0, 0.0, 0.0, -2.0]])
    torch.testing.assert_close(bias, expected, rtol=0, atol=1e-5)  # the 1e-6 in the denominator
