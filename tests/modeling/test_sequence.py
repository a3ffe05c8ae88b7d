"""Dropping tokens from plain tensors and finding the way back; nothing here knows of Molmo2."""

import pytest
import torch
from transformers import DynamicCache

from stts_hf.modeling.cache_stts import CacheRecord
from stts_hf.modeling.plan_stts import assign_to_rows
from stts_hf.modeling.sequence_stts import (
    KeptSequence,
    Tokens,
    close_gaps,
    find_samples,
    gather_columns,
)
from stts_hf.modeling.vision_tokens_stts import placeholders_of_videos

# Two rows of 8 tokens; the first loses 3, the second 5.
KEPT_TOKENS = torch.tensor([[1, 1, 0, 1, 0, 0, 1, 1], [1, 0, 0, 1, 0, 0, 0, 1]]).bool()
LEFT = [[0, 1, 3, 6, 7], [-1, -1, 0, 3, 7]]
POSITIONS = torch.tensor([[0, 1, 3, 6, 7], [-1, -1, 0, 1, 3]])  # the next are 8 and 4
RIGHT = [[0, 1, 3, 6, 7], [0, 3, 7, -1, -1]]


def sequence(fill_right: bool = False) -> KeptSequence:
    return gather_columns(KEPT_TOKENS, 5, fill_right)


@pytest.mark.parametrize(("fill_right", "expected"), [(False, LEFT), (True, RIGHT)], ids=["left", "right"])
def test_kept_tokens_keep_their_order_and_filler_goes_to_one_side(fill_right, expected):
    kept = sequence(fill_right)
    assert kept.kept_indices.tolist() == expected
    assert kept.is_filler.tolist() == [[place < 0 for place in row] for row in expected]
    assert kept.length == 8


@pytest.mark.parametrize("fill_right", [False, True], ids=["left", "right"])
def test_random_rows_equal_nonzero(fill_right):
    generator = torch.Generator().manual_seed(0)
    kept_tokens = torch.rand(20, 30, generator=generator) < torch.rand(20, 1, generator=generator)
    new_length = int(kept_tokens.sum(-1).max())
    kept = gather_columns(kept_tokens, new_length, fill_right)
    assert kept.kept_indices.shape == (20, new_length)
    for row, places in zip(kept_tokens, kept.kept_indices, strict=True):
        assert torch.equal(places[places >= 0], row.nonzero()[:, 0])


@pytest.mark.parametrize("trailing", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize("fill_right", [False, True], ids=["left", "right"])
def test_take_gathers_columns_and_fills(fill_right, trailing):
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 100, (2, 8, *trailing), generator=generator)
    taken = sequence(fill_right).take(values, -7)
    for row, places in enumerate(RIGHT if fill_right else LEFT):
        for column, place in enumerate(places):
            assert torch.equal(taken[row, column], values[row, place] if place >= 0 else torch.full(trailing, -7))


def test_take_lets_the_gradient_through():
    values = torch.randn(2, 8, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(sequence().take(values, 0.0).sum(), values)
    assert torch.equal(gradient, KEPT_TOKENS[..., None].expand(2, 8, 3).float())


def test_take_repeats_a_single_row():
    assert sequence().take(torch.arange(8)[None], -1).tolist() == LEFT


def test_no_mask_means_all_but_filler():
    assert sequence().take_mask(None).tolist() == [[1] * 5, [0, 0, 1, 1, 1]]


def test_a_padding_mask_is_cut_and_filler_is_masked():
    mask = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 0]])
    assert sequence().take_mask(mask).tolist() == [[0, 1, 1, 1, 1], [0, 0, 1, 1, 0]]


def test_original_positions_are_kept():
    positions = torch.arange(8)[None] + 10
    assert sequence().take_position_ids(positions).tolist() == [[10, 11, 13, 16, 17], [0, 0, 10, 13, 17]]


def test_compact_positions_close_the_gaps():
    positions = torch.arange(8)[None] + 10
    assert sequence().take_position_ids(close_gaps(positions, ~KEPT_TOKENS, None)).tolist() == [
        [10, 11, 12, 13, 14],
        [0, 0, 10, 11, 12],
    ]


def test_compact_positions_keep_the_jumps_of_the_caller():
    positions = torch.tensor([0, 1, 2, 20, 21, 22, 23, 24]).expand(2, -1)
    assert sequence(True).take_position_ids(close_gaps(positions, ~KEPT_TOKENS, None)).tolist() == [
        [0, 1, 19, 20, 21],
        [0, 18, 19, 0, 0],
    ]


def test_compact_positions_start_over_with_each_sample():
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 2, 0, 1, 2, 3, 4]])
    samples = find_samples(positions)
    assert sequence(True).take_position_ids(close_gaps(positions, ~KEPT_TOKENS, samples)).tolist() == [
        [0, 1, 2, 0, 1],
        [0, 0, 1, 0, 0],
    ]


def test_compact_positions_of_random_samples_count_what_is_left():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        lengths = torch.randint(1, 7, (5,), generator=generator).tolist()
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        kept_tokens = torch.rand(positions.shape, generator=generator) < 0.6
        kept_tokens[0, 0] = True
        kept = gather_columns(kept_tokens, int(kept_tokens.sum()))
        expected = [
            int(kept_tokens[0, start:place].sum())
            for start, length in zip([sum(lengths[:i]) for i in range(5)], lengths, strict=True)
            for place in range(start, start + length)
            if kept_tokens[0, place]
        ]
        closed = close_gaps(positions, ~kept_tokens, find_samples(positions))
        assert kept.take_position_ids(closed)[0].tolist() == expected


