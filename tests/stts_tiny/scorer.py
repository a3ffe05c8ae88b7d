"""
Fits the scorer of `stts-tiny` with the temporal loss alone (DESIGN item 9), on clips drawn here. Random scores would
drop blocks at random; a minute of this is enough for them to follow what moves.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from tqdm import tqdm


def moving_clips(seed: int, num_frames: int, side: int) -> Iterator[np.ndarray]:
    """Yields uint8 clips `(num_frames, side, side, 3)` without end: plain shapes that move over a still background."""
    generator = np.random.default_rng(seed)
    rows, cols = np.mgrid[:side, :side] / side
    while True:
        corners = generator.uniform(20, 235, (2, 2, 3))
        weights = np.stack([(1 - rows) * (1 - cols), (1 - rows) * cols, rows * (1 - cols), rows * cols], axis=-1)
        background = weights @ corners.reshape(4, 3) + generator.normal(0, generator.uniform(0, 20), (side, side, 3))
        clip = np.repeat(background[None], num_frames, axis=0)
        for _ in range(generator.integers(1, 5)):
            place, velocity = generator.uniform(0, 1, 2), generator.uniform(-0.12, 0.12, 2)
            radius, colour = generator.uniform(0.04, 0.2), generator.uniform(0, 255, 3)
            round_shape = generator.random() < 0.5
            for frame in clip:
                down, right = np.abs(rows - place[0]), np.abs(cols - place[1])
                inside = down**2 + right**2 < radius**2 if round_shape else np.maximum(down, right) < radius
                frame[inside] = colour
                place = (place + velocity) % 1
        # As of a camera, so that standing still is nearly but not exactly the same picture.
        clip += generator.normal(0, 2.0, clip.shape)
        yield clip.clip(0, 255).astype(np.uint8)


def fit_scorer(model: Any, video_processor: Any, seed: int = 0, steps: int = 600, num_frames: int = 8) -> list[float]:
    """Trains the scorer's weights in place, everything else stays frozen; returns the loss of every step."""
    scorer = model.model.vision_tower.scorer
    model.requires_grad_(False)
    scorer.requires_grad_(True)
    optimizer = torch.optim.AdamW(scorer.parameters(), lr=1e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    clips = moving_clips(seed, num_frames, video_processor.size["height"])
    losses = []
    for _ in tqdm(range(steps), desc="Fitting the scorer", unit="step"):
        video = torch.from_numpy(next(clips)).permute(0, 3, 1, 2)
        inputs = video_processor([video], do_sample_frames=False, return_tensors="pt")
        # Nothing after the scores matters here, so every block is dropped.
        features = model.model.get_video_features(**inputs, pruning_ratio=1.0, with_temporal_loss=True)
        optimizer.zero_grad()
        features.temporal_loss.backward()
        torch.nn.utils.clip_grad_norm_(scorer.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(features.temporal_loss.item())
    model.requires_grad_(True)
    return losses
