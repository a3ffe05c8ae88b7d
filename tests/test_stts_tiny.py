"""`hub_configs/stts-tiny`: complete, small, usable without the package, and of the tokenizer that its command makes."""

import json
import re
import statistics
from typing import Any

import pytest
import torch
from transformers import AutoProcessor, AutoTokenizer
from transformers.trainer_utils import align_special_tokens
from transformers.utils import logging

from examples.study import tiny_model
from examples.study.questions import compose_short
from examples.study.scenes import Scene, Thing
from stts_hf import STTSForConditionalGeneration, STTSProcessor
from stts_hf.inference.engine import answer_videos
from stts_hf.visualize.sample_clip import write_sample_clip
from tests.conftest import REPOSITORY


@pytest.fixture(scope="module")
def folder(hub_configs):
    return hub_configs / "stts-tiny"


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_model.build_tokenizer(tiny_model.texts())


def test_the_script_makes_the_same_tokenizer(folder, tokenizer):
    saved = json.loads((folder / "tokenizer.json").read_text())["model"]
    assert saved == json.loads(tokenizer.backend_tokenizer.to_str())["model"]  # vocabulary and merges
    assert AutoTokenizer.from_pretrained(folder, trust_remote_code=True).get_vocab() == tokenizer.get_vocab()


def test_special_tokens_lie_where_the_released_models_have_them(tokenizer):
    chat = tokenizer.convert_tokens_to_ids(list(tiny_model.CHAT_TOKENS))
    vision = tokenizer.convert_tokens_to_ids(list(tiny_model.VISION_TOKENS))
    assert chat == [1021, 1022, 1023]
    assert vision == list(range(1024, 1034))


def test_the_tokenizer_loses_no_text(tokenizer):
    text = "<|im_start|>user\nHow many? 12.5 s, Zürich 日本 🎈<|im_end|>\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_video_prompt_ends_its_turns_with_the_end_of_sequence_token(folder):
    processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
    text = processor.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    ids = processor(text=[text])["input_ids"][0]
    assert ids[0] == processor.tokenizer.bos_token_id == processor.tokenizer.eos_token_id
    assert ids.count(processor.tokenizer.eos_token_id) == 2


@pytest.fixture(scope="module")
def tiny(folder):
    return STTSForConditionalGeneration.from_pretrained(folder), STTSProcessor.from_pretrained(folder)


def test_the_scorer_follows_what_moves(tiny):
    """Of two blocks, one of which moves, it has the higher score more often than not, also where the camera drifts."""
    model, processor = tiny
    above = []
    for seed in range(10):
        scene, _ = compose_short(seed)
        times = [index / 4 for index in range(16)]
        frames = torch.from_numpy(scene.draw(times, 96)).permute(0, 3, 1, 2)
        inputs = processor.video_processor([frames], do_sample_frames=False, return_tensors="pt")
        with torch.no_grad():
            scores = model.model.get_video_features(**inputs).token_scores[0][1:].flatten()
        share = scene.motion(times, 12).reshape(16, 4, 3, 4, 3).mean((2, 4)).reshape(16, 16)[1:].flatten()
        moving, still = scores[share > 0.3], scores[share == 0]
        above.append((moving[:, None] > still).float().mean().item())
    assert statistics.median(above) > 0.75
    assert statistics.mean(above) > 0.7


[DEMO] = re.findall(r"^QUESTION \?= (.*)$", (REPOSITORY / "Makefile").read_text(), re.M)
[README] = re.findall(r'^stts-hf run clip.mp4 "(.*?)"', (REPOSITORY / "README.md").read_text(), re.M)


@pytest.fixture(scope="module")
def sample_clip(tmp_path_factory):
    path = tmp_path_factory.mktemp("sample") / "clip.mp4"
    write_sample_clip(path)
    return str(path)


@pytest.mark.parametrize(("question", "answer"), [(DEMO, "a red ring"), (README, "right")], ids=["make demo", "README"])
def test_what_the_demo_asks_is_answered_rightly(tiny, sample_clip, question, answer):
    model, processor = tiny
    [found] = answer_videos(model, processor, [sample_clip], question, pruning_ratio=0.5, max_new_tokens=8)
    assert found.answer == answer


def test_what_moves_in_the_sample_clip_is_kept(tiny, sample_clip):
    """As the picture in README.md says: of the blocks in which the ring moves, twice the share of those at rest."""
    model, processor = tiny
    found: Any = next(answer_videos(model, processor, [sample_clip], DEMO, pruning_ratio=0.7, max_new_tokens=1))
    ring = Scene(0, found.duration, (Thing("ring", "red", 0.11, (0.16, 0.5), (0.68 / found.duration, 0.0)),))
    share = ring.motion(list(found.timestamps), 12).reshape(16, 4, 3, 4, 3).mean((2, 4))
    share, kept = share.reshape(16, 16)[1:], found.keep_mask[1:].float().numpy()
    assert kept[share > 0.3].mean() > 2 * kept[share == 0].mean()


def test_the_special_tokens_of_model_and_tokenizer_agree_so_that_trainer_changes_none(folder, caplog):
    model, processor = STTSForConditionalGeneration.from_pretrained(folder), STTSProcessor.from_pretrained(folder)
    with caplog.at_level("WARNING"):
        logging.enable_propagation()
        try:
            align_special_tokens(model, processor)
        finally:
            logging.disable_propagation()
    assert "PAD/BOS/EOS" not in caplog.text
    assert model.generation_config.eos_token_id == processor.tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == processor.tokenizer.pad_token_id
