"""The base of the study: what its stages learn from is true of the scenes, and each of them learns."""

import numpy as np
import pytest
import torch

from stts_hf import STTSForConditionalGeneration, STTSProcessor
from stts_hf.evaluation.pretraining import (
    BlockReader,
    make_base,
    make_tiny,
    pretrain_conversations,
    pretrain_tower,
)
from stts_hf.evaluation.pretraining_data import KINDS, SceneConversations, SceneFrames, block_targets
from stts_hf.evaluation.questions import compose_short
from stts_hf.evaluation.scenes import COLOURS, Scene, Thing
from stts_hf.evaluation.tiny_model import build_config, build_model, build_processor

BLOCKS = 4


@pytest.fixture(scope="module")
def template(hub_configs):
    return (hub_configs / "stts-tiny" / "chat_template.jinja").read_text()


@pytest.fixture(scope="module")
def processor(template):
    return build_processor(template)


@pytest.fixture
def model(processor):
    return build_model(build_config(processor.tokenizer), processor.tokenizer)


def test_targets_are_where_the_pixels_are():
    """Of a thing alone, the block that is named holds pixels of it, and those that may be either hold all others."""
    for seed in range(20):
        scene, _ = compose_short(seed)
        for thing in scene.things:
            time = (thing.shown[0][0] + thing.shown[0][1]) / 2 if thing.shown else 1.0
            alone = Scene(seed, scene.duration, (thing,), drift=scene.drift)
            inside, known = block_targets(alone, time, BLOCKS)
            empty = Scene(seed, scene.duration, (), drift=scene.drift).draw([time], 96)[0].astype(int)
            changed = (np.abs(alone.draw([time], 96)[0] - empty).max(-1) > 60).reshape(4, 24, 4, 24).sum((1, 3)).ravel()
            [named] = np.flatnonzero(inside.any(1))
            assert changed[known].sum() == changed[named] > 0
            assert inside[named, KINDS.index(thing.shape)] == 1
            assert inside[named, len(KINDS) + list(COLOURS).index(thing.colour_at(time))] == 1


def test_a_mark_is_a_target_only_while_it_is_seen():
    scene = Scene(0, 4.0, (Thing("diamond", "red", 0.06, (0.16, 0.16), shown=((1.0, 1.3),)),))
    assert block_targets(scene, 1.1, BLOCKS)[0].sum() == 2
    inside, known = block_targets(scene, 1.3, BLOCKS)
    assert inside.sum() == 0
    assert known.all()


def test_batches_follow_from_their_number(processor):
    frames = SceneFrames(2, BLOCKS)
    for once, again in zip(frames[1], SceneFrames(2, BLOCKS)[1], strict=True):
        assert torch.equal(once, again)
    assert not torch.equal(frames[0][0], frames[1][0])
    batch, inside, known = SceneConversations(processor, 1, 4, 3, BLOCKS)[0]
    assert len(inside) == len(known) == batch["video_grids"][:, 0].sum()
    assert (batch["labels"] != -100).sum() > 4 * 8


@pytest.mark.slow
def test_each_stage_learns(processor, model):
    reader = BlockReader(128, BLOCKS**2)
    before = model.model.vision_tower.scorer.input_layer.weight.clone()
    losses = pretrain_tower(model, reader, processor.video_processor, 25)
    assert losses[-1] < 0.3 * losses[0]
    losses = pretrain_conversations(model, reader, processor, 12, 4, 1)
    assert np.mean(losses[-3:]) < 0.8 * np.mean(losses[:3])
    assert torch.equal(model.model.vision_tower.scorer.input_layer.weight, before)


def test_the_base_is_a_whole_checkpoint(template, tmp_path):
    make_base(tmp_path / "base", template, tower_steps=2, level_steps=(2, 2), batch_size=2)
    model = STTSForConditionalGeneration.from_pretrained(tmp_path / "base")
    processor = STTSProcessor.from_pretrained(tmp_path / "base")
    assert sum(parameter.numel() for parameter in model.parameters()) < 1.5e6
    assert processor.video_processor.num_frames == 16
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "README.md").write_text("a card")
    make_tiny(tmp_path / "base", tmp_path / "tiny", steps=2, batch_size=2)
    tiny = STTSForConditionalGeneration.from_pretrained(tmp_path / "tiny")
    scorers = [m.model.vision_tower.scorer.score_layer.weight for m in (model, tiny)]
    assert not torch.equal(*scorers)
    assert (tmp_path / "tiny" / "README.md").read_text() == "a card"
    with pytest.raises(FileExistsError, match="name another folder"):
        make_base(tmp_path / "base", template, tower_steps=2, level_steps=(2, 2))
