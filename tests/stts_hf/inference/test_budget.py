"""Thresholds and budgets in the engine, clips and assistants, on videos that keep different numbers of blocks."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stts_hf
from examples.clips.files import write_video
from stts_hf.inference.engine import answer_requests
from stts_hf.inference.predictor import Predictor
from stts_hf.inference.requests import ask_about, make_request
from stts_hf.model_parts import SCORER, module_of
from tests.checkpoints import TINIES, TINY

QUESTION = "What moves?"
GREEDY: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}


def still_then_busy(seconds: float, share: float) -> np.ndarray:
    """A video (F, H, W, 3), 4 frames a second: grey, and in its last `share` noise in every frame."""
    frames = np.full((round(4 * seconds), 96, 96, 3), 120, np.uint8)
    busy = round(len(frames) * share)
    frames[len(frames) - busy :] = np.random.default_rng(0).integers(0, 255, (busy, 96, 96, 3), np.uint8)
    return frames


@pytest.fixture(scope="module")
def clips(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("clips")
    paths = []
    for name, share in (("still", 0.0), ("half", 0.5), ("busy", 1.0)):
        paths.append(str(folder / f"{name}.mp4"))
        write_video(folder / f"{name}.mp4", still_then_busy(4, share), 4)
    return paths


@pytest.fixture(scope="module")
def assistant() -> stts_hf.VideoAssistant:
    return stts_hf.load(TINY, device="cpu", selector="cosine")


@pytest.fixture(scope="module")
def level(assistant, clips) -> float:
    """A threshold between the scores of what is still and what is busy."""
    scores = assistant.answer(clips[1], QUESTION, **GREEDY).token_scores[1:]
    return float((scores.min() + scores.max()) / 2)


def expected(answer: Any, threshold: float) -> int:
    return answer.token_scores.shape[1] + int((answer.token_scores[1:] >= threshold).sum())


def test_each_video_keeps_what_its_scores_say_wherever_the_threshold_is_given(assistant, clips, level):
    answers = assistant.answer_batch(clips, QUESTION, score_threshold=level, **GREEDY)
    kept = [answer.video_tokens_kept for answer in answers]
    assert kept == [expected(answer, level) for answer in answers]
    assert kept[0] < kept[1] < kept[2]
    assert [answer.kept_by_video for answer in answers] == [(number,) for number in kept]
    loaded = stts_hf.load(TINY, device="cpu", selector="cosine", score_threshold=level)
    assert repr(loaded).endswith(f"scores from {level:g} kept by cosine)")
    assert [loaded.answer(clip, QUESTION, **GREEDY).video_tokens_kept for clip in clips] == kept
    with loaded.watch(clips[1]) as clip, assistant.watch(clips[1], score_threshold=level) as other:
        assert torch.equal(clip.keep_mask, other.keep_mask)
        assert torch.equal(clip.keep_mask, answers[1].keep_mask)
        assert clip.ask(QUESTION, **GREEDY).answer == answers[1].answer
        assert clip.pruning_ratio is None
        with pytest.raises(ValueError, match=r"score_threshold is 0\.5, but the video was read with scores from"):
            clip.ask(QUESTION, score_threshold=0.5)
    loaded.pruning_ratio = 0.5
    assert 2 * loaded.answer(clips[0], QUESTION, **GREEDY).video_tokens_kept == answers[0].video_tokens


def test_bounds_and_a_budget_hold(assistant, clips, level):
    given: dict[str, Any] = {"score_threshold": level, "min_pruning_ratio": 0.5, "max_pruning_ratio": 0.75, **GREEDY}
    answers = assistant.answer_batch(clips, QUESTION, **given)
    total = answers[0].video_tokens
    assert [answer.video_tokens_kept for answer in answers] == [total // 4, total // 2, total // 2]
    few = assistant.answer_batch(clips, QUESTION, video_token_budget=20, **GREEDY)
    assert [answer.video_tokens_kept for answer in few] == [20, 20, 20]


def test_requests_of_other_rules_are_not_answered_together(assistant, clips, level):
    rules = [assistant.model.config.keep_rule(given) for given in ({"pruning_ratio": 0.5}, {"score_threshold": level})]
    asked = [
        replace(ask_about(assistant.processor, clips[2], QUESTION), rule=rule) for rule in (*rules, None, rules[0])
    ]
    for share in (True, False):
        found = dict(
            answer_requests(assistant.model, assistant.processor, asked, share=share, pruning_ratio=0.25, **GREEDY)
        )
        kept = [found[number].video_tokens_kept / found[number].video_tokens for number in range(4)]
        assert [kept[0], kept[2], kept[3]] == [0.5, 0.75, 0.5]
        assert found[1].video_tokens_kept == expected(found[1], level)


def test_a_budget_is_a_requests_and_shared_by_its_videos(clips):
    qwen = stts_hf.load(TINIES["qwen3_vl"], device="cpu")  # Molmo2 takes one video
    content = [{"type": "video"}, {"type": "video"}, {"type": "text", "text": QUESTION}]
    request = make_request(qwen.processor, [{"role": "user", "content": content}], [clips[0], clips[0]])
    ((_, whole),) = answer_requests(qwen.model, qwen.processor, [request], pruning_ratio=0, **GREEDY)
    budget = whole.video_tokens // 2
    ((_, answer),) = answer_requests(qwen.model, qwen.processor, [request], video_token_budget=budget, **GREEDY)
    assert answer.kept_by_video == (budget // 2, budget // 2)
    ((_, failed),) = answer_requests(qwen.model, qwen.processor, [request], video_token_budget=9, **GREEDY)
    assert "`video_token_budget` is 9" in str(failed.error)


def test_scaling_adds_frames_until_the_budget_is_full_or_the_video_has_no_more(assistant, clips, level):
    given: dict[str, Any] = {"score_threshold": level, "processing": {"num_frames": 2, "test_time_scaling": True}}
    still, busy = assistant.answer_batch([clips[0], clips[2]], QUESTION, video_token_budget=100, **given, **GREEDY)
    per_frame = still.token_scores.shape[1]
    assert busy.num_frames * per_frame > 100 >= busy.video_tokens_kept == 100
    assert still.num_frames > busy.num_frames  # it had all its frames to show
    assert still.video_tokens_kept < 100
    with assistant.watch(clips[2], video_token_budget=100, **given) as clip:
        assert clip.seen.num_frames == busy.num_frames
    explained = assistant.explain(clips[2], QUESTION, video_token_budget=100, max_new_tokens=3, **given).asked.answer
    assert (explained.num_frames, explained.video_tokens_kept) == (busy.num_frames, 100)
    for budget in ({}, {"video_token_budget": 100}):
        rest = {"processing": given["processing"], **budget} | ({} if budget else {"score_threshold": level})
        with pytest.raises(ValueError, match="needs a pruning_ratio below 1, or a score_threshold"):
            assistant.answer(clips[0], QUESTION, **rest)


def test_scaling_follows_the_ratio_of_each_request(assistant, clips):
    rules = [assistant.model.config.keep_rule({"pruning_ratio": ratio}) for ratio in (0.75, 0.0, 1.0)]
    asked = [replace(ask_about(assistant.processor, clips[2], QUESTION), rule=rule) for rule in (*rules, None)]
    options: dict[str, Any] = {"pruning_ratio": 0.5, "processing": {"num_frames": 2, "test_time_scaling": True}}
    found = dict(answer_requests(assistant.model, assistant.processor, asked, **options, **GREEDY))
    assert [found[number].num_frames for number in (0, 1, 3)] == [8, 2, 4]
    assert len({found[number].video_tokens_kept for number in (0, 1, 3)}) == 1
    assert "needs a pruning_ratio below 1" in str(found[2].error)


def test_a_ratio_takes_the_place_of_the_checkpoints_threshold_for_selectors_without_a_level(clips, tmp_path):
    folder = Path(shutil.copytree(TINY, tmp_path / "calibrated"))
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["score_threshold"] = 0.13
    (folder / "config.json").write_text(json.dumps(config))
    predictor = Predictor(str(folder), selector="random", pruning_ratio=0.5, max_new_tokens=3, device="cpu")
    (found,) = predictor.predict([{"video": clips[2], "prompt": QUESTION}])
    assert 2 * found["video_tokens_kept"] == found["video_tokens"]
    calibrated = stts_hf.load(folder, device="cpu")
    settings: list[dict[str, Any]] = [{}, {"pruning_ratio": 0.5}]
    for keep in settings:
        explained = calibrated.explain(clips[1], QUESTION, max_new_tokens=3, **keep)
        assert {one.answer.video_tokens_kept for one in explained.by_selector.values()} == {
            explained.asked.answer.video_tokens_kept
        }
        assert "random" in explained.by_selector
    assert calibrated.model.config.vision_config.score_threshold == 0.13


def test_what_has_no_level_is_refused_before_a_video_is_read(assistant, monkeypatch):
    with pytest.raises(ValueError, match="not comparable between videos"):
        stts_hf.load(TINY, device="cpu", selector="random", score_threshold=0.1)
    with pytest.raises(ValueError, match="leave out one"):
        assistant.answer("gone.mp4", QUESTION, pruning_ratio=0.5, score_threshold=0.1)
    fresh = stts_hf.load(TINY, device="cpu", score_threshold=0.1)
    with torch.no_grad():
        module_of(fresh.model, SCORER).score_layer.weight.zero_()
    with pytest.raises(ValueError, match="untrained"):
        fresh.answer(
            still_then_busy(1, 1.0), QUESTION, processing={"video_metadata": [{"fps": 4, "total_num_frames": 4}]}
        )
