"""Selectors as users choose and see them, without PyTorch: names and `is_learned` as in `modeling/scoring_stts.py`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Selector:
    """label: beside a choice. about: one line for readers. colour: of pictures. is_learned: needs a trained scorer."""

    label: str
    about: str
    colour: str
    is_learned: bool = False


# Purple and green as in the paper's figures.
SELECTORS = {
    "scorer": Selector("learned scorer", "learned: the scorer in the vision tower rates each block", "#7a4fd0", True),
    "cosine": Selector(
        "cosine to the previous frame",
        "heuristic: blocks most similar to the previous frame are dropped first",
        "#1f9d61",
    ),
    "random": Selector("random (baseline)", "baseline: blocks are drawn at random", "#c4761b"),
}
LEARNED = [name for name, selector in SELECTORS.items() if selector.is_learned]
UNTRAINED = [name for name, selector in SELECTORS.items() if not selector.is_learned]
