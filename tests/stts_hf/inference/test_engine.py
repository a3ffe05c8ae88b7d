"""Prompts answered in batches, against one plain call of processor and `generate` for each."""

import os
import signal
import time
from typing import Any

import pytest
import torch
from transformers import AutoProcessor

from stts_hf import STTSProcessor
from stts_hf.data.isolated import ProcessDied
from stts_hf.inference.engine import answer_requests
from stts_hf.inference.requests import Answer, Request, make_request
from stts_hf.modeling.video_reading_stts import VideoFile
from stts_hf.video.processors import process
from tests.checkpoints import ALL_TINIES, EVERY, TINY, load_of_one_answer, load_talkative
from tests.clips import write_clip

GREEDY: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
# Kind of media, file, question; neither the clips nor the questions are of one length.
QUESTIONS = [
    ("video", "two.mp4", "What moves?"),
    ("video", "five.mkv", "What moves in this one, and where to?"),
    ("video", "two.mp4", "How many times does it turn around before it stops?"),
    ("image", "wide.png", "Which colour?"),
    ("text", None, "Hello?"),
    ("video", "two.mp4", "Why?"),
    ("image", "wide.png", "What is it a picture of, and who made it?"),
    ("video", "three.mp4", "Where?"),
]


@pytest.fixture(scope="module")
def model():
    return load_talkative()


@pytest.fixture(scope="module")
def prompts(processor, media) -> list[Request]:
    return make_all(processor, media)


@pytest.fixture(scope="module", params=EVERY)
def backbone(request, model, processor, media) -> Any:
    """Model, processor and prompts of each backbone."""
    if request.param == "molmo2":
        return model, processor, make_all(processor, media)
    other = AutoProcessor.from_pretrained(ALL_TINIES[request.param])
    return load_talkative(ALL_TINIES[request.param]), other, make_all(other, media)


def make_all(processor, media) -> list[Request]:
    return [make(processor, kind, str(media / file) if file else None, text) for kind, file, text in QUESTIONS]


def make(processor, kind: str, source: Any, text: str) -> Request:
    parts = [{"type": "text", "text": text}]
    if kind == "text":
        return make_request(processor, [{"role": "user", "content": parts}])
    media: dict[str, Any] = {f"{kind}s": [source]}
    return make_request(processor, [{"role": "user", "content": [{"type": kind}, *parts]}], **media)


def one_by_one(model, processor, prompts, pruning_ratio: float, **options: Any) -> list[tuple[str, int, int, int]]:
    """What was written, tokens of the prompt, of the video, and those kept of it; in calls that know no batches."""
    found = []
    for prompt in prompts:
        images = list(prompt.images) or None
        videos = list(prompt.videos) or None
        inputs = process(processor, text=[prompt.head + prompt.tail], videos=videos, images=images, return_tensors="pt")
        inputs.pop("video_metadata", None)
        length = inputs["input_ids"].shape[1]
        output = model.generate(**inputs, pruning_ratio=pruning_ratio, return_dict_in_generate=True, **options)
        masks = output["keep_mask"] or []
        written = processor.decode(output.sequences[0, length:], skip_special_tokens=True).strip()
        found.append((written, length, sum(m.numel() for m in masks), sum(int(m.sum()) for m in masks)))
    return found


def answers_of(model, processor, prompts, **options: Any) -> list[Answer]:
    """The answers in the order of the prompts; none may have failed."""
    found = dict(answer_requests(model, processor, prompts, **options))
    answers = [found[index] for index in sorted(found) if found[index].error is None]
    assert len(answers) == len(prompts)
    return answers


def batched(model, processor, prompts, **options: Any) -> list[tuple[str, int, int, int]]:
    answers = answers_of(model, processor, prompts, **options)
    return [(a.text, a.prompt_tokens, a.video_tokens, a.video_tokens_kept) for a in answers]


@pytest.mark.parametrize("pruning_ratio", [0.0, 0.5, 1.0])
def test_batches_give_what_one_prompt_after_the_other_does(backbone, pruning_ratio):
    model, processor, prompts = backbone
    expected = one_by_one(model, processor, prompts, pruning_ratio, **GREEDY)
    assert len({written for written, *_ in expected}) >= 4
    # In one batch: "two.mp4" has more questions than there is room for at once.
    for batch_size in (2, 8):
        found = batched(model, processor, prompts, pruning_ratio=pruning_ratio, batch_size=batch_size, **GREEDY)
        assert found == expected


def test_beam_search_gives_what_it_gives_one_by_one(backbone):
    model, processor, prompts = backbone
    beams = GREEDY | {"num_beams": 2}
    expected = one_by_one(model, processor, prompts[:3], 0.5, **beams)
    assert batched(model, processor, prompts[:3], pruning_ratio=0.5, **beams) == expected


