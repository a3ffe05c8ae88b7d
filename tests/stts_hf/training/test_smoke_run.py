"""What the temporal loss teaches: after a short run, scores of videos never seen follow `1 - similarity`."""

import math
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from stts_hf.modeling import vision_stts
from stts_hf.modeling.scoring_stts import temporal_similarity
from tests.stts_hf.training.runs import collate, logged, trainer
from tests.tiny import Video, build_inputs, tiny_config, tiny_model

FRAMES, STEPS, CLIPS, HELD_OUT = 8, 140, 3, 8  # frames a clip, optimizer steps, clips a step, clips to measure on


class MovingClips(Dataset):
    """Clips of a wave of light that runs to the right, in each clip with a length and speed of its own."""

    def __init__(self, first: int, count: int):
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= self.count:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(self.first + index)

        def draw(*shape: int) -> torch.Tensor:
            return torch.rand(*shape, generator=generator)

        inputs = build_inputs([[2, Video(FRAMES), 4]], seed=self.first + index, labels=True)
        inputs["labels"][:, 0] = -100
        rows, cols = torch.meshgrid(torch.arange(9.0), torch.arange(9.0), indexing="ij")
        phase = math.tau * (draw(1) + (rows * (draw(1) - 0.5) + cols * (draw(1) - 0.5)) / 9)  # (9, 9)
        speed = 1.6 * draw(1) * cols / 8  # radians a frame: the left stands still, the right moves on
        brightness = torch.stack([(phase + frame * speed).sin() for frame in range(FRAMES)])  # (T, 9, 9)
        patches = 3 * brightness.view(FRAMES, 81, 1) + 0.02 * torch.randn(FRAMES, 81, 12, generator=generator)
        inputs["pixel_values_videos"] = patches
        return {"id": f"clip-{self.first + index}", **inputs}


def ranks(values: torch.Tensor) -> torch.Tensor:
    """Ranks of a vector; equals share their mean rank."""
    _, inverse, counts = values.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0)
    return (last - (counts - 1) / 2)[inverse].double()


def rank_correlation(first: torch.Tensor, second: torch.Tensor) -> float:
    """Spearman's, of two vectors."""
    return torch.corrcoef(torch.stack([ranks(first), ranks(second)]))[0, 1].item()


def test_rank_correlation_by_hand():
    values = torch.tensor([3.0, 1.0, 2.0, 2.0])
    assert ranks(values).tolist() == [4, 1, 2.5, 2.5]
    assert rank_correlation(values, values.exp()) == pytest.approx(1)
    assert rank_correlation(values, -values) == pytest.approx(-1)
    assert rank_correlation(torch.tensor([1.0, 2, 3, 4]), torch.tensor([1.0, 2, 4, 3])) == pytest.approx(0.8)


@torch.no_grad()
def held_out_correlation(model, monkeypatch) -> float:
    """Rank correlation between score and `1 - similarity` of all blocks in frames t >= 1 of clips not trained on."""
    targets = []
    original = vision_stts.temporal_loss

    def keep_target(scores, patches, grids, *args):
        targets.append(1 - temporal_similarity(patches, grids)[9:])
        return original(scores, patches, grids, *args)

    scores = []
    with monkeypatch.context() as patch:
        patch.setattr(vision_stts, "temporal_loss", keep_target)
        clips = MovingClips(100_000, HELD_OUT)
        for clip in (clips[index] for index in range(HELD_OUT)):
            outputs = model.eval()(**{key: value for key, value in clip.items() if key != "id"})
            scores.append(outputs.token_scores[0][1:].flatten())
    return rank_correlation(torch.cat(scores), torch.cat(targets))


def smoke_run(folder, weight: float) -> Any:
    config = tiny_config(model_overrides={"temporal_loss_weight": weight})
    rates = {"scorer": 3e-3, "language_model": 1e-3, "vision_tower": 1e-5, "connector": 1e-4}
    options: dict[str, Any] = {
        "max_steps": STEPS,
        "learning_rates": rates,
        "per_device_train_batch_size": CLIPS,
        "logging_steps": 10,
    }
    model = tiny_model(config, trained_scorer=False)
    run = trainer(folder, model=model, data=MovingClips(0, CLIPS * STEPS), data_collator=collate, **options)
    run.train()
    return run


@pytest.mark.slow
def test_the_temporal_loss_teaches_scores_what_is_redundant(tmp_path, monkeypatch):
    run = smoke_run(tmp_path, weight=1.0)
    losses = logged(run, "temporal_loss")
    assert losses[-1] < 0.5 * losses[0]
    assert held_out_correlation(run.model, monkeypatch) > 0.8


@pytest.mark.slow
def test_without_the_temporal_loss_scores_do_not_learn_it(tmp_path, monkeypatch):
    run = smoke_run(tmp_path, weight=0.0)
    assert held_out_correlation(run.model, monkeypatch) < 0.8
