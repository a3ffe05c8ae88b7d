"""A mixture of still and busy videos by a threshold: as fast as what it keeps says?"""

import time
from typing import Any

import torch

from stts_hf.benchmark.geometries import workload_inputs
from stts_hf.benchmark.measure import take_turns
from stts_hf.benchmark.meters import TOTAL, FlopClock, peak_memory
from stts_hf.benchmark.models import build_models
from stts_hf.benchmark.presets import Workload

CHANGES = (0.0, 0.0, 0.0, 0.0, 0.02, 0.9, 0.9, 1.0)  # share of patches of each video that change from frame to frame
DROPPED = 0.7  # of the later frames' blocks, over all videos
NOTHING, THRESHOLD, RATIOS, MEAN = "nothing dropped", "by threshold", "its ratios", "their mean ratio"


def draw_video(inputs: dict[str, Any], num_frames: int, change: float, seed: int) -> dict[str, Any]:
    """The inputs with other pixels: a share of the patches is drawn anew in each frame, the others hardly move."""
    generator, pixels = torch.Generator().manual_seed(seed), inputs["pixel_values_videos"]
    by_frame = pixels.reshape(num_frames, -1, pixels.shape[-1])
    frames = [torch.randn(by_frame.shape[1:], generator=generator)]
    for _ in range(1, num_frames):
        new = torch.randn(by_frame.shape[1:], generator=generator)
        changes = torch.rand(len(new), 1, generator=generator) < change
        frames.append(torch.where(changes, new, frames[-1] + 0.02 * new))
    return inputs | {"pixel_values_videos": torch.stack(frames).reshape(pixels.shape)}


@torch.no_grad()
def measure_mixture(workload: Workload, repeats: int) -> dict[str, Any]:
    """
    Reads the mixture's videos one by one with random weights and `cosine`, into a cache, in turns: with nothing
    dropped, by one threshold, by each video's own ratio that keeps as many blocks, and by one ratio for all of the same
    mean. Returns a cell of the result.
    """
    model = build_models(workload.geometry, getattr(torch, workload.dtype), torch.device("cpu"))[0].eval()
    model.config.vision_config.selector = "cosine"
    inputs = workload_inputs(workload, model.config, torch.device("cpu"))
    num_frames = int(inputs[model.model.video_inputs[-1]][0, 0])
    videos = [draw_video(inputs, num_frames, change, seed) for seed, change in enumerate(CHANGES)]

    def read(video: dict[str, Any], **rule: Any) -> Any:
        return model(**video, **rule, use_cache=True, logits_to_keep=1)

    scores = [read(video, pruning_ratio=0.0).token_scores[0] for video in videos]
    threshold = float(torch.cat([video[1:].flatten() for video in scores]).quantile(DROPPED))
    masks = [read(video, score_threshold=threshold).keep_mask[0] for video in videos]
    dropped = [int((~mask).sum()) / mask.numel() for mask in masks]
    mean = sum(dropped) / len(dropped)
    rules: dict[str, list[dict[str, float]]] = {
        NOTHING: [{"pruning_ratio": 0.0}] * len(videos),
        THRESHOLD: [{"score_threshold": threshold}] * len(videos),
        RATIOS: [{"pruning_ratio": ratio} for ratio in dropped],
        MEAN: [{"pruning_ratio": mean}] * len(videos),
    }
    variants: list[dict[str, Any]] = [{"name": name, "status": "ok", "stages": {}} for name in rules]

    def read_all(variant: dict[str, Any]) -> None:
        for video, rule in zip(videos, rules[variant["name"]], strict=True):
            read(video, **rule)

    def warm_up(variant: dict[str, Any]) -> None:
        clock = FlopClock()
        with clock.counter:
            _, variant["peak_memory"] = peak_memory(lambda: read_all(variant), torch.device("cpu"))
        variant["stages"][TOTAL] = {"flops": clock.read(), "seconds": []}

    def run(variant: dict[str, Any]) -> None:
        started = time.perf_counter()
        read_all(variant)
        variant["stages"][TOTAL]["seconds"].append(time.perf_counter() - started)

    title = f"{len(videos)} videos one by one, {mean:.0%} dropped, {workload.title}, cosine"
    take_turns(title, variants, repeats, warm_up, run)
    return {"title": title, "status": "ok", "variants": variants}
