"""EVS against a naive reference: the stock tower's features, a loop over places, a sort."""

import math

import pytest
import torch

from examples.benchmarks.evs import prune_after_tower
from tests.backbones import BACKBONES, Clip, Picture

ROWS = [[3, Clip(4), 5], [2, Picture(), 4, Clip(3), 6]]


# Native SmolVLM has no features of videos: it takes frames as images.
@pytest.fixture(params=[one for one in BACKBONES if one.name != "smolvlm"], ids=lambda backbone: backbone.name)
def backbone(request):
    return request.param


def naive_keep_mask(tokens: torch.Tensor, frames: int, ratio: float) -> torch.Tensor:
    """tokens: (T * n, width), what each hands to the language model. Returns (T, n)."""
    per_frame = len(tokens) // frames
    change = [math.inf] * per_frame  # frame 0 is never dropped
    for index in range(per_frame, len(tokens)):
        now, before = tokens[index].double(), tokens[index - per_frame].double()
        change.append(1 - float(now @ before / (now.norm() * before.norm())))
    order = sorted(range(len(tokens)), key=lambda index: change[index])
    dropped = order[: min(math.floor(ratio * len(tokens)), len(tokens) - per_frame)]
    return torch.tensor([index not in dropped for index in range(len(tokens))]).view(frames, per_frame)


@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.5, 0.9])
@torch.no_grad()
def test_it_keeps_what_a_naive_reference_keeps(backbone, ratio):
    model = backbone.model(selector="random", pruning_ratio=ratio)
    inputs = backbone.batch(ROWS, "left")
    videos = {name: inputs[name] for name in model.model.video_inputs}
    whole = backbone.stock(model).model.get_video_features(**videos)
    with prune_after_tower(model.model):
        found = model.model.get_video_features(**videos)
        outputs = model(**inputs)
    groups = [list(whole.pooler_output), *(list(tap) for tap in getattr(whole, "deepstack_features", None) or ())]
    pruned = [found.pooler_output, *(found.deepstack_features or ())]
    assert len(groups) == len(pruned)
    for video, (kept, ours) in enumerate(zip(found.keep_mask, outputs.keep_mask, strict=True)):
        tokens = torch.cat([group[video] for group in groups], dim=-1)
        expected = naive_keep_mask(tokens, len(kept), ratio)
        assert torch.equal(kept, expected)
        assert torch.equal(ours, expected)
        for group, left in zip(groups, pruned, strict=True):
            torch.testing.assert_close(left[video], group[video][expected.flatten()], atol=1e-5, rtol=1e-5)
    # What is left of the sequence is that of any selector: as many tokens, of which none is a dropped placeholder.
    assert outputs.logits.shape[1] == model(**inputs).logits.shape[1]
