"""The start of a scorer: it learns the temporal loss of the clips, and nothing else changes."""

import numpy as np
import torch

from stts_hf.evaluation.fitting import start_scorer
from stts_hf.modeling.modeling_stts import STTSForConditionalGeneration
from tests.modeling.towers import video_inputs
from tests.tiny import randomise, tiny_config


def moving_clips(config, steps):
    """Batches of two clips whose frames resemble each other but for one row of patches."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        inputs = video_inputs(config, [4, 4])
        pixels = inputs["pixel_values_videos"]
        still = torch.randn(2, *pixels.shape[1:], generator=generator).repeat_interleave(4, 0)
        still[:, :9] = torch.randn(8, 9, *pixels.shape[2:], generator=generator)
        yield {**inputs, "pixel_values_videos": still}


def begin() -> STTSForConditionalGeneration:
    model = STTSForConditionalGeneration(tiny_config(initializer_range=0.1))
    randomise(model)
    torch.nn.init.zeros_(model.model.vision_tower.scorer.score_layer.weight)
    return model


def test_only_the_scorer_learns_and_the_loss_falls():
    model = begin()
    model.lm_head.requires_grad_(False)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    losses = start_scorer(model, moving_clips(model.config, 60), 60)
    assert np.mean(losses[-10:]) < 0.2 * np.mean(losses[:5])
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == {name for name in before if ".scorer." in name}
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {"lm_head.weight"}


def test_a_batch_without_videos_teaches_nothing():
    model = begin()
    before = {name: tensor.clone() for name, tensor in model.model.vision_tower.scorer.state_dict().items()}
    assert start_scorer(model, [{"input_ids": torch.tensor([[1, 2]])}], 1) == [0.0]
    after = model.model.vision_tower.scorer.state_dict()
    # But for AdamW's weight decay.
    assert all(torch.allclose(after[name], before[name], rtol=1e-3) for name in before)
