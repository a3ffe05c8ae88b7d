"""`answer_videos`: what one call after the other gives, in order, while the next videos are prepared."""

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForMultimodalLM, AutoProcessor, BatchFeature

import stts_hf
from stts_hf.inference import engine
from stts_hf.inference.engine import answer_videos
from stts_hf.inference.generate import inputs_for
from stts_hf.inference.requests import Answer, Prepared, Request
from stts_hf.modeling.budget_stts import KeepRule
from stts_hf.modeling.scoring_stts import num_kept_blocks
from stts_hf.video.processors import process
from tests.checkpoints import BLOCKS
from tests.clips import write_clip

PATIENCE = 20  # seconds until a test that would hang fails
QUESTION = "What moves?"
NO_PROCESSOR: Any = None
FEW: dict[str, Any] = {"processing": {"num_frames": 2}, "max_new_tokens": 3, "do_sample": False}


@pytest.fixture(scope="module")
def model(hub_configs):
    return AutoModelForMultimodalLM.from_pretrained(hub_configs / "stts-tiny", trust_remote_code=True).eval()


@pytest.fixture(scope="module")
def processor(hub_configs):
    return AutoProcessor.from_pretrained(hub_configs / "stts-tiny", trust_remote_code=True)


@pytest.fixture(scope="module")
def clips(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("clips")
    return [str(write_clip(folder / f"{name}.mp4", 20 + 10 * place)) for place, name in enumerate("abc")]


@pytest.fixture
def words(tmp_path) -> str:
    """A file that is no video."""
    path = tmp_path / "words.mp4"
    path.write_bytes(b"no video\n" * 100)
    return str(path)


@pytest.fixture
def pretend(monkeypatch):
    """A model that needs no processor: `prepare` and `answer` are called in place of the real steps."""

    def pretend(prepare=lambda video: None, answer=lambda video: None):
        def prepare_request(processor, options, request):
            prepare(request.videos[0])
            return Prepared(request, Answer(request.videos[0], request.tail))

        def answer_prepared(model, processor, prepared, **options):
            for one in prepared:
                answer(one.begun.video)
            return [replace(one.begun, answer=f"{one.begun.question} {one.begun.video}") for one in prepared]

        monkeypatch.setattr(engine, "prepare", prepare_request)
        monkeypatch.setattr(engine, "answer_prepared", answer_prepared)
        monkeypatch.setattr(engine, "ask_about", lambda _, video, question: Request("", question, (video,)))
        monkeypatch.setattr(engine, "processing_options", lambda *_: {})
        config = SimpleNamespace(vision_config=SimpleNamespace(pruning_ratio=0.5), keep_rule=KeepRule(0.5).replaced)
        return SimpleNamespace(config=config)

    return pretend


def test_next_video_is_prepared_while_the_model_answers(pretend):
    in_work = [threading.Event() for _ in range(4)]

    def answer(video):
        assert video == 3 or in_work[video + 1].wait(PATIENCE), f"{video} was answered before {video + 1} was begun"

    model = pretend(lambda video: in_work[video].set(), answer)
    assert [found.video for found in answer_videos(model, NO_PROCESSOR, range(4), QUESTION)] == [0, 1, 2, 3]


@torch.no_grad()
def test_answers_are_those_of_one_call_after_the_other(any_model, any_processor, clips):
    model, processor, few = any_model, any_processor, FEW | {"processing": {"num_frames": 4}}
    answers = list(answer_videos(model, processor, clips, QUESTION, pruning_ratio=0.3, **few))
    assert [answer.video for answer in answers] == clips
    messages = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": QUESTION}]}]
    prompt = processor.apply_chat_template(messages, add_generation_prompt=True)
    for clip, answer in zip(clips, answers, strict=True):
        options = {"num_frames": 4, "return_metadata": True, "return_tensors": "pt"}
        inputs = process(processor, text=[prompt], videos=[clip], **options)
        metadata = inputs.pop("video_metadata")[0]
        tokens = model.generate(**inputs, pruning_ratio=0.3, max_new_tokens=3, do_sample=False)
        length = inputs["input_ids"].shape[1]
        assert answer.answer == processor.decode(tokens[0, length:], skip_special_tokens=True).strip()
        seen = model(**inputs, pruning_ratio=0.3)
        assert answer.keep_mask is not None
        assert answer.token_scores is not None
        assert torch.equal(answer.keep_mask, seen.keep_mask[0])
        assert torch.equal(answer.token_scores, seen.token_scores[0])
        assert answer.timestamps == tuple(metadata.timestamps)
        assert (answer.num_frames, answer.duration) == (len(metadata.frames_indices), metadata.duration)
        frames, blocks = answer.keep_mask.shape
        assert frames == answer.num_frames / getattr(processor.video_processor, "temporal_patch_size", 1)
        assert blocks == answer.grid[0] * answer.grid[1]
        assert (answer.video_tokens, answer.video_tokens_kept) == (
            frames * blocks,
            num_kept_blocks(frames, blocks, 0.3),
        )
        assert (answer.prompt_tokens, answer.prompt_tokens_kept) == (length, seen.kept_indices.shape[1])


def test_a_model_with_adapters_answers_too(hub_configs, processor, clips):
    model = AutoModelForMultimodalLM.from_pretrained(hub_configs / "stts-tiny", trust_remote_code=True)
    adapted = get_peft_model(model, LoraConfig(target_modules=r".*language_model.*\.q_proj")).eval()
    (answer,) = answer_videos(adapted, processor, clips[:1], QUESTION, **FEW)
    assert answer.video_tokens_kept == BLOCKS


def test_frames_without_a_rate_are_dated_as_in_the_prompt(model, processor):
    frames = np.random.default_rng(0).integers(0, 255, (2, 40, 40, 3), dtype=np.uint8)
    few = FEW | {"processing": {"do_sample_frames": False}}
    (answer,) = answer_videos(model, processor, [frames], QUESTION, **few)
    assert answer.timestamps == (0.0, 0.25)  # 4 per second


def test_error_is_returned_in_the_videos_place(model, processor, clips, words):
    first, second, third = answer_videos(
        model, processor, [clips[0], words, clips[1]], QUESTION, on_error="return", **FEW
    )
    assert (first.error, third.error) == (None, None)
    assert first.answer is not None
    assert third.video == clips[1]
    assert isinstance(second.error, ValueError)
    assert "words.mp4" in str(second.error)
    assert (second.video, second.question, second.answer) == (words, QUESTION, None)
    assert (second.num_frames, second.video_tokens, second.prompt_tokens_kept) == (0, 0, 0)
    answers = answer_videos(model, processor, [clips[0], words, clips[1]], QUESTION, **FEW)
    assert next(answers).video == clips[0]
    with pytest.raises(ValueError, match=r"words\.mp4"):
        next(answers)
    assert next(answers, None) is None


@pytest.mark.parametrize(("questions", "number"), [(["x"], "fewer"), (["x", "y", "z"], "more")])
def test_questions_of_another_number_are_an_error_after_the_last_pair(pretend, questions, number):
    answers = answer_videos(pretend(), NO_PROCESSOR, ["abc", "d"], questions)
    assert next(answers).answer == "x abc"
    with pytest.raises(ValueError, match=f"question has {number} entries than videos"):
        list(answers)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"videos": "a.mp4"}, TypeError, "videos must be several, got one str"),
        ({"pruning_ratio": 1.5}, ValueError, "1.5"),
        ({"num_return_sequences": 2}, ValueError, "num_return_sequences is 2"),
        ({"on_error": "skip"}, ValueError, "on_error must be"),
        ({"batch_size": 0}, ValueError, "batch_size must be a whole number of at least 1, got 0"),
        ({"num_workers": True}, ValueError, "num_workers must be a whole number.* got True"),
        ({"decode_timeout": -1}, ValueError, "decode_timeout must be a number above 0, got -1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_arguments_are_refused_at_once(pretend, options, error, message):
    arguments: dict[str, Any] = {"videos": ["a.mp4"], "question": QUESTION} | options
    with pytest.raises(error, match=message):
        answer_videos(pretend(), NO_PROCESSOR, **arguments)


def test_a_stock_model_is_refused_at_once():
    model = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(model_type="molmo2")))
    with pytest.raises(ValueError, match="vision_config"):
        answer_videos(model, NO_PROCESSOR, [], QUESTION)


