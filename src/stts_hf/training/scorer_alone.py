"""
The scorer by itself, on a frozen model: scores need the ViT's states after layer `l` alone. Later layers, the connector
and the language model do not run with gradients, and no gradient passes through the earlier layers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from stts_hf.model_parts import SCORER, find_backbone, module_of, video_placeholders
from stts_hf.modeling.plan_stts import TowerCache, assign_to_rows
from stts_hf.modeling.pruning_stts import PruningOutput


class StateCache:
    """
    Outputs of the frozen ViT's layers up to `l`, of the videos of each row, in the host's memory: they run once for a
    row. gigabytes: at most so many; rows for which there is no room are computed in every step.
    """

    def __init__(self, gigabytes: float) -> None:
        self.room = gigabytes * 2**30
        self.rows: dict[str, list[dict[int, torch.Tensor]]] = {}  # of each video, by layer

    def read(self, keys: Sequence[str], device: torch.device) -> dict[int, torch.Tensor]:
        """Of a batch with the rows `keys`; empty where one of them lacks."""
        if not all(key in self.rows for key in keys):
            return {}
        videos = [video for key in keys for video in self.rows[key]]
        return {layer: torch.cat([video[layer] for video in videos]).to(device) for layer in videos[0]}

    def write(self, keys: Sequence[str], rows: Sequence[Sequence[int]], cache: TowerCache, sizes: list[int]) -> None:
        """rows: places of each row's videos. sizes: numbers of blocks of the videos."""
        # A tower may hold more than blocks, as many places in each frame: class tokens.
        parts = {
            layer: states.split([len(states) * size // sum(sizes) for size in sizes])
            for layer, states in cache.states.items()
        }
        for key, places in zip(keys, rows, strict=True):
            found = [{layer: split[place] for layer, split in parts.items()} for place in places]
            size = sum(states.nbytes for video in found for states in video.values())
            if key not in self.rows and size <= self.room:
                self.room -= size
                self.rows[key] = [{layer: states.cpu().clone() for layer, states in video.items()} for video in found]


def score_videos(
    model: nn.Module, batch: Mapping[str, Any], states: StateCache | None = None, keys: Sequence[str] = ()
) -> PruningOutput:
    """
    Returns `temporal_loss` (None with `scorer_target="answers"`) and `token_scores` of a batch's videos; `task_loss` is
    0. Without videos the loss is 0 and depends on the whole scorer, as DDP requires. keys: of the rows, for `states`.
    """
    _, backbone = find_backbone(model)
    pixels = batch.get(backbone.video_inputs[0])
    if pixels is None:
        scorer = module_of(model, SCORER).parameters()
        nothing = sum((0 * parameter.float().sum() for parameter in scorer), torch.zeros(()))
        return PruningOutput(task_loss=torch.zeros_like(nothing), temporal_loss=nothing)
    videos = {name: batch[name] for name in backbone.video_inputs if batch.get(name) is not None}
    cache = batch.get("tower_cache") or TowerCache()
    cache.states = {} if states is None else states.read(keys, pixels.device)
    is_new = not cache.states
    # At `k = 1` nothing is encoded past the scorer.
    found = backbone.get_video_features(**videos, pruning_ratio=1.0, with_temporal_loss=True, tower_cache=cache)
    if states is not None and is_new:
        sizes = [scores.numel() for scores in found.token_scores]
        placeholders = video_placeholders(backbone, batch).sum(-1).tolist()
        states.write(keys, assign_to_rows("video", placeholders, sizes), cache, sizes)
    nothing = found.token_scores[0].new_zeros(())
    return PruningOutput(task_loss=nothing, temporal_loss=found.temporal_loss, token_scores=found.token_scores)
