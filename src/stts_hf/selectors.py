"""Selectors as users choose and see them, without PyTorch: all that `modeling/selectors_stts.py` registers."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from stts_hf.modeling.selectors_stts import SELECTORS as REGISTERED

# Label beside a choice and colour in pictures, purple and green as in the paper's; others have their name and `OTHER`.
LOOKS = {
    "scorer": ("learned scorer", "#7a4fd0"),
    "cosine": ("cosine to the previous frame", "#1f9d61"),
    "random": ("random (baseline)", "#c4761b"),
}
OTHER = "#4a6fa5"


class Selector(NamedTuple):
    """label: beside a choice. about: one line for readers. colour: of pictures. is_learned: needs a trained scorer."""

    label: str
    about: str
    colour: str
    is_learned: bool


class Selectors(Mapping[str, Selector]):
    """All selectors by their names, those that were registered later included."""

    def __getitem__(self, name: str) -> Selector:
        found = REGISTERED[name]
        label, colour = LOOKS.get(name, (name, OTHER))
        return Selector(label, (found.rank.__doc__ or "").strip().partition("\n")[0], colour, found.is_learned)

    def __iter__(self) -> Iterator[str]:
        return iter(REGISTERED)

    def __len__(self) -> int:
        return len(REGISTERED)

    def of_kind(self, is_learned: bool) -> list[str]:
        """Names of those that need a trained scorer, or of those that need none."""
        return [name for name in self if self[name].is_learned == is_learned]


SELECTORS = Selectors()