def test_an_answer_is_its_text_and_its_old_name_stays_a_release(model, processor, clips):
    answer = next(answer_videos(model, processor, clips[:1], QUESTION, **FEW))
    assert str(answer) == answer.text == answer.answer
    assert str(Answer("clip.mp4", QUESTION, error=ValueError())) == ""
    with pytest.warns(DeprecationWarning, match=r"stts_hf\.Answer"):
        assert stts_hf.VideoAnswer is Answer  # type: ignore[attr-defined]
    assert answer == answer != Answer(answer=answer.answer, keep_mask=answer.keep_mask)


def test_pixels_alone_are_cast_and_grids_stay_on_the_host():
    """Qwen2.5-VL's clock runs on float32 seconds: in bfloat16, 2/3 s are 0.668 s, a whole position off after 180 s."""
    seconds = torch.tensor([2 / 3])
    inputs = BatchFeature({"pixel_values_videos": torch.ones(1, 3), "second_per_grid_ts": seconds})
    moved = inputs_for(SimpleNamespace(device="cpu", dtype=torch.bfloat16), inputs)
    assert moved["pixel_values_videos"].dtype == torch.bfloat16
    assert torch.equal(moved["second_per_grid_ts"], seconds)
    listed: dict[str, Any] = {"second_per_grid_ts": [2 / 3]}  # as some versions' processor has it
    assert inputs_for(SimpleNamespace(device="cpu", dtype=torch.bfloat16), listed) == listed
    inputs = BatchFeature({"input_ids": torch.ones(1, 3), "video_grids": torch.tensor([[4, 3, 3]])})
    moved = inputs_for(SimpleNamespace(device="meta", dtype=torch.bfloat16), inputs)
    assert moved["input_ids"].device.type == "meta"
    assert moved["video_grids"] is inputs["video_grids"]  # where the model reads them
