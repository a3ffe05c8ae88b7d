"""The naive reference against the authors' numbers: what every other parity test leans on."""

import pytest
import torch

from tests.fixture_files import VisionFixture, load_vision_fixture, pooling_table, vision_fixtures
from tests.naive import (
    NaiveGeometry,
    NaiveVisionOutput,
    naive_bias,
    naive_budget,
    naive_first_fit_descending,
    naive_keep_mask,
    naive_temporal_loss,
    naive_vision_tower,
    weights_from_original,
)
from tests.paper import KEPT_BLOCKS

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


@pytest.mark.parametrize(("ratio", "videos", "expected"), KEPT_BLOCKS)
def test_counts_are_the_papers(ratio, videos, expected):
    assert sum(frames * 81 - naive_budget(ratio, frames, 81) for frames in videos) == expected


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        pytest.param(0.9, [4, 0], id="budget-beyond-the-other-frames"),
        pytest.param(0.25, [4, 2], id="lowest-two"),
        pytest.param(1.0, [0, 0], id="text-only"),
        pytest.param(0.0, [4, 4], id="nothing"),
    ],
)
def test_first_frame_is_kept_until_ratio_one(ratio, expected):
    scores = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.4, 0.3, 0.2, 0.1]])
    assert naive_keep_mask(scores, ratio).sum(dim=1).tolist() == expected


def test_ties_drop_the_earlier_block():
    keep_mask = naive_keep_mask(torch.full((3, 4), 0.5), 0.5)
    assert keep_mask.tolist() == [[True] * 4, [False] * 4, [False, False, True, True]]


def test_budget_of_a_ratio_that_is_no_binary_fraction():
    assert naive_budget(0.7, 70, 81) == 3969


def test_textbook_packing():
    # 6 opens a bin, 5 another; 4 fits beside 6; 3 and 2 beside 5; the empty frame goes nowhere.
    assert naive_first_fit_descending([2, 5, 0, 6, 3, 4], capacity=10) == [[3, 5], [1, 4, 0]]


def test_equal_counts_are_packed_in_frame_order():
    # Only this order of frames 1 and 2 gives the refilled features of the one-video reference file.
    assert naive_first_fit_descending([9, 3, 3, 4], capacity=9) == [[0], [3, 1], [2]]


def test_temporal_loss_without_a_second_frame_is_zero():
    assert naive_temporal_loss([torch.ones(1, 4)], [torch.zeros(1, 4)]) == 0


def test_bias_of_border_blocks_follows_the_patch_grid():
    # One 2 x 3 patch grid a frame, windows of two patches a row: the second window of a row has one patch only.
    table = torch.tensor([[0, 1], [2, -1], [3, 4], [5, -1]])
    scores = torch.tensor([[0.5, 0.5, 0.5, 0.5], [0.2, 0.6, 0.9, 0.1]])
    bias = naive_bias(scores, torch.cat([table, torch.where(table >= 0, table + 6, -1)]), patch_grid=(2, 3))
    expected = torch.tensor([[0.0] * 6, [-2.0, -2.0, 0.0, 0.0, 0.0, -2.0]])
    torch.testing.assert_close(bias, expected, rtol=0, atol=1e-5)  # the 1e-6 in the denominator