@pytest.mark.parametrize(
    ("positions", "samples"),
    [
        ([0, 1, 2, 3], [1, 1, 1, 1]),
        ([0, 1, 0, 1], [1, 1, 2, 2]),
        ([0, 0, 0, 1], [1, 2, 3, 3]),
        ([5, 9, 30, 31], [1, 1, 1, 1]),
        ([3, 4, 1, 7], [1, 1, 2, 2]),
    ],
    ids=str,
)
def test_a_sample_begins_where_positions_do_not_grow(positions, samples):
    found = find_samples(torch.tensor([positions]))[0]
    assert torch.unique_consecutive(found, return_inverse=True)[1].tolist() == [number - 1 for number in samples]


@pytest.mark.parametrize(
    ("positions", "mask", "samples"),
    [
        ([0, 1, 2, 3], [1, 1, 1, 1], [1, 1, 1, 1]),
        ([0, 0, 0, 1], [0, 0, 1, 1], [0, 0, 1, 1]),  # padding on the left
        ([1, 1, 0, 1], [0, 0, 1, 1], [0, 0, 1, 1]),
        ([0, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]),  # and on the right
        ([0, 1, 0, 2], [1, 1, 0, 1], [1, 1, 1, 1]),  # within a row, after a text that ended
        ([0, 1, 7, 0], [1, 1, 0, 1], [1, 1, 1, 2]),
    ],
    ids=str,
)
def test_hidden_tokens_begin_no_sample(positions, mask, samples):
    assert find_samples(torch.tensor([positions]), torch.tensor([mask]))[0].tolist() == samples


def test_placeholders_belong_to_what_was_opened_last():
    #        text image  p  p  text frame p  p  end  frame p  image p
    opens = [0, 2, 0, 0, 0, 1, 0, 0, 0, 1, 0, 2, 0]
    patch = [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 0, 1]
    starts = torch.tensor([opens])
    found = placeholders_of_videos(torch.tensor([patch]).bool(), starts == 1, starts == 2)
    assert found[0].nonzero()[:, 0].tolist() == [6, 7, 10]


def test_a_placeholder_that_nothing_opened_is_no_videos():
    none = torch.zeros(1, 3, dtype=torch.bool)
    assert not placeholders_of_videos(~none, none, none).any()


@pytest.mark.parametrize(
    ("per_row", "videos", "rows"),
    [
        ([6, 4], [6, 4], [[0], [1]]),
        ([10, 4], [6, 4, 4], [[0, 1], [2]]),
        ([0, 6, 0], [6], [[], [0], []]),
        ([0], [], [[]]),
    ],
    ids=str,
)
def test_videos_go_to_the_rows_that_hold_their_placeholders(per_row, videos, rows):
    assert assign_to_rows("video", per_row, videos) == rows


@pytest.mark.parametrize(
    ("per_row", "videos", "message"),
    [
        ([5], [6], r"Row 0 .* 5 video placeholder tokens, .* \[6\] tokens"),
        ([7], [6], r"Row 0 .* 7 video placeholder tokens, .* \[6\] tokens"),
        ([6, 3], [6, 4], r"Row 1 .* 3 video placeholder tokens, .* \[4\] tokens"),
        ([4, 6], [6, 4], r"Row 0 .* 4 video placeholder tokens, .* \[6\] tokens"),
        ([6], [6, 4], r"`pixel_values_videos` holds 2 videos, .* tokens for 1"),
        ([0], [6], r"`pixel_values_videos` holds 1 videos, .* tokens for 0"),
    ],
)
def test_placeholders_that_are_not_whole_videos_are_refused(per_row, videos, message):
    with pytest.raises(ValueError, match=message):
        assign_to_rows("video", per_row, videos)


def cached() -> DynamicCache:
    """A cache of five columns in two rows, with a record of eight tokens of the caller."""
    cache = DynamicCache()
    cache.update(torch.zeros(2, 1, 5, 4), torch.zeros(2, 1, 5, 4), 0)
    ids = torch.tensor(LEFT).where(torch.tensor(LEFT) < 0, torch.tensor(LEFT) + torch.tensor([[0], [8]]))
    CacheRecord.attach(cache, CacheRecord(torch.tensor(LEFT), POSITIONS, 8, ids))
    return cache


def record_of(cache: DynamicCache) -> CacheRecord:
    record = CacheRecord.of(cache)
    assert record is not None
    return record


def test_tokens_after_the_end_of_a_row_take_no_position():
    answered = record_of(cached()).answered(3)
    mask = torch.ones(2, 14, dtype=torch.int64)
    mask[1, 9:12] = 0  # the second row ended after one token; the last of these is new
    hidden = answered.hide(KeptSequence(answered.kept_indices, 11).take_mask(mask[:, :11]))
    positions = hidden.positions_of_new(Tokens(torch.ones_like(mask[:, 11:]), None, mask[:, 11:]))
    assert positions[0].tolist() == [11, 12, 13]
    assert positions[1, 1:].tolist() == [5, 6]


@pytest.mark.parametrize(("columns", "batch"), [(1, 2), (0, 1)])
def test_a_cache_of_another_shape_is_refused(columns, batch):
    cache, tokens = cached(), Tokens(torch.ones(batch, 1, dtype=torch.int64))
    for _ in range(columns):  # native code continued it
        cache.update(torch.zeros(2, 1, 1, 4), torch.zeros(2, 1, 1, 4), 0)
    with pytest.raises(ValueError, match=r"`past_key_values` holds .* recorded 5 for 2"):
        CacheRecord.resume(cache, tokens)


def test_a_record_that_is_set_aside_comes_back_after_an_error():
    cache = cached()
    record = record_of(cache)

    def fail():
        with CacheRecord.set_aside(cache):
            assert CacheRecord.of(cache) is None
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert CacheRecord.of(cache) is record
