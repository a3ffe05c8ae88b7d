"""vLLM serves what `generate` computes: compared by the log-probabilities of every token of the vocabulary."""

import itertools
from collections.abc import Sequence

import pytest

pytest.importorskip("vllm", reason="needs vLLM: `make test-vllm`")

import numpy as np
from PIL import Image
from transformers import AutoProcessor

from tests.checkpoints import TINIES, TINY, load_talkative
from tests.clips import numbered_frame, write_clip
from tests.stts_hf.serving.engines import TOLERANCE, Engine, Request, worst

pytestmark = pytest.mark.vllm
BLOCK = 128  # tokens that vLLM's prefix cache holds together on a CPU
SETTINGS = [
    ("molmo2", 0.5, "original"),
    ("molmo2", 0.5, "compact"),
    ("molmo2", 0, "original"),
    ("molmo2", 1, "original"),
    ("molmo2", 1, "compact"),
    ("qwen3_vl", 0.5, "original"),
    ("qwen3_vl", 0, "original"),
    ("qwen3_vl", 1, "original"),
]
# Of a step, so that eight prompts meet its end: Molmo2's go whole into one, Qwen3-VL's are cut inside their videos.
STEP = {"molmo2": 1024, "qwen3_vl": 112}


def num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two prompts begin with alike."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def whole_blocks(num_tokens: int) -> int:
    return num_tokens // BLOCK * BLOCK


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Of Qwen3-VL one that does not repeat itself: with a language model drawn anew, and a head of its own."""
    folder = tmp_path_factory.mktemp("qwen3_vl")
    model = load_talkative(TINIES["qwen3_vl"])
    model.config.tie_word_embeddings = False
    model.save_pretrained(folder)
    AutoProcessor.from_pretrained(TINIES["qwen3_vl"]).save_pretrained(folder)
    return {"molmo2": TINY, "qwen3_vl": folder}


@pytest.fixture(scope="module", params=SETTINGS, ids=lambda setting: "{} k={} {}".format(*setting))
def engine(request, checkpoints) -> Engine:
    backbone, ratio, rule = request.param
    return Engine(ratio, rule, checkpoints[backbone], max_num_batched_tokens=STEP[backbone], max_model_len=1024)


@pytest.fixture(scope="module")
def sees_later_items(engine) -> bool:
    """Whether what vLLM keeps of a video depends on what comes behind it."""
    return engine.processor.video_token == "<|video|>"  # Molmo2's


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    return [write_clip(folder / f"{frames}.mp4", frames, fps=20) for frames in (240, 20, 60, 15, 40)]


@pytest.fixture(scope="module")
def requests(clips) -> list[Request]:
    """Eight of different lengths: videos of 4 to 24 frames, one twice, two in a request, images, text alone."""
    picture = Image.fromarray(numbered_frame(7))
    wide = Image.fromarray(np.tile(numbered_frame(9), (1, 2, 1)))
    return [
        Request("What moves?", [clips[0]]),
        Request("How many shapes are there, and which of them is the largest?", [clips[1]]),
        Request("What moves?", [clips[2]]),
        Request("Where?", [clips[3]]),
        Request("Which colour has the square at the end?", [clips[0]]),
        Request("Which is longer?", [clips[3], clips[1]]),
        Request("Is it in the video?", [clips[4]], [picture]),
        Request("What differs?", images=[picture, wide]),
    ]


@pytest.fixture(scope="module")
def expected(engine, requests):
    return [engine.generate(request) for request in requests]


def test_eight_requests_at_once(engine, requests, expected):
    """More than a step takes (`max_num_batched_tokens`), so that prompts meet its end."""
    engine.forget()
    assert worst(engine.serve(requests), expected) < TOLERANCE


def test_one_by_one(engine, requests, expected):
    for request, answer in zip(requests, expected, strict=True):
        engine.forget()
        served = engine.serve([request])
        assert served[0].num_cached == 0
        assert worst(served, [answer]) < TOLERANCE


def test_a_prefix_that_is_cached(engine, requests, expected):
    """The second time, whole blocks of tokens are not computed; they end inside the video for most requests."""
    engine.forget()
    engine.serve(requests)
    again = engine.serve(requests)
    assert [answer.num_cached for answer in again] == [whole_blocks(len(answer.prompt) - 1) for answer in again]
    assert any(answer.num_cached for answer in again)
    assert worst(again, expected) < TOLERANCE


def test_another_question_about_a_cached_video(engine, requests, expected):
    engine.forget()
    (first,) = engine.serve(requests[:1])
    (answer,) = engine.serve([requests[4]])
    assert answer.num_cached == whole_blocks(num_shared(first.prompt, answer.prompt))
    assert worst([answer], [expected[4]]) < TOLERANCE


def test_a_cached_video_beside_another(engine, clips, sees_later_items):
    """Where its tokens see those of a later video, they are not the same any more, and not reused."""
    engine.forget()
    alone, both = Request("Which?", [clips[0]]), Request("Which?", [clips[0], clips[3]])
    (first,) = engine.serve([alone])
    (answer,) = engine.serve([both])
    shared = 0 if sees_later_items else whole_blocks(num_shared(first.prompt, answer.prompt))
    assert answer.num_cached == shared
    assert worst([answer], [engine.generate(both)]) < TOLERANCE


def test_a_bad_video_fails_alone(engine, requests, expected):
    bad = requests[0].for_vllm(engine.processor)
    bad["multi_modal_data"]["video"] = [b"no video at all"]
    with pytest.raises(ValueError, match="bytes"):
        engine.llm.generate(bad, use_tqdm=False)
    assert worst(engine.serve(requests[1:2]), expected[1:2]) < TOLERANCE
