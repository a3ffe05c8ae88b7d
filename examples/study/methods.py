"""The methods that the study compares, each a model that trains with `STTSTrainer` and answers with `generate`.

All but ToMe are settings of the shipped model, so they share its code and its budget: what differs is which blocks
stay. A method that is not trained prunes the frozen base. A selector that `modeling/selectors_stts.py` registers is two
methods, without another line here.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from stts_hf.checkpoints.families import family_of_checkpoint
from stts_hf.modeling.budget_stts import check_pruning_ratio
from stts_hf.selectors import SELECTORS

from .token_merging import MergingForConditionalGeneration

UNPRUNED = "none"
FROZEN = "scorer-answers"  # its runs are the frozen base, with a scorer fitted to answers
FIXED = "stts-answers-fixed"  # trains with that scorer, which stays as it is
BY_ANSWERS = "stts-answers"  # trains with a scorer that learns on
TOLD_TOO = (BY_ANSWERS, FIXED)  # whose trained weights are told what matters, as the frozen base is
ON_FROZEN = "(frozen base)"


@dataclass(frozen=True)
class Method:
    """
    One method, registered by its entry in `METHODS` alone.

    name: key in `METHODS`. label: in tables. settings: of the model's configuration; they win over the caller's. parts:
    what of a study beside its accuracies it takes part in: pruning "layers", test-time "scaling", "images", scores
    against "motion". keeps_scorer: whether training leaves the scorer as it was fitted to the base. trained: False for
    one that prunes the frozen base. merges: whether it is ToMe. told: what its ranking is told of the true masks: what
    matters to a "question", or to all questions about a "clip".
    """

    name: str
    label: str
    settings: Mapping[str, Any]
    parts: tuple[str, ...] = ()
    keeps_scorer: bool = False
    trained: bool = True
    merges: bool = False
    told: str = ""

    @property
    def has_runs(self) -> bool:
        """Whether it has runs; the others are asked of the weights of `FROZEN`'s."""
        return self.trained or self.name == FROZEN

    @property
    def ignores_seeds(self) -> bool:
        """Whether every seed gives the same answers, so that it is asked with the first alone."""
        return not self.trained and self.settings["selector"] == "cosine"

    def ratio(self, ratio: float) -> float:
        """The pruning ratio at which it runs where others run at `ratio`."""
        return float(self.settings.get("pruning_ratio", ratio))


# Without a scorer there is no temporal loss, which could reach the rest of the model where its target is not detached.
CHANGE = {"scorer_target": "change"}  # whatever the base's config says
NO_SCORER, RANDOM = CHANGE | {"selector": "cosine"}, CHANGE | {"selector": "random"}
SCORER = CHANGE | {"selector": "scorer", "score_bias": True}
ANSWERS = SCORER | {"scorer_target": "answers", "score_bias": False}
ALL = ("scaling", "images", "motion")
KNOWN = (
    Method(UNPRUNED, "No pruning", NO_SCORER | {"pruning_ratio": 0.0}, ("scaling", "images")),
    Method(BY_ANSWERS, "STTS by answers", ANSWERS, ("layers", *ALL)),
    Method(FIXED, "STTS by answers, scorer of the base", ANSWERS, ("motion",), keeps_scorer=True),
    Method("stts", "STTS", SCORER, ("layers", *ALL)),
    Method("stts-no-temporal", "STTS without temporal loss", SCORER | {"temporal_loss_weight": 0.0}, ("motion",)),
    Method("cosine", "Heuristic", NO_SCORER, ("motion",)),
    Method("random", "Random", RANDOM, ("scaling", "motion")),
    Method("tome", "ToMe", NO_SCORER, merges=True),
    Method("text-only", "Text only", NO_SCORER | {"pruning_ratio": 1.0}),
    Method("none-inference", f"No pruning {ON_FROZEN}", NO_SCORER | {"pruning_ratio": 0.0}, trained=False),
    Method(FROZEN, f"Scorer by answers {ON_FROZEN}", ANSWERS, ("motion",), trained=False),
    Method("cosine-inference", f"Heuristic {ON_FROZEN}", NO_SCORER, trained=False),
    Method("random-inference", f"Random {ON_FROZEN}", RANDOM, trained=False),
    Method("tome-inference", f"ToMe {ON_FROZEN}", NO_SCORER, trained=False, merges=True),
    Method("told", f"Told what a question is about {ON_FROZEN}", NO_SCORER, trained=False, told="question"),
    Method("told-clip", f"Told what a clip is asked {ON_FROZEN}", NO_SCORER, trained=False, told="clip"),
)


def all_methods() -> dict[str, Method]:
    """`KNOWN`, and those of other selectors, trained and on the frozen base, by their names."""
    methods = {method.name: method for method in KNOWN}
    known = {method.settings["selector"] for method in KNOWN}
    for name in (name for name in SELECTORS if name not in known):
        label, settings = SELECTORS[name].label, CHANGE | {"selector": name}
        methods[name] = Method(name, label, settings, ("motion",))
        methods[f"{name}-inference"] = Method(f"{name}-inference", f"{label} {ON_FROZEN}", settings, trained=False)
    return methods


METHODS = all_methods()


def methods_of(part: str) -> list[Method]:
    """The methods that take part in a part of a study, in the order of `METHODS`."""
    return [method for method in METHODS.values() if part in method.parts]


def load_method(
    method: str,
    checkpoint: str | os.PathLike,
    pruning_ratio: float,
    pruning_layer: int | None = None,
    seed: int = 0,
    **options: Any,
) -> Any:
    """
    The model of a method, a key of `METHODS`, with the weights of a `checkpoint` (folder or Hub id) of any backbone,
    ours or stock; ToMe of Molmo2 alone.

    pruning_ratio: `k` in [0, 1]; "none" is always at 0 and "text-only" at 1. pruning_layer: `l`, the checkpoint's if it
    is None; ToMe merges in every layer and has none. seed: of what is drawn, so that a call repeated gives the same
    model and the same answers: the blocks that "random" keeps outside training (in training they are drawn anew in
    every step, from PyTorch's global generator), and the scorer of a checkpoint that has none. options: for
    `from_pretrained`. Raises `ValueError` for an unknown method, and for a ratio, layer or seed that cannot be.
    """
    if method not in METHODS:
        raise ValueError(f"`method` is {method!r}, but must be one of {', '.join(METHODS)}.")
    settings = {"pruning_ratio": check_pruning_ratio(pruning_ratio), "selector_seed": seed}
    if pruning_layer is not None:
        settings["pruning_layer"] = pruning_layer
    model_class = (
        MergingForConditionalGeneration if METHODS[method].merges else family_of_checkpoint(os.fspath(checkpoint)).model
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return model_class.from_pretrained(checkpoint, **settings | dict(METHODS[method].settings) | options)
