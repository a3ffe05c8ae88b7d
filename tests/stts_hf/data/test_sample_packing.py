"""Which rows share a row of the batch."""

import pickle

import numpy as np
import pytest

from stts_hf import PackedDataset, RowError
from stts_hf.data import sample_packing

LENGTHS = np.random.default_rng(0).integers(50, 900, 500).tolist()
ROWS = [{"id": f"row-{index}"} for index in range(500)]


def ids(packed):
    return [[row["id"] for row in packed[index]] for index in range(len(packed))]


def test_every_row_once_and_within_the_budget():
    packed = PackedDataset(ROWS, LENGTHS, 1000)
    assert sorted(index for group in packed.groups for index in group) == list(range(500))
    assert max(sum(LENGTHS[index] for index in group) for group in packed.groups) <= 1000
    assert packed.lengths == [sum(LENGTHS[index] for index in group) for group in packed.groups]


def test_groups_are_nearly_as_few_as_can_be():
    packed = PackedDataset(ROWS, LENGTHS, 1000)
    assert len(packed) <= 1.05 * -(-sum(LENGTHS) // 1000)
    assert packed.fill_rate == pytest.approx(sum(LENGTHS) / (1000 * len(packed)))
    assert str(packed).startswith(f"500 samples in {len(packed)} rows of up to 1000 tokens")


def test_the_seed_settles_everything():
    packed = PackedDataset(ROWS, LENGTHS, 1000, seed=3)
    assert ids(packed) == ids(PackedDataset(ROWS, LENGTHS, 1000, seed=3)) == ids(pickle.loads(pickle.dumps(packed)))
    assert ids(packed) != ids(PackedDataset(ROWS, LENGTHS, 1000, seed=4))


def test_order_stays_random():
    """Neither the data set's order nor the lengths show in the order of the groups or of rows within one."""
    packed = PackedDataset(ROWS, LENGTHS, 1000)
    places = np.arange(len(packed))
    assert abs(np.corrcoef(places, [group[0] for group in packed.groups])[0, 1]) < 0.15
    assert abs(np.corrcoef(places, [LENGTHS[group[0]] for group in packed.groups])[0, 1]) < 0.15
    firsts = [LENGTHS[group[0]] > LENGTHS[group[-1]] for group in packed.groups if len(group) > 1]
    assert 0.35 < np.mean(firsts) < 0.65


def test_windows_keep_rows_together_that_the_shuffle_put_together(monkeypatch):
    in_one_window = len(PackedDataset(ROWS, LENGTHS, 1000))
    monkeypatch.setattr(sample_packing, "WINDOW", 10)
    packed = PackedDataset(ROWS, LENGTHS, 1000)
    assert len(packed) > in_one_window
    counts = np.cumsum([len(group) for group in packed.groups])
    assert set(range(10, 501, 10)) <= set(counts.tolist())


def test_a_row_longer_than_the_budget_is_named():
    with pytest.raises(RowError, match="Row 'row-1' has 30 tokens after pruning, but budget is 25"):
        PackedDataset(ROWS[:3], [10, 30, 10], 25)


@pytest.mark.parametrize(
    ("lengths", "options", "said"),
    [
        ([1, 2], {}, "lengths has 2 entries for 3 rows"),
        ([1, 2, 3], {"budget": 0}, "budget must be a whole number of at least 1"),
    ],
)
def test_bad_options_are_refused(lengths, options, said):
    with pytest.raises(ValueError, match=said):
        PackedDataset(ROWS[:3], lengths, **({"budget": 10} | options))
