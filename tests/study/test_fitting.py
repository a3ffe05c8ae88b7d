"""The start of a scorer: it learns the temporal loss of the clips, and nothing else changes."""

import torch

from examples.study.fitting import start_scorer
from tests.stts_hf.training.runs import Rows, collate
from tests.tiny import Video, tiny_model

CLIPS = Rows([[3, Video(4), 2], [3, Video(4), 2]])


def test_only_the_scorer_learns_and_what_was_trained_can_be_trained_again():
    model = tiny_model(trained_scorer=False)
    model.lm_head.requires_grad_(False)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    batch = {name: value for name, value in collate([CLIPS[0], CLIPS[1]]).items() if name != "sample_ids"}
    first = model(**batch).temporal_loss.item()
    start_scorer(model, CLIPS, collate, 30, 2, 0)
    with torch.no_grad():
        assert model.eval()(**batch).temporal_loss < 0.5 * first
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == {name for name in before if ".scorer." in name}
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {"lm_head.weight"}
