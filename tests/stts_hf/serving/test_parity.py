"""vLLM serves what `generate` computes: compared by the log-probabilities of every token of the vocabulary."""

import itertools
from collections.abc import Sequence

import pytest

pytest.importorskip("vllm", reason="needs vLLM: `make test-vllm`")

from tests.stts_hf.serving.cases import SETTINGS, Request, make_checkpoints, make_clips, make_requests
from tests.stts_hf.serving.engines import TOLERANCE, Engine, worst

pytestmark = pytest.mark.vllm
BLOCK = 128  # tokens that vLLM's prefix cache holds together on a CPU


def num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two prompts begin with alike."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def whole_blocks(num_tokens: int) -> int:
    return num_tokens // BLOCK * BLOCK


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return make_checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module", params=SETTINGS, ids=lambda setting: "{} k={} {}".format(*setting))
def engine(request, checkpoints) -> Engine:
    backbone, ratio, rule = request.param
    return Engine(checkpoints[backbone], ratio, rule)


@pytest.fixture(scope="module")
def sees_later_items(engine) -> bool:
    """Whether what vLLM keeps of a video depends on what comes behind it."""
    return engine.model.config.model_type == "stts"  # Molmo2's


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    return make_clips(tmp_path_factory.mktemp("clips"))


@pytest.fixture(scope="module")
def requests(clips) -> list[Request]:
    return make_requests(clips)


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
