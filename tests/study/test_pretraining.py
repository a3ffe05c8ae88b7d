"""The base of the study: what its stages learn from is true of the scenes, and each of them learns."""

import numpy as np
import pytest
import torch

from examples.study import pretraining
from examples.study.pretraining import (
    STEPS,
    BlockCodes,
    make_base,
    make_tiny,
    teach_both,
    teach_text,
    teach_tower,
)
from examples.study.pretraining_data import KINDS, LEVELS, SceneConversations, block_targets
from examples.study.questions import compose_short
from examples.study.scenes import COLOURS, Scene
from examples.study.tiny_model import build_model, build_processor
from stts_hf import STTSConfig, STTSForConditionalGeneration, STTSProcessor
from tests.checkpoints import TINY

BLOCKS = 4


@pytest.fixture(scope="module")
def processor():
    return build_processor((TINY / "chat_template.jinja").read_text())


@pytest.fixture
def model(processor):
    return build_model(STTSConfig.from_pretrained(TINY), processor.tokenizer)


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


@pytest.mark.parametrize("drawn", [True, False])
@pytest.mark.parametrize("level", LEVELS)
def test_conversations_are_about_the_frames_of_the_targets(processor, level, drawn):
    batch, inside, known = SceneConversations(processor, 1, 3, level, BLOCKS, drawn, 7)[0]
    assert len(inside) == len(known) == batch["video_grids"][:, 0].sum()
    assert (batch["labels"] != -100).sum() > 3 * 2 * 3  # an answer is a word or more and its end
    assert (batch["pixel_values_videos"].std() > 0) == drawn


@pytest.mark.study
def test_each_stage_learns_and_leaves_the_rest(processor, model):
    codes = BlockCodes(model, processor.tokenizer)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def changed() -> set[str]:
        names = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
        before.update({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
        return {name.split(".")[1] if name.startswith("model.") else name.split(".")[0] for name in names}

    losses = teach_text(model, codes, processor, 2, 0, 12)
    assert np.mean(losses[-3:]) < 0.9 * np.mean(losses[:3])
    assert changed() == {"language_model", "lm_head"}
    losses = teach_tower(model, codes, processor.video_processor, 20)
    assert np.mean(losses[-3:]) < 0.9 * np.mean(losses[:3])
    assert changed() == {"vision_tower", "multi_modal_projector"}
    scorer = model.model.vision_tower.scorer.input_layer.weight.clone()
    teach_both(model, processor, 2, 2)
    assert changed() == {"vision_tower", "multi_modal_projector", "language_model", "lm_head"}
    assert torch.equal(model.model.vision_tower.scorer.input_layer.weight, scorer)


@pytest.mark.study
def test_the_base_is_a_whole_checkpoint_and_its_stages_are_not_done_twice(tmp_path, monkeypatch):
    steps = dict.fromkeys(STEPS, 2)

    def stop(*arguments):
        raise KeyboardInterrupt

    def times() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in (tmp_path / "base.stages").iterdir()}

    with monkeypatch.context() as patch:
        patch.setattr(pretraining, "teach_both", stop)
        with pytest.raises(KeyboardInterrupt):
            make_base(tmp_path / "base", TINY, steps, batch_size=2)
        done = times()
        assert len(done) == 4
        with pytest.raises(KeyboardInterrupt):
            make_base(tmp_path / "base", TINY, steps, batch_size=2)
        assert times() == done
    assert not (tmp_path / "base").exists()
    make_base(tmp_path / "base", TINY, steps, batch_size=2)
    assert {path.name for path in tmp_path.iterdir()} == {"base"}
    model = STTSForConditionalGeneration.from_pretrained(tmp_path / "base")
    assert sum(parameter.numel() for parameter in model.parameters()) < 1.5e6
    assert STTSProcessor.from_pretrained(tmp_path / "base").video_processor.num_frames == 16


@pytest.mark.study
def test_the_tiny_checkpoint_has_a_scorer_that_learned_and_keeps_its_card(processor, model, tmp_path):
    for part in (model, processor):
        part.save_pretrained(tmp_path / "base")
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "README.md").write_text("a card")
    make_tiny(tmp_path / "base", tmp_path / "tiny", scorer_steps=2, steps=2, batch_size=2)
    tiny = STTSForConditionalGeneration.from_pretrained(tmp_path / "tiny")
    assert not torch.equal(*(m.model.vision_tower.scorer.score_layer.weight for m in (model, tiny)))
    assert (tmp_path / "tiny" / "README.md").read_text() == "a card"
