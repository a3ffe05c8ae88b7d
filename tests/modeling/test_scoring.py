"""Scorer, bias, temporal loss and selection against the naive reference, forward and gradients."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch

from stts_hf.modeling.scoring_stts import (
    TokenScorer,
    num_kept_blocks,
    previous_frame,
    random_ranking,
    score_bias,
    select_blocks,
    temporal_loss,
    temporal_similarity,
)
from tests.naive import (
    SCORER,
    naive_bias,
    naive_keep_mask,
    naive_scores,
    naive_similarity,
    naive_temporal_loss,
)
from tests.tiny import pooling_windows, randomise, window_grid

WIDTH, HEADS = 16, 4
# float32 sums of at most a hundred terms of order one.
FORWARD_TOLERANCE = 1e-6
GRADIENT_TOLERANCE = 1e-5  # of the largest entry of each gradient


@dataclass
class Clips:
    """Hidden states (T, N, D) of several videos, their windows (T * n, S), and what the optimised code takes."""

    hidden_states: list[torch.Tensor]
    tables: list[torch.Tensor]
    grids: list[tuple[int, int, int]]
    patch_grids: list[tuple[int, int]]

    @property
    def valid(self) -> torch.Tensor | None:
        valid = torch.cat(self.tables) >= 0
        return None if valid.all() else valid

    def blocks(self) -> torch.Tensor:
        """(G, S, D), padding slots zero."""
        blocks = [
            states.flatten(0, 1)[table.clamp_min(0)] * (table >= 0)[..., None]
            for states, table in zip(self.hidden_states, self.tables, strict=True)
        ]
        return torch.cat(blocks)

    def split(self, values: torch.Tensor) -> list[torch.Tensor]:
        """(G,) as one (T, n) per video."""
        parts = values.split([math.prod(grid) for grid in self.grids])
        return [part.view(grid[0], -1) for part, grid in zip(parts, self.grids, strict=True)]


def make_clips(videos: Sequence[tuple[int, tuple[int, int]]], window: tuple[int, int], seed: int = 0) -> Clips:
    """`videos` holds (frames, patch grid) of each."""
    generator = torch.Generator().manual_seed(seed)
    clips = Clips([], [], [], [])
    for frames, grid in videos:
        states = torch.randn(frames, grid[0] * grid[1], WIDTH, generator=generator)
        clips.hidden_states.append(states.requires_grad_())
        clips.tables.append(pooling_windows(frames, grid, window))
        clips.grids.append((frames, *window_grid(grid, window)))
        clips.patch_grids.append(grid)
    return clips


# At least three blocks to a row: of two, both are extremes, whose bias has hardly any gradient.
GEOMETRIES = {
    "one-video": ([(4, (6, 9))], (3, 3)),
    "different-lengths": ([(2, (6, 9)), (5, (6, 9)), (1, (6, 9))], (3, 3)),
    "different-grids": ([(3, (4, 9)), (2, (6, 9)), (4, (2, 12))], (2, 3)),
    "borders": ([(3, (8, 8)), (2, (4, 7))], (3, 3)),
}


@pytest.fixture(params=GEOMETRIES, ids=str)
def clips(request) -> Clips:
    return make_clips(*GEOMETRIES[request.param])


@pytest.fixture
def scorer() -> TokenScorer:
    module = TokenScorer(WIDTH, 24, HEADS)
    randomise(module, seed=1)
    return module


def scorer_weights(scorer: TokenScorer) -> dict[str, torch.Tensor]:
    return {f"{SCORER}.{name}": parameter for name, parameter in scorer.named_parameters()}


def naive_scores_of(scorer: TokenScorer, clips: Clips) -> list[torch.Tensor]:
    weights = scorer_weights(scorer)
    videos = zip(clips.hidden_states, clips.tables, strict=True)
    return [naive_scores(weights, HEADS, states, table) for states, table in videos]


def random_scores(clips: Clips, seed: int = 3) -> torch.Tensor:
    count = sum(math.prod(grid) for grid in clips.grids)
    return torch.rand(count, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def cotangent(values: torch.Tensor) -> torch.Tensor:
    return torch.randn(values.shape, generator=torch.Generator().manual_seed(5))


def assert_forward_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=FORWARD_TOLERANCE * max(1, expected.abs().max().item()))


def assert_gradients_close(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    largest = max(other.abs().max().item() for other in expected)
    for one, other in zip(actual, expected, strict=True):
        # Some are zero but for rounding of what they are made of: a key's bias shifts all logits of a query alike.
        scale = max(other.abs().max().item(), 1e-2 * largest)
        torch.testing.assert_close(one, other, rtol=0, atol=GRADIENT_TOLERANCE * scale)


def test_scores_are_the_naive_ones(clips, scorer):
    scores = scorer(clips.blocks(), clips.grids, clips.valid)
    for actual, expected in zip(clips.split(scores), naive_scores_of(scorer, clips), strict=True):
        assert_forward_close(actual, expected)


def test_gradients_of_scores_are_the_naive_ones(clips, scorer):
    inputs = [*clips.hidden_states, *scorer.parameters()]
    scores = scorer(clips.blocks(), clips.grids, clips.valid)
    expected = torch.cat([video.flatten() for video in naive_scores_of(scorer, clips)])
    weights = cotangent(scores)
    assert_gradients_close(
        torch.autograd.grad((scores * weights).sum(), inputs), torch.autograd.grad((expected * weights).sum(), inputs)
    )


def test_the_previous_video_is_no_neighbour(scorer):
    clips = make_clips([(3, (6, 6)), (2, (6, 6))], (3, 3))
    expected = torch.cat(naive_scores_of(scorer, clips))  # (5, n)
    run_together = scorer(clips.blocks(), [(5, 2, 2)]).view(5, -1)
    first_frame_of_second = expected[3]
    # With the wrong neighbour the comparison of the tests above fails by far, and only there.
    assert (run_together[3] - first_frame_of_second).abs().max() > 1e4 * FORWARD_TOLERANCE
    assert_forward_close(run_together[[0, 1, 2, 4]], expected[[0, 1, 2, 4]])


@pytest.mark.parametrize("changed", [0, 1, 2], ids=["first", "middle", "last"])
def test_each_video_stands_alone(scorer, changed):
    clips = make_clips([(3, (8, 8)), (2, (7, 4)), (2, (8, 8))], (3, 3))
    before = clips.split(scorer(clips.blocks(), clips.grids, clips.valid))
    clips.hidden_states[changed] = torch.randn_like(clips.hidden_states[changed])
    after = clips.split(scorer(clips.blocks(), clips.grids, clips.valid))
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [v != changed for v in range(3)]


def test_scores_of_a_video_do_not_depend_on_its_batch(scorer):
    together = make_clips([(3, (6, 6)), (2, (3, 6))], (3, 3))
    scores = together.split(scorer(together.blocks(), together.grids))
    for video in range(2):
        alone = Clips(*([part[video]] for part in vars(together).values()))
        assert_forward_close(scorer(alone.blocks(), alone.grids).view(scores[video].shape), scores[video])


def test_padding_slots_do_not_count(scorer):
    clips = make_clips([(2, (7, 4))], (3, 3))
    blocks = clips.blocks().detach()
    valid = clips.valid
    # A slot's weight is zero whatever the slot holds; only the mean relies on zeros.
    full = scorer.token_pooler(blocks, valid)
    wrong = scorer.token_pooler(blocks, None)
    border = (torch.cat(clips.tables) < 0).any(dim=1)
    assert (full - wrong).abs().amax(dim=1)[border].min() > 1e-3
    torch.testing.assert_close(full[~border], wrong[~border], rtol=0, atol=FORWARD_TOLERANCE)


def test_previous_frame_of_videos_with_different_grids():
    blocks = torch.arange(1, 11)  # 2 x 3 blocks, then 2 x 2
    assert previous_frame(blocks, [(2, 1, 3), (2, 2, 1)]).tolist() == [0, 0, 0, 1, 2, 3, 0, 0, 7, 8]


def test_scores_stay_float32_in_half_precision(scorer):
    clips = make_clips([(2, (6, 6))], (3, 3))
    exact = scorer(clips.blocks(), clips.grids)
    scores = scorer.bfloat16()(clips.blocks().bfloat16(), clips.grids)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, exact, rtol=0, atol=0.05)  # bf16 has 8 bits


@pytest.mark.parametrize("rescaling", ["row", "frame", "none"])
def test_bias_and_its_gradient_are_the_naive_ones(clips, rescaling):
    scores = random_scores(clips)
    bias = score_bias(scores, clips.grids, rescaling)
    actual, expected = [], []
    for part, video, table, grid in zip(
        clips.split(bias), clips.split(scores), clips.tables, clips.patch_grids, strict=True
    ):
        expected.append(naive_bias(video, table, grid, rescaling).flatten())
        spread = part.flatten()[:, None].expand(table.shape)[table >= 0]
        actual.append(torch.zeros(expected[-1].shape).scatter(0, table[table >= 0], spread))
    assert_forward_close(torch.cat(actual), torch.cat(expected))
    weights = cotangent(torch.cat(expected))
    (gradient,) = torch.autograd.grad((torch.cat(actual) * weights).sum(), scores)
    (expected_gradient,) = torch.autograd.grad((torch.cat(expected) * weights).sum(), scores)
    # Those of a row's extremes nearly cancel: they are differences of terms as large as this.
    largest_term = weights.abs().max() / (closest_extremes(clips, scores, rescaling) + 1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-6 * largest_term.item())
    assert expected_gradient.abs().max() > 1e-2 * largest_term


def closest_extremes(clips: Clips, scores: torch.Tensor, rescaling: str) -> torch.Tensor:
    """The smallest span over which scores are rescaled."""
    over = {"row": (-1,), "frame": (-2, -1), "none": ()}[rescaling]
    spans = [torch.ones(())]
    for video, grid in zip(clips.split(scores.detach()), clips.grids, strict=True):
        later = video.view(grid)[1:]
        if over and len(later):
            spans.append((later.amax(over) - later.amin(over)).min())
    return torch.stack(spans).min()


def test_rows_are_rescaled_one_by_one():
    scores = torch.tensor([0.0] * 4 + [0.1, 0.2, 0.6, 0.9])
    row = score_bias(scores, [(2, 2, 2)], "row")[4:]
    torch.testing.assert_close(row, torch.tensor([-2.0, 0.0, -2.0, 0.0]), rtol=0, atol=1e-4)  # the 1e-6 below 0.1
    frame = score_bias(scores, [(2, 2, 2)], "frame")[4:]
    assert (row - frame).abs().max() > 0.5


def test_columns_are_not_rows():
    scores = torch.rand(12, generator=torch.Generator().manual_seed(0))
    wrong = score_bias(scores, [(2, 3, 2)], "row")
    assert (score_bias(scores, [(2, 2, 3)], "row") - wrong).abs().max() > 0.1


@pytest.mark.parametrize("rescaling", ["row", "frame"])
def test_equal_scores_are_rescaled_to_a_finite_bias(rescaling):
    scores = torch.full((8,), 0.5, requires_grad=True)
    bias = score_bias(scores, [(2, 2, 2)], rescaling)
    (gradient,) = torch.autograd.grad(bias.sum(), scores)
    torch.testing.assert_close(bias, torch.tensor([0.0] * 4 + [-2.0] * 4))
    assert gradient.isfinite().all()


def test_first_frames_and_videos_that_lose_nothing_have_no_bias():
    grids = [(2, 1, 2), (2, 1, 2)]
    bias = score_bias(torch.linspace(0.1, 0.9, 8), grids, biased=[False, True])
    assert bias[:6].tolist() == [0.0] * 6
    assert bias[6:].abs().max() > 1


def test_a_score_of_zero_has_a_finite_bias():
    scores = torch.tensor([0.5, 0.5, 0.0, 1.0], requires_grad=True)
    bias = score_bias(scores, [(2, 1, 2)], "none")
    (gradient,) = torch.autograd.grad(bias.sum(), scores)
    assert bias.isfinite().all()
    assert gradient.isfinite().all()


def test_bias_is_float32_for_half_precision_scores():
    assert score_bias(torch.rand(8).bfloat16(), [(2, 2, 2)]).dtype == torch.float32


def test_similarity_is_the_naive_one(clips):
    similarity = temporal_similarity(clips.blocks(), clips.grids)
    videos = zip(clips.split(similarity), clips.hidden_states, clips.tables, strict=True)
    for actual, states, table in videos:
        assert_forward_close(actual, naive_similarity(states, table))


@pytest.mark.parametrize("detach_target", [True, False], ids=["detached", "attached"])
def test_temporal_loss_and_its_gradient_are_the_naive_ones(clips, detach_target):
    scores = random_scores(clips)
    loss = temporal_loss(scores, clips.blocks(), clips.grids, detach_target)
    similarities = [
        naive_similarity(states, table) for states, table in zip(clips.hidden_states, clips.tables, strict=True)
    ]
    expected = naive_temporal_loss(clips.split(scores), similarities, detach_target)
    assert_forward_close(loss, expected)
    inputs = [scores, *clips.hidden_states]
    actual = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
    assert_gradients_close(actual, torch.autograd.grad(expected, inputs, allow_unused=True, materialize_grads=True))
    assert any(gradient.any() for gradient in actual[1:]) != detach_target


def test_temporal_loss_across_the_border_of_two_videos_is_another():
    clips = make_clips([(3, (6, 6)), (2, (6, 6))], (3, 3))
    scores = random_scores(clips)
    right = temporal_loss(scores, clips.blocks(), clips.grids)
    wrong = temporal_loss(scores, clips.blocks(), [(5, 2, 2)])
    assert (right - wrong).abs() > 1e-3


def test_temporal_loss_of_single_frames_is_zero_and_differentiable():
    clips = make_clips([(1, (6, 6)), (1, (6, 6))], (3, 3))
    scores = random_scores(clips)
    loss = temporal_loss(scores, clips.blocks(), clips.grids)
    (gradient,) = torch.autograd.grad(loss, scores)
    assert loss == 0
    assert not gradient.any()


def test_black_frames_leave_the_temporal_loss_finite():
    blocks = torch.zeros(8, 9, WIDTH, requires_grad=True)
    loss = temporal_loss(torch.full((8,), 0.5), blocks, [(2, 2, 2)], detach_target=False)
    (gradient,) = torch.autograd.grad(loss, blocks)
    assert loss == 0.25  # nothing is similar to nothing
    assert gradient.isfinite().all()


def test_temporal_loss_is_float32_in_half_precision():
    clips = make_clips([(3, (6, 6))], (3, 3))
    scores = random_scores(clips)
    loss = temporal_loss(scores, clips.blocks().bfloat16(), clips.grids)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, temporal_loss(scores, clips.blocks(), clips.grids), rtol=1e-2, atol=0)


@pytest.mark.parametrize(
    ("ratio", "videos", "expected"),
    [
        pytest.param(0.3, [64, 64], 7258, id="128-frames-30"),
        pytest.param(0.4, [64, 64], 6222, id="128-frames-40"),
        pytest.param(0.5, [64, 64], 5184, id="128-frames-50"),
        pytest.param(0.3, [256], 14516, id="256-frames-30"),
        pytest.param(0.4, [256], 12442, id="256-frames-40"),
        pytest.param(0.5, [256], 10368, id="256-frames-50"),
        pytest.param(0, [64, 64], 10368, id="128-frames-0"),
        pytest.param(1, [256], 0, id="256-frames-100"),
    ],
)
def test_counts_are_the_papers(ratio, videos, expected):
    assert sum(num_kept_blocks(frames, 81, ratio) for frames in videos) == expected


@pytest.mark.parametrize("percent", range(0, 100, 5))
def test_budget_is_exact_for_decimal_ratios(percent):
    ratio = percent / 100
    for frames in [*range(1, 130), 256, 1024]:
        for blocks in (1, 9, 80, 81):
            dropped = min(math.floor(Fraction(percent, 100) * frames * blocks), (frames - 1) * blocks)
            assert num_kept_blocks(frames, blocks, ratio) == frames * blocks - dropped, (frames, blocks)


@pytest.mark.parametrize(("ratio", "expected"), [(0, 9), (0.5, 9), (0.999, 9), (1, 0)])
def test_a_single_frame_loses_nothing_below_ratio_one(ratio, expected):
    assert num_kept_blocks(1, 9, ratio) == expected


def test_a_budget_beyond_the_other_frames_leaves_frame_zero():
    grids = [(3, 2, 2)]
    kept = num_kept_blocks(3, 4, 0.9)  # floor(10.8) of 12, but only 8 may go
    keep_mask, kept_blocks = select_blocks(torch.arange(12, 0, -1).float() * -1, grids, [kept])
    assert kept_blocks.tolist() == [0, 1, 2, 3]
    assert keep_mask.tolist() == [True] * 4 + [False] * 8


@pytest.mark.parametrize("ratio", [0, 0.2, 0.5, 0.77, 0.95, 1])
@pytest.mark.parametrize("levels", [1000, 3, 1], ids=["no-ties", "many-ties", "all-equal"])
def test_selection_is_the_naive_one(clips, ratio, levels):
    scores = (random_scores(clips).detach() * levels).floor() / levels
    num_kept = [num_kept_blocks(frames, rows * cols, ratio) for frames, rows, cols in clips.grids]
    keep_mask, kept_blocks = select_blocks(scores, clips.grids, num_kept)
    expected = torch.cat([naive_keep_mask(video, ratio).flatten() for video in clips.split(scores)])
    assert torch.equal(keep_mask, expected)
    assert torch.equal(kept_blocks, expected.nonzero().squeeze(-1))


def test_of_equals_the_earlier_goes_first():
    keep_mask, _ = select_blocks(torch.full((12,), 0.5), [(3, 2, 2)], [6])
    assert keep_mask.view(3, 4).tolist() == [[True] * 4, [False] * 4, [False, False, True, True]]


def test_frame_zero_stays_though_it_has_the_lowest_scores():
    scores = torch.cat([torch.zeros(4), torch.ones(8)])
    keep_mask, _ = select_blocks(scores, [(3, 2, 2)], [5])
    assert keep_mask.view(3, 4).sum(dim=1).tolist() == [4, 0, 1]


def test_selection_leaves_the_scores_as_they_are():
    scores = torch.rand(12)
    before = scores.clone()
    select_blocks(scores, [(3, 2, 2)], [6])
    assert torch.equal(scores, before)


def test_scores_that_are_no_numbers_go_first_but_not_before_frame_zero():
    scores = torch.tensor([math.nan, 0.1, math.nan, 0.9, math.inf, math.nan])
    keep_mask, _ = select_blocks(scores, [(3, 1, 2)], [4])
    assert keep_mask.tolist() == [True, True, False, True, True, False]


def test_infinite_scores_do_not_displace_frame_zero():
    scores = torch.tensor([0.5, 0.5, math.inf, math.inf, math.inf, math.inf])
    keep_mask, _ = select_blocks(scores, [(3, 1, 2)], [3])
    assert keep_mask.tolist() == [True, True, False, False, False, True]


def test_a_seeded_random_ranking_of_a_video_does_not_depend_on_its_batch():
    grids = [(3, 2, 2), (2, 3, 3)]
    together = random_ranking(grids, torch.device("cpu"), seed=4)
    apart = [random_ranking([grid], torch.device("cpu"), seed=4) for grid in grids]
    assert torch.equal(together, torch.cat(apart))
    assert not torch.equal(together, random_ranking(grids, torch.device("cpu"), seed=5))


def test_a_random_ranking_without_a_seed_follows_the_global_generator():
    grids = [(3, 2, 2)]
    torch.manual_seed(0)
    first, second = random_ranking(grids, torch.device("cpu")), random_ranking(grids, torch.device("cpu"))
    torch.manual_seed(0)
    assert torch.equal(first, random_ranking(grids, torch.device("cpu")))
    assert not torch.equal(first, second)


def test_a_seeded_random_ranking_leaves_the_global_generator_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    random_ranking([(3, 2, 2)], torch.device("cpu"), seed=4)
    assert torch.equal(torch.rand(3), expected)
