"""The methods that the study compares, each a model that trains with `STTSTrainer` and answers with `generate`.

All but ToMe are settings of the shipped model, so they share its code and its budget: what differs is which blocks
stay. A method that is "inference only" is never trained with anything missing: it prunes a model that was trained
without (`METHODS["none"]`).
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from stts_hf.modeling.modeling_stts import STTSForConditionalGeneration
from stts_hf.modeling.settings_stts import check_pruning_ratio

from .token_merging import MergingForConditionalGeneration

UNPRUNED = "none"
PARTS = ("methods", "ratios", "layers", "scaling", "images", "motion")  # of a study, in the order of its runs


@dataclass(frozen=True)
class Method:
    """
    One method, registered by its entry in `METHODS` alone.

    name: key in `METHODS`. label: in tables. settings: of the model's configuration; they win over the caller's. parts:
    the parts of a study that it takes part in. trained: False for one that prunes the model trained without pruning.
    paper: points above no pruning at 50 % in the paper, the mean of its averages over short and over long benchmarks
    ("Scorer Pruning vs. Heuristic Pruning", "Comparison with ViT-Only Pruning Baselines"). merges: whether it is ToMe.
    told: what its ranking is told of the true masks: what matters to a "question", or to all questions about a "clip".
    """

    name: str
    label: str
    settings: Mapping[str, Any]
    parts: tuple[str, ...] = ("methods",)
    trained: bool = True
    paper: float | None = None
    merges: bool = False
    told: str = ""

    def ratio(self, ratio: float) -> float:
        """The pruning ratio at which it runs where others run at `ratio`."""
        return float(self.settings.get("pruning_ratio", ratio))


# Without a scorer there is no temporal loss, which could reach the rest of the model where its target is not detached.
NO_SCORER = {"selector": "cosine"}
SCORER, RANDOM = {"selector": "scorer"}, {"selector": "random"}
METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(UNPRUNED, "No pruning", NO_SCORER | {"pruning_ratio": 0.0}, ("methods", "scaling", "images"), paper=0.0),
        Method("random-inference", "Random (inference only)", RANDOM, trained=False),
        Method("random", "Random", RANDOM, ("methods", "ratios", "scaling", "motion"), paper=-1.6),
        Method("cosine-inference", "Heuristic (inference only)", NO_SCORER, trained=False, paper=-3.9),
        Method("cosine", "Heuristic", NO_SCORER, ("methods", "ratios", "motion"), paper=-1.0),
        Method("stts", "STTS", SCORER, PARTS, paper=-0.7),
        Method(
            "stts-no-temporal",
            "STTS without temporal loss",
            SCORER | {"temporal_loss_weight": 0.0},
            ("methods", "ratios", "motion"),
            paper=-3.0,
        ),
        Method("tome-inference", "ToMe (inference only)", NO_SCORER, trained=False, paper=-3.8, merges=True),
        Method("tome", "ToMe", NO_SCORER, ("methods", "ratios"), paper=-1.9, merges=True),
        Method("told", "Told what a question is about (inference only)", NO_SCORER, trained=False, told="question"),
        Method("told-clip", "Told what a clip is asked (inference only)", NO_SCORER, trained=False, told="clip"),
        Method("text-only", "Text only", NO_SCORER | {"pruning_ratio": 1.0}, paper=-18.4),
    )
}


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
) -> STTSForConditionalGeneration:
    """
    The model of a method, a key of `METHODS`, with the weights of an STTS or Molmo2 `checkpoint` (folder or Hub id).

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
    model_class = MergingForConditionalGeneration if METHODS[method].merges else STTSForConditionalGeneration
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return model_class.from_pretrained(checkpoint, **settings | dict(METHODS[method].settings) | options)