def test_beam_search_answers_no_more_at_once_than_asked(model, processor, prompts, monkeypatch):
    sizes = []
    generate = model.generate

    def note_down(**inputs):
        sizes.append(len(inputs["input_ids"]))
        return generate(**inputs)

    monkeypatch.setattr(model, "generate", note_down)
    about_one = [prompts[0], prompts[2], prompts[5]]
    answers_of(model, processor, about_one, pruning_ratio=0.5, batch_size=2, max_new_tokens=1, num_beams=2)
    assert sizes == [2, 1]


def test_a_clip_is_decoded_and_encoded_once_for_all_its_questions(model, processor, prompts, monkeypatch):
    read, encoded = [], []
    index = VideoFile._index

    def note_down(self):
        read.append(self)
        index(self)

    monkeypatch.setattr(VideoFile, "_index", note_down)
    tower = model.model.vision_tower.register_forward_pre_hook(lambda *_: encoded.append(1))
    about_one = [prompts[0], prompts[2], prompts[5]]
    batched(model, processor, about_one, pruning_ratio=0.5, batch_size=2, **GREEDY)
    tower.remove()
    assert (len(read), len(encoded)) == (1, 1)


def test_a_damaged_clip_is_an_error_in_its_place_alone(model, processor, prompts, media):
    damaged = make(processor, "video", str(media / "damaged.mp4"), "What moves?")
    asked = [prompts[0], damaged, prompts[7], prompts[2]]
    answers = dict(answer_requests(model, processor, asked, pruning_ratio=0.5, **GREEDY))
    assert "damaged.mp4" in str(answers[1].error)
    expected = one_by_one(model, processor, [prompts[0], prompts[7], prompts[2]], 0.5, **GREEDY)
    written = {place: answer.text for place, answer in answers.items() if answer.error is None}
    assert written == dict(zip((0, 2, 3), (words for words, *_ in expected), strict=True))


class BadProcessor(STTSProcessor):
    """Ends its process over clips of one frame, and never ends over clips of more than ten."""

    def __call__(self, *arguments, videos=None, **options):
        for video in videos or []:
            if len(video) == 1:
                os.kill(os.getpid(), signal.SIGSEGV)
            if len(video) > 10:
                time.sleep(3600)
        return super().__call__(*arguments, videos=videos, **options)


@pytest.mark.slow
def test_clips_that_end_their_process_or_hang_are_errors_in_their_places_alone(model, prompts, tmp_path):
    processor: Any = BadProcessor.from_pretrained(TINY)
    write_clip(tmp_path / "deadly.mp4", 1)
    write_clip(tmp_path / "hangs.mp4", 100)
    deadly, hangs = (
        make(processor, "video", str(tmp_path / name), "What moves?") for name in ("deadly.mp4", "hangs.mp4")
    )
    asked = [prompts[0], deadly, prompts[4], hangs, prompts[3]]
    limits: dict[str, Any] = {"num_workers": 1, "decode_timeout": 5.0}
    found = dict(answer_requests(model, processor, asked, pruning_ratio=0.5, **limits, **GREEDY))
    for place, said in (
        (1, "deadly.mp4' failed: the process ended with SIGSEGV"),
        (3, "hangs.mp4' failed: it took longer"),
    ):
        error = found.pop(place).error
        assert isinstance(error, ProcessDied)
        assert said in str(error)
    expected = one_by_one(model, processor, asked[::2], 0.5, **GREEDY)
    assert [answer.answer for _, answer in sorted(found.items())] == [words for words, *_ in expected]


def test_questions_that_fit_in_smaller_batches_are_answered(model, processor, prompts, monkeypatch):
    """A device's memory, as a stand-in that takes so many rows at once."""
    generate, rows_that_fit = model.generate, 2

    def limited(**inputs):
        if len(inputs["input_ids"]) > rows_that_fit:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return generate(**inputs)

    asked = [prompts[place] for place in (0, 1, 2, 5, 7)]  # of three clips
    expected = one_by_one(model, processor, asked, 0.5, **GREEDY)
    monkeypatch.setattr(model, "generate", limited)
    assert batched(model, processor, asked, pruning_ratio=0.5, **GREEDY) == expected
    assert batched(model, processor, asked, pruning_ratio=0.5, share=False, **GREEDY) == expected
    rows_that_fit = 0
    found = dict(answer_requests(model, processor, asked, pruning_ratio=0.5, **GREEDY))
    assert {type(answer.error) for answer in found.values()} == {MemoryError}


def test_images_beside_videos_keep_the_options_of_videos(model, processor, prompts):
    found = batched(model, processor, prompts[3:4], pruning_ratio=0.5, processing={"num_frames": 2}, **GREEDY)
    assert found == one_by_one(model, processor, prompts[3:4], 0.5, **GREEDY)


def test_new_tokens_end_with_the_one_that_ends_the_answer(processor, prompts):
    for answer in answers_of(load_of_one_answer(), processor, prompts[:3], pruning_ratio=0.5, max_new_tokens=40):
        assert answer.new_tokens == len(processor.tokenizer(answer.text)["input_ids"]) + 1
