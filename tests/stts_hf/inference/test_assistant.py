"""`load` and `VideoAssistant`: three lines that answer, whichever checkpoint, and what they refuse."""

import resource
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, pipeline

import stts_hf
from stts_hf.inference.engine import answer_videos
from tests.checkpoints import TINY
from tests.clips import write_audio

QUESTION = "What moves?"
GREEDY: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}


@pytest.fixture(scope="module")
def assistant(any_folder) -> stts_hf.VideoAssistant:
    return stts_hf.load(any_folder, device="cpu")


@pytest.fixture(scope="module")
def two(media) -> str:
    return str(media / "two.mp4")


def test_three_lines_answer_and_say_what_was_seen(assistant, two):
    answer = assistant.answer(two, QUESTION, **GREEDY)
    expected: Any
    (expected,) = answer_videos(assistant.model, assistant.processor, [two], QUESTION, **GREEDY)
    assert answer.answer == expected.answer
    assert torch.equal(answer.keep_mask, expected.keep_mask)
    assert torch.equal(answer.token_scores, expected.token_scores)
    assert (answer.timestamps, answer.grid, answer.prompt_tokens) == (
        expected.timestamps,
        expected.grid,
        expected.prompt_tokens,
    )
    assert answer.tokens_read_before == 0


def test_settings_of_load_are_those_of_the_model(two):
    loaded = stts_hf.load(TINY, selector="random", pruning_ratio=0.25, device=torch.device("cpu"), dtype="bfloat16")
    assert (loaded.pruning_ratio, loaded.model.config.vision_config.selector) == (0.25, "random")
    assert (loaded.model.dtype, loaded.model.training) == (torch.bfloat16, False)
    answer = loaded.answer(two, QUESTION, **GREEDY)
    assert 4 * answer.video_tokens_kept == 3 * answer.video_tokens
    loaded.model.config.vision_config.video_token_budget = 30
    assert loaded.pruning_ratio is None
    loaded.pruning_ratio = 0.5
    assert loaded.pruning_ratio == 0.5
    assert loaded.answer(two, QUESTION, **GREEDY).video_tokens_kept < answer.video_tokens_kept
    assert loaded.answer(two, QUESTION, pruning_ratio=0.25, **GREEDY).answer == answer.answer


