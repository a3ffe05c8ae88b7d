"""The methods that the study compares, each a model that trains with `STTSTrainer` and answers with `generate`.

All but ToMe are settings of the shipped model, so they share its code and its budget: what differs is which blocks
stay. A method that is "inference only" is never trained with anything missing: it prunes a model that was trained
without (`METHODS["none"]`).
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from stts_hf.evaluation.token_merging import MergingForConditionalGeneration
from stts_hf.modeling.modeling_stts import STTSForConditionalGeneration
from stts_hf.modeling.settings_stts import check_pruning_ratio


@dataclass(frozen=True)
class Method:
    """
    name: key in `METHODS`. label: in tables. trained: whether it is trained as it is evaluated; if not, it is evaluated
    on the model that "none" trained. settings: of the model's configuration, which a caller's do not replace.
    merges: whether it is ToMe.
    """

    name: str
    label: str
    trained: bool = True
    settings: Mapping[str, Any] = field(default_factory=dict)
    merges: bool = False


# Without a scorer there is no temporal loss, which could reach the rest of the model where its target is not detached.
NO_SCORER = {"selector": "cosine"}
METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("none", "No pruning", True, NO_SCORER | {"pruning_ratio": 0.0}),
        Method("random-inference", "Random (inference only)", False, {"selector": "random"}),
        Method("random", "Random", True, {"selector": "random"}),
        Method("cosine-inference", "Heuristic (inference only)", False, {"selector": "cosine"}),
        Method("cosine", "Heuristic", True, {"selector": "cosine"}),
        Method(
            "stts-no-temporal", "STTS without temporal loss", True, {"selector": "scorer", "temporal_loss_weight": 0.0}
        ),
        Method("stts", "STTS", True, {"selector": "scorer"}),
        Method("tome-inference", "ToMe (inference only)", False, NO_SCORER, merges=True),
        Method("tome", "ToMe", True, NO_SCORER, merges=True),
        Method("text-only", "Text only", True, NO_SCORER | {"pruning_ratio": 1.0}),
    )
}


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
