"""What the temporal loss teaches: after a short run, scores of videos never seen follow `1 - similarity`."""

import math
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from stts_hf.modeling import tower_stts
from stts_hf.modeling.scoring_stts import temporal_similarity
from tests.backbones import BACKBONES, Backbone, Clip
from tests.stts_hf.training.runs import logged, trainer

FRAMES, STEPS, CLIPS, HELD_OUT = 8, 140, 3, 8  # frames a clip, optimizer steps, clips a step, clips to measure on

# Whose pixels are rows of patches; Qwen2.5-VL's tower is Qwen3-VL's with windows.
FLAT = [BACKBONES[0], pytest.param(BACKBONES[1], marks=pytest.mark.study)]


class MovingClips(Dataset):
    """Clips of a wave of light from block to block, in each clip with a length and speed of its own."""

    def __init__(self, backbone: Backbone, model: Any, first: int, count: int):
        self.backbone, self.first, self.count = backbone, first, count
        [inputs] = backbone.alone([[2, Clip(FRAMES), 4]])
        plan = model.model.plan_videos({name: inputs[name] for name in model.model.video_inputs})
        blocks = plan.block_patches[: len(plan.block_patches) // FRAMES]  # (n, S), of frame 0
        self.place = torch.empty(blocks.numel())  # (N,)
        self.place[blocks] = torch.linspace(0, 1, len(blocks))[:, None]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= self.count:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(self.first + index)

        def draw(*shape: int) -> torch.Tensor:
            return torch.rand(*shape, generator=generator)

        [inputs] = self.backbone.alone([[2, Clip(FRAMES), 4]])
        inputs["labels"][:, 0] = -100
        pixels = inputs["pixel_values_videos"]
        patches = pixels.view(FRAMES, -1, pixels.shape[-1])  # (T, N, values)
        phase = math.tau * (draw(1) + self.place * 2 * (draw(1) - 0.5))  # (N,)
        speed = 1.6 * draw(1) * self.place  # radians a frame: the first block stands still, the last moves on
        brightness = torch.stack([(phase + frame * speed).sin() for frame in range(FRAMES)])  # (T, N)
        noise = 0.02 * torch.randn(patches.shape, generator=generator)
        inputs["pixel_values_videos"] = (3 * brightness[..., None] + noise).view_as(pixels)
        return {"id": f"clip-{self.first + index}", **inputs}


def one_clip(items: list[dict[str, Any]]) -> dict[str, Any]:
    """A batch of a single clip."""
    ((name, inputs),) = ((item["id"], {key: item[key] for key in item if key != "id"}) for item in items)
    return {**inputs, "sample_ids": [name]}


def rank_correlation(first: torch.Tensor, second: torch.Tensor) -> float:
    """Spearman's, of two vectors; equals rank in any order."""
    ranks = [values.argsort().argsort().double() for values in (first, second)]
    return torch.corrcoef(torch.stack(ranks))[0, 1].item()


@torch.no_grad()
def held_out_correlation(backbone, model, monkeypatch) -> float:
    """Rank correlation between score and `1 - similarity` of all blocks in frames t >= 1 of clips not trained on."""
    targets = []
    original = tower_stts.temporal_errors

    def keep_target(scores, patches, grids, *args):
        ((_, rows, cols),) = grids
        targets.append(1 - temporal_similarity(patches, grids)[rows * cols :])
        return original(scores, patches, grids, *args)

    scores = []
    with monkeypatch.context() as patch:
        patch.setattr(tower_stts, "temporal_errors", keep_target)
        clips = MovingClips(backbone, model, 100_000, HELD_OUT)
        for clip in (clips[index] for index in range(HELD_OUT)):
            outputs = model.eval()(**{key: value for key, value in clip.items() if key != "id"})
            scores.append(outputs.token_scores[0][1:].flatten())
    return rank_correlation(torch.cat(scores), torch.cat(targets))


@pytest.mark.slow
@pytest.mark.parametrize("backbone", FLAT, ids=lambda backbone: backbone.name)
def test_the_temporal_loss_teaches_scores_what_is_redundant(backbone, tmp_path, monkeypatch):
    rates = {"scorer": 3e-3, "language_model": 1e-3, "vision_tower": 1e-5, "connector": 1e-4}
    sizes: dict[str, Any] = {"max_steps": STEPS, "gradient_accumulation_steps": CLIPS, "logging_steps": 10}
    model = backbone.model(trained_scorer=False)
    model.config.temporal_loss_weight = 1.0
    clips = MovingClips(backbone, model, 0, CLIPS * STEPS)
    run = trainer(tmp_path, model=model, data=clips, data_collator=one_clip, learning_rates=rates, **sizes)
    run.train()
    losses = logged(run, "temporal_loss")
    assert losses[-1] < 0.5 * losses[0]
    assert held_out_correlation(backbone, run.model, monkeypatch) > 0.8