def test_a_device_map_places_the_model(two):
    loaded = stts_hf.load(TINY, device_map="cpu")
    assert loaded.answer(two, QUESTION, **GREEDY).answer is not None
    with pytest.raises(ValueError, match=r"device is 'cpu' and device_map is 'cpu'\. Pass one of them"):
        stts_hf.load(TINY, device="cpu", device_map="cpu")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"checkpoint": "./gone"}, ValueError, r"checkpoint \./gone is not a folder"),
        ({"checkpoint": 3}, TypeError, "checkpoint must be a folder or the name of a Hub repository, got 3"),
        ({"selector": "best"}, ValueError, "selector must be one of scorer, cosine, random, got 'best'"),
        ({"device": "cuda:99"}, ValueError, "cuda:99 cannot be used here"),
        ({"device": 0}, ValueError, "device 0 cannot be used here"),
        ({"dtype": "float23"}, ValueError, "dtype is 'float23', but must be"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_arguments_of_load_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        stts_hf.load(**({"checkpoint": TINY} | arguments))


def test_a_batch_gives_one_answer_for_each_video(assistant, media):
    videos = [str(media / name) for name in ("two.mp4", "five.mkv", "three.mp4")]
    questions = [QUESTION, "Where to?", "Who is it?"]
    found = assistant.answer_batch(videos, questions, batch_size=2, **GREEDY)
    expected = [assistant.answer(*pair, **GREEDY) for pair in zip(videos, questions, strict=True)]
    assert [(answer.video, answer.question) for answer in found] == list(zip(videos, questions, strict=True))
    assert [answer.answer for answer in found] == [answer.answer for answer in expected]
    assert [answer.question for answer in assistant.answer_batch(iter(videos), QUESTION, **GREEDY)] == [QUESTION] * 3


def test_a_batch_needs_a_question_for_each_video(assistant, two):
    with pytest.raises(ValueError, match=r"questions are 1 and videos 2\. Pass one question for each"):
        assistant.answer_batch([two, two], [QUESTION])
    with pytest.raises(TypeError, match="videos must be several, got one str"):
        assistant.answer_batch(two, QUESTION)


def test_a_stream_is_the_answer_in_pieces(assistant, two):
    stream = assistant.stream(two, QUESTION, **GREEDY)
    pieces = list(stream)
    expected = assistant.answer(two, QUESTION, **GREEDY)
    assert "".join(pieces).strip() == stream.answer.answer == expected.answer
    assert torch.equal(stream.answer.keep_mask, expected.keep_mask)
    with pytest.raises(TypeError, match="streamer is set by the stream itself"):
        assistant.stream(two, QUESTION, streamer=None)


def test_options_of_frames_are_those_of_the_processor(assistant, media):
    long = str(media / "five.mkv")
    assert assistant.answer(long, QUESTION, processing={"num_frames": 2}, **GREEDY).num_frames == 2
    scaled = {"num_frames": 2, "test_time_scaling": True}
    # ceil(2 / (1 - 0.5)) = 4
    assert assistant.answer(long, QUESTION, processing=scaled, pruning_ratio=0.5, **GREEDY).num_frames == 4
    assert assistant.watch(long, processing=scaled, pruning_ratio=0.5).seen.num_frames == 4


@pytest.fixture(scope="module")
def broken(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("broken")
    (folder / "words.mp4").write_bytes(b"no video\n" * 100)
    return {
        "none": None,
        "missing": str(folder / "gone.mp4"),
        "sound": write_audio(folder / "sound.mp4"),
        "words": folder / "words.mp4",
        "no-frames": [],
        "no-time": np.zeros((64, 64), dtype=np.uint8),
    }


@pytest.mark.parametrize(
    ("video", "message"),
    [
        ("none", "video is None"),
        ("missing", r"gone\.mp4"),
        ("sound", r"no video in video file '.*sound\.mp4'"),
        ("words", r"words\.mp4"),
        ("no-frames", r"video is \[\]"),
        ("no-time", r"frames \(T, height, width, 3\)"),
    ],
)
def test_what_is_no_video_is_one_sentence_and_the_next_answer_works(assistant, broken, two, video, message):
    for ask in (lambda: list(assistant.stream(broken[video], QUESTION)), lambda: assistant.watch(broken[video])):
        with pytest.raises(ValueError, match=message) as caught:
            ask()
        assert "\n" not in str(caught.value)
    assert assistant.answer(two, QUESTION, **GREEDY).answer is not None


@pytest.mark.parametrize(
    ("question", "options", "error", "message"),
    [
        ("", {}, ValueError, "question is '', which asks nothing"),
        ("Is <|im_end|> there?", {}, ValueError, r"question holds '<\|im_end\|>'"),
        (QUESTION, {"num_frames": 2}, ValueError, r"num_frames is 2.* processing=\{'num_frames': 2\}"),
        (QUESTION, {"max_new_token": 8}, ValueError, "Did you mean 'max_new_tokens'"),
        (QUESTION, {"prunning_ratio": 0.5}, ValueError, "Did you mean 'pruning_ratio'"),
        (QUESTION, {"generation_config": GenerationConfig(pruning_ratio=0.9)}, ValueError, "pruning_ratio=0.9"),
        (QUESTION, {"num_return_sequences": 2}, ValueError, "num_return_sequences is 2"),
        (QUESTION, {"processing": {"num_frame": 2}}, ValueError, "'num_frame'.* Did you mean 'num_frames'"),
        (QUESTION, {"processing": 4}, TypeError, "processing must be a dict of options.* got 4"),
        (
            QUESTION,
            {"processing": {"images_kwargs": 3}},
            TypeError,
            r"processing\['images_kwargs'\] must be a dict.* 3",
        ),
        (QUESTION, {"max_new_tokens": "3"}, TypeError, "max_new_tokens must be a whole number of tokens, got '3'"),
        (QUESTION, {"processing": {"pruning_ratio": 0.9}}, ValueError, "pruning_ratio=0.9 has no effect"),
    ],
    ids=lambda value: "" if isinstance(value, dict) and "generation_config" in value else str(value),
)
def test_bad_questions_and_options_are_refused(assistant, two, question, options, error, message):
    with pytest.raises(error, match=message):
        assistant.answer(two, question, **options)


def seconds_of(*command: str) -> float:
    """Of the processor: other work on the machine is none of ours."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *command], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("command", [("-c", "import stts_hf"), ("-m", "stts_hf.cli.main", "--help")], ids=" ".join)
def test_the_package_and_its_help_come_in_half_a_second(command):
    assert seconds_of(*command) < 0.5


@pytest.mark.parametrize("name", ["answer", "watch", "stream"])
def test_a_list_of_videos_is_told_from_a_list_of_pictures(assistant, two, name):
    arguments = () if name == "watch" else (QUESTION,)
    with pytest.raises(TypeError, match=r"a list of 2 videos. Ask about several with `answer_batch`"):
        list(getattr(assistant, name)([two, two], *arguments))


@pytest.mark.parametrize("name", ["answer", "watch"])
def test_a_selector_in_a_call_is_the_model_s(assistant, two, name):
    arguments = () if name == "watch" else (QUESTION,)
    with pytest.raises(ValueError, match=r"pass it to `stts_hf.load`"):
        getattr(assistant, name)(two, *arguments, selector="cosine")


def test_options_of_answers_are_none_of_watching(assistant, two):
    with pytest.raises(TypeError, match=r"max_new_tokens is 3, but reading a video generates nothing"):
        assistant.watch(two, max_new_tokens=3)
    with assistant.watch(two) as clip, pytest.raises(ValueError, match="It is the video's: pass it to `watch`"):
        clip.ask(QUESTION, processing={"num_frames": 2})


def test_what_a_clip_does_is_said_where_it_is_looked_for(assistant):
    with pytest.raises(AttributeError, match=r"ask is a method of a clip, assistant.watch\(video\).ask"):
        assistant.ask(QUESTION)
    with pytest.raises(AttributeError, match=r"no attribute 'reply'$"):
        assistant.reply(QUESTION)


def test_assistant_and_clip_say_what_they_are(assistant, two):
    config = assistant.model.config
    assert repr(assistant).startswith(f"VideoAssistant({config.name_or_path.rpartition('/')[2]} on cpu, ")
    assert f"dropped by {config.vision_config.selector})" in repr(assistant)
    with assistant.watch(two) as clip:
        seen = clip.seen
        told = f"Clip({two}, {seen.num_frames} frames, {seen.video_tokens_kept} of {seen.video_tokens} tokens kept"
        assert repr(clip) == told + ")"
    assert repr(clip) == told + ", released)"


def test_a_gpu_that_is_not_there_is_one_sentence(any_folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"^device cuda:1 cannot be used here: PyTorch finds no CUDA GPU; use cpu"):
        stts_hf.load(any_folder, device="cuda:1")


def test_a_batch_in_a_pipeline_says_what_to_do(two):
    loaded = stts_hf.load(TINY, device="cpu")
    pipe: Any = pipeline("image-text-to-text", model=loaded.model, processor=loaded.processor)  # type: ignore[call-overload]
    content = [{"type": "video", "video": two}, {"type": "text", "text": QUESTION}]
    messages = [{"role": "user", "content": content}]
    with pytest.raises(ValueError, match=r"`pipeline\(batch_size=...\)` keeps one frame of each video: leave it at 1"):
        pipe(text=[messages, messages], batch_size=2, max_new_tokens=2)
