"""Sequences that lose tokens, against lists: what is kept, where it goes, and what is to be predicted."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from stts_hf.modeling.sequence_stts import align_labels, find_samples, gather_columns, shorten_targets


def table(rows: int, columns: int) -> st.SearchStrategy[list[list[bool]]]:
    row = st.lists(st.booleans(), min_size=columns, max_size=columns)
    return st.lists(row, min_size=rows, max_size=rows)


tables = st.tuples(st.integers(1, 5), st.integers(1, 12)).flatmap(lambda shape: table(*shape))


@given(kept=tables, extra=st.integers(0, 4), right=st.booleans())
def test_kept_tokens_move_together(kept: list[list[bool]], extra: int, right: bool):
    length = max(map(sum, kept)) + extra
    sequence = gather_columns(torch.tensor(kept), length, fill_right=right)
    for row, found in zip(kept, sequence.kept_indices.tolist(), strict=True):
        places = [place for place, keeps in enumerate(row) if keeps]
        filler = [-1] * (length - len(places))
        assert found == (places + filler if right else filler + places)


@given(kept=tables, right=st.booleans())
def test_labels_follow_their_tokens(kept: list[list[bool]], right: bool):
    length = max(max(map(sum, kept)), 1)
    indices = gather_columns(torch.tensor(kept), length, fill_right=right).kept_indices
    labels = torch.arange(len(kept) * len(kept[0])).view(len(kept), -1)
    shortened = shorten_targets({"labels": labels}, indices, None)["labels"]
    for row, (places, aligned, taken) in enumerate(
        zip(indices.tolist(), align_labels(indices, labels).tolist(), shortened.tolist(), strict=True)
    ):
        expected = [-100 if place < 0 else int(labels[row, place]) for place in places]
        assert aligned == expected
        after_filler = [column > 0 and places[column - 1] < 0 for column in range(length)]
        assert taken == [-100 if after else label for after, label in zip(after_filler, expected, strict=True)]


@given(lengths=st.lists(st.integers(1, 5), min_size=1, max_size=5), start=st.integers(0, 3), data=st.data())
def test_samples_of_a_row_are_found(lengths: list[int], start: int, data: Any):
    """Wherever positions do not grow, among the tokens that are shown."""
    positions = [start + place for length in lengths for place in range(length)]
    shown = data.draw(st.lists(st.booleans(), min_size=len(positions), max_size=len(positions)))
    samples = find_samples(torch.tensor([positions]), torch.tensor([shown]))[0].tolist()
    number, last = 0, None
    for place, position in enumerate(positions):
        if shown[place]:
            number += last is None or position <= last
            last = position
            assert samples[place] == number
