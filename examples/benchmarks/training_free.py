"""Selectors that need no training, beside EVS: cost, and how much of what moves they keep, with random weights."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from stts_hf.benchmark.geometries import lay_out
from stts_hf.benchmark.measure import measure
from stts_hf.benchmark.models import Models, build_models
from stts_hf.benchmark.presets import PRESETS, Workload
from stts_hf.selectors import SELECTORS

from .evs import prune_after_tower
from .moving_clips import correlate, draw_clips, share_kept

EVS = "evs"
METHODS = (*SELECTORS.of_kind(False), EVS)
CLIPS, CLIP_FRAMES, CLIP_BLOCKS = 8, 16, 12
PROMPT = PRESETS["qwen-small"].workloads[0]


def measure_methods(
    device: torch.device, repeats: int, layers: list[int] | None, workload: Workload = PROMPT
) -> Iterator[dict[str, Any]]:
    """Yields a cell of the result for each method and pruning layer; None is the geometry's own layer."""
    models = build_models(workload.geometry, getattr(torch, workload.dtype), device)
    for method in METHODS:
        for varied in [workload._replace(pruning_layer=layer) for layer in layers or ()] or [workload]:
            yield measure_method(method, varied, models, device, repeats)


def measure_method(
    method: str, workload: Workload, models: Models, device: torch.device, repeats: int
) -> dict[str, Any]:
    """
    The cell of `measure`, each pruned variant with `motion`: per clip, the correlation of ranking and motion, and the
    share of what moves that is kept.
    """
    after = method == EVS
    workload = workload._replace(selector="random" if after else method)
    with prune_after_tower(models[0].model) if after else contextlib.nullcontext():
        cell = measure(workload, models, device, repeats)
        clips = rank_clips(models[0], CLIPS)
    for variant in cell["variants"]:
        if variant["pruning_ratio"] and variant["status"] == "ok":
            variant["motion"] = {
                "correlation": [correlate(scores, moving) for scores, moving in clips],
                "kept": [share_kept(scores, moving, variant["pruning_ratio"]) for scores, moving in clips],
            }
    workload = workload._replace(selector=method)
    return {"workload": workload._asdict(), "title": workload.title, **cell}


@torch.no_grad()
def rank_clips(model: Any, number: int) -> list[tuple[torch.Tensor, np.ndarray]]:
    """For each drawn clip, the scores of its blocks, (T, n), and how much of each block moves, (T, n)."""
    found = []
    layout = lay_out(model.config, (CLIP_BLOCKS, CLIP_BLOCKS))
    for clip in draw_clips(number, CLIP_FRAMES, layout.size[0], CLIP_BLOCKS):
        videos = {
            name: it.to(model.device) for name, it in layout.processor([clip.frames], return_tensors="pt").items()
        }
        scores = model.model.get_video_features(**videos).token_scores[0].float().cpu()
        # The mean over the video frames of each frame of the tower.
        moving = clip.moving.reshape(len(scores), -1, CLIP_BLOCKS, CLIP_BLOCKS).mean(1)
        found.append((scores, moving.reshape(len(scores), -1)))
    return found
