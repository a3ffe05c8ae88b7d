"""
The scorer by itself, on a frozen model.

Scores need the ViT's states after layer `l` alone. If nothing else is learned, its later layers, the connector and the
language model do not run with gradients, and no gradient passes through the earlier layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stts_hf.model_parts import SCORER, find_backbone, module_of
from stts_hf.modeling.pruning_stts import PruningOutput


@dataclass
class ScoringOutput(PruningOutput):
    """Outputs of a call that runs no language model."""


def score_videos(model: nn.Module, batch: Mapping[str, Any]) -> ScoringOutput:
    """
    Returns `temporal_loss` (None with `scorer_target="answers"`) and `token_scores` of a batch's videos; `task_loss` is
    0. Without videos the loss is 0 and depends on the whole scorer, as DDP requires.
    """
    _, backbone = find_backbone(model)
    pixels = batch.get(backbone.video_inputs[0])
    if pixels is None:
        scorer = module_of(model, SCORER).parameters()
        nothing = sum((0 * parameter.float().sum() for parameter in scorer), torch.zeros(()))
        return ScoringOutput(task_loss=torch.zeros_like(nothing), temporal_loss=nothing)
    videos = {name: batch[name] for name in backbone.video_inputs if batch.get(name) is not None}
    # At `k = 1` nothing is encoded past the scorer.
    found = backbone.get_video_features(**videos, pruning_ratio=1.0, with_temporal_loss=True)
    nothing = found.token_scores[0].new_zeros(())
    return ScoringOutput(task_loss=nothing, temporal_loss=found.temporal_loss, token_scores=found.token_scores)
