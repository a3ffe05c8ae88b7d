"""Scorer, bias and temporal loss against the naive reference, forward and gradients."""

from collections.abc import Sequence

import pytest
import torch

from stts_hf.benchmark.meters import peak_memory
from stts_hf.modeling.modeling_stts import STTSForConditionalGeneration
from stts_hf.modeling.scoring_stts import (
    SIMILARITY_CHUNK,
    TokenScorer,
    mean_error,
    previous_frame,
    score_bias,
    temporal_errors,
    temporal_similarity,
)
from tests.modeling.hidden_clips import GEOMETRIES, WIDTH, Clips, make_clips, random_scores
from tests.naive import SCORER, naive_bias, naive_scores, naive_similarity, naive_temporal_loss
from tests.tiny import randomise, tiny_config

HEADS = 4
# float32 sums of at most a hundred terms of order one.
FORWARD_TOLERANCE = 1e-6
GRADIENT_TOLERANCE = 1e-5  # of the largest entry of each gradient


def temporal_loss(*args, **kwargs) -> torch.Tensor:
    return mean_error(temporal_errors(*args, **kwargs))


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


def test_similarity_of_a_long_video_goes_by_some_frames_at_a_time():
    frames, blocks = 2 * SIMILARITY_CHUNK + 3, 4
    patches = torch.randn(frames * blocks, 9, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    flat = patches.float().view(frames, blocks, -1)
    expected = torch.nn.functional.cosine_similarity(flat[1:], flat[:-1], dim=-1)
    similarity, peak = peak_memory(
        lambda: temporal_similarity(patches, [(frames, 2, 2)]).view(frames, blocks), torch.device("cpu")
    )
    torch.testing.assert_close(similarity[1:], expected, rtol=0, atol=1e-6)
    assert not similarity[0].any()
    # In float32 some frames, and their products or squares; of all frames it would be twice as many.
    assert peak < 2.5 * (SIMILARITY_CHUNK + 1) * blocks * 9 * 16 * 4


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


def changing_blocks(generator: torch.Generator, grid: tuple[int, int, int]) -> torch.Tensor:
    """Patches (G, 4, 32) of a video in which each block has a chance of 1 in 12 to change in each frame."""
    frames, rows, cols = grid
    now = torch.randn(rows * cols, 4, 32, generator=generator)
    video = [now]
    for _ in range(frames - 1):
        changes = torch.rand(rows * cols, 1, 1, generator=generator) < 1 / 12
        now = torch.where(changes, torch.randn(now.shape, generator=generator), now)
        video.append(now)
    return torch.cat(video) + 0.01 * torch.randn(frames * rows * cols, 4, 32, generator=generator)


def test_a_new_scorer_learns_which_few_blocks_change():
    """From scores of 0.5, all fall to the flat end of the sigmoid and stay: 32 % are found."""
    torch.manual_seed(0)
    tower = STTSForConditionalGeneration(tiny_config(initializer_range=0.1)).model.vision_tower
    optimizer = torch.optim.AdamW(tower.scorer.parameters(), lr=3e-3)
    generator, grid = torch.Generator().manual_seed(0), (8, 6, 6)
    for _ in range(150):
        patches = torch.cat([changing_blocks(generator, grid) for _ in range(4)])
        temporal_loss(tower.scorer(patches, [grid] * 4), patches, [grid] * 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    patches = changing_blocks(generator, grid)
    target = 1 - temporal_similarity(patches, [grid])[36:]
    changed = target > 0.5
    highest = tower.scorer(patches, [grid])[36:].topk(int(changed.sum())).indices
    assert changed[highest].float().mean() > 0.9
