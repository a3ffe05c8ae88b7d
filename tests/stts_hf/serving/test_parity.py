"""vLLM serves what `generate` computes: compared by the log-probabilities of every token of the vocabulary."""

import itertools
from collections.abc import Sequence

import pytest

pytest.importorskip("vllm", reason="needs vLLM: `make test-vllm`")

import numpy as np
from PIL import Image

from tests.clips import numbered_frame, write_clip
from tests.stts_hf.serving.engines import TOLERANCE, Engine, Request, worst

pytestmark = pytest.mark.vllm
BLOCK = 128  # tokens that vLLM's prefix cache holds together on a CPU
SETTINGS = [(0.5, "original"), (0.5, "compact"), (0, "original"), (1, "original"), (1, "compact")]


def num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two prompts begin with alike."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def whole_blocks(num_tokens: int) -> int:
    return num_tokens // BLOCK * BLOCK


@pytest.fixture(scope="module", params=SETTINGS, ids=lambda setting: f"k={setting[0]} {setting[1]}")
def engine(request) -> Engine:
    return Engine(*request.param)


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    return [write_clip(folder / f"{frames}.mp4", frames, fps=20) for frames in (80, 20, 60, 15, 40)]


@pytest.fixture(scope="module")
def requests(clips) -> list[Request]:
    """Eight of different lengths: videos of 4 to 16 frames, one twice, two in a request, images, text alone."""
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
    assert worst(again, expected) < TOLERANCE


def test_another_question_about_a_cached_video(engine, requests, expected):
    engine.forget()
    (first,) = engine.serve(requests[:1])
    (answer,) = engine.serve([requests[4]])
    assert answer.num_cached == whole_blocks(num_shared(first.prompt, answer.prompt))
    assert worst([answer], [expected[4]]) < TOLERANCE


def test_a_cached_video_is_not_reused_beside_another(engine, clips):
    """Its tokens see those of a later video, so that they are not the same any more."""
    engine.forget()
    alone, both = Request("Which?", [clips[0]]), Request("Which?", [clips[0], clips[3]])
    engine.serve([alone])
    (answer,) = engine.serve([both])
    assert answer.num_cached == 0
    assert worst([answer], [engine.generate(both)]) < TOLERANCE


def test_a_bad_video_fails_alone(engine, requests, expected):
    bad = requests[0].for_vllm(engine.processor)
    bad["multi_modal_data"]["video"] = [b"no video at all"]
    with pytest.raises(ValueError, match="bytes"):
        engine.llm.generate(bad, use_tqdm=False)
    assert worst(engine.serve(requests[1:2]), expected[1:2]) < TOLERANCE
