"""Groups samples into rows of a batch by their lengths alone, without decoding."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from stts_hf.modeling.video_processing_stts import check_count

from .encoding import check_length
from .rows import row_id

WINDOW = 1024  # rows that are grouped at a time: larger windows fill groups better, smaller ones keep them more random


class PackedDataset(Dataset):
    """
    Groups of rows that fit a token budget; item `i` is a list of rows, for `STTSDataCollator`.

    Rows are shuffled and cut into windows; within a window rows are placed by best fit, longest first. `seed` decides
    all groups at construction: their number never changes, every process and worker has the same, and a resumed
    training too. Their order in each epoch is the sampler's.

    Args:
        rows: map-style data set.
        lengths: tokens of each row after pruning, the column `length` of `prepare_rows`.
        budget: maximum tokens of a group after pruning; the collator's `pad_to` or `max_length`.
        seed: decides which rows share a group.
        max_samples: maximum rows of a group, None for no limit.

    Attributes:
        groups: indices into `rows`.
        fill_rate: share of all groups' tokens that are used.

    Raises:
        RowError: a row is longer than the budget.
        ValueError: an argument is out of range.
    """

    def __init__(
        self, rows: Any, lengths: Sequence[int], budget: int, *, seed: int = 0, max_samples: int | None = None
    ) -> None:
        for name, value in (("budget", budget), ("max_samples", max_samples or 1)):
            check_count(name, value)
        if len(lengths) != len(rows):
            raise ValueError(f"lengths has {len(lengths)} entries for {len(rows)} rows. Measure these rows.")
        if not len(rows):
            raise ValueError("rows is empty. Pass at least one row to pack.")
        self.rows, self.budget = rows, budget
        sizes = dict(enumerate(lengths))
        longest = max(sizes, key=lambda index: sizes[index])
        check_length(row_id(rows[longest], longest), sizes[longest], budget, argument="budget")
        generator = np.random.default_rng(seed)
        order = generator.permutation(len(rows)).tolist()
        self.groups: list[list[int]] = []
        for start in range(0, len(order), WINDOW):
            groups = best_fit(order[start : start + WINDOW], sizes, budget, max_samples)
            for place in generator.permutation(len(groups)):
                self.groups.append([groups[place][number] for number in generator.permutation(len(groups[place]))])
        self.lengths = [sum(sizes[index] for index in group) for group in self.groups]
        self.fill_rate = sum(self.lengths) / (budget * len(self.groups))

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, index: int) -> list[Any]:
        return [self.rows[row] for row in self.groups[index]]

    def __str__(self) -> str:
        return (
            f"{len(self.rows)} samples in {len(self)} rows of up to {self.budget} tokens after pruning "
            f"({len(self.rows) / len(self):.2f} a row, {self.fill_rate:.1%} filled)"
        )


def best_fit(
    items: Sequence[int], sizes: dict[int, int], budget: int, max_samples: int | None = None
) -> list[list[int]]:
    """Groups of `items` whose sizes add up to `budget` at most, by best fit in descending order of size."""
    groups: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (free tokens, group) of groups that are not full, ascending
    for item in sorted(items, key=lambda item: -sizes[item]):
        place = bisect_left(rooms, (sizes[item], 0))
        if place < len(rooms):
            room, number = rooms.pop(place)
            groups[number].append(item)
        else:
            room, number = budget, len(groups)
            groups.append([item])
        if max_samples is None or len(groups[number]) < max_samples:
            insort(rooms, (room - sizes[item], number))
    return groups
