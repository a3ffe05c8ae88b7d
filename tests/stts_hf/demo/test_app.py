"""The app as a program asks it, through Gradio's own client: answers, limits, and what nobody may reach."""

import concurrent.futures
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoProcessor

from stts_hf import VideoAssistant, register_auto_classes
from stts_hf.modeling import video_reading_stts
from stts_hf.video import sources
from tests.checkpoints import ALL_TINIES, OTHERS, QWENS, load_talkative
from tests.clips import write_clip
from tests.small_disk import small_disk
from tests.stts_hf.demo.conftest import PATIENCE, WITHOUT_GRADIO, serving

gradio = pytest.importorskip("gradio", reason=WITHOUT_GRADIO)
gradio_client = pytest.importorskip("gradio_client", reason=WITHOUT_GRADIO)
httpx = pytest.importorskip("httpx", reason=WITHOUT_GRADIO)


@pytest.fixture
def client(served):
    with_url = gradio_client.Client(served.url, verbose=False)
    yield with_url
    with_url.close()


def cache_of(served: Any) -> Path:
    return Path(served.blocks.GRADIO_CACHE)


def ask(client: Any, video: object, question: str = "What moves?", *asked_with: object):
    """The last answer with the line under it, and the texts of timeline and table. Without sliders: 50 % by scorer."""
    upload = gradio_client.handle_file(video) if isinstance(video, Path) else video
    job = client.submit(question, upload, *(asked_with or (50, "scorer")), api_name="/ask")
    _, chat, timeline, numbers, *_ = job.result(timeout=PATIENCE)
    return chat[-1]["content"][0]["text"], timeline, numbers


def test_the_second_question_is_answered_from_the_held_clip_and_says_so(client, assistant, video):
    first, timeline, _ = ask(client, video)
    again, _, numbers = ask(client, video, "Where is it?")
    assert "9 frames read in" in first  # 2 s, four a second, and the last
    assert "Answered from cache" in again
    assert again.startswith(assistant.answer(str(video), "Where is it?", pruning_ratio=0.5, max_new_tokens=12).answer)
    assert "72 of 144" in timeline
    assert numbers.count("<tr>") == 2  # the head, and one way of watching
    assert "not measured yet" in numbers


@pytest.mark.parametrize("other", [*QWENS, *OTHERS])
@pytest.mark.slow
def test_another_backbone_is_asked_twice_about_the_clip_it_holds(other, video):
    register_auto_classes()
    folder = ALL_TINIES[other]
    assistant = VideoAssistant(load_talkative(folder), AutoProcessor.from_pretrained(folder))
    with serving(assistant) as page:
        client = gradio_client.Client(page.url, verbose=False)
        for question in ("What moves?", "Where is it?"):
            said, timeline, _ = ask(client, video, question)
            answer = assistant.answer(str(video), question, pruning_ratio=0.5, max_new_tokens=12)
            assert said.startswith(answer.answer)
            assert f"{answer.video_tokens_kept} of {answer.video_tokens}" in timeline
        assert "Answered from cache" in said
        client.close()


def test_the_ratio_and_the_selector_are_those_that_were_chosen(client, video):
    asked = {
        choice: ask(client, video, "What?", *choice) for choice in [(25, "cosine"), (0, "random"), (100, "scorer")]
    }
    assert "25% dropped, cosine" in asked[25, "cosine"][0]
    assert [words for _, words, _ in asked.values() if "108 of 144" in words] == [asked[25, "cosine"][1]]
    assert "nothing dropped" in asked[0, "random"][0]
    assert "0 of 144" in asked[100, "scorer"][1]


@pytest.mark.slow
def test_a_threshold_takes_the_place_of_the_share_and_is_refused_where_scores_have_no_level(client, assistant, video):
    said, timeline, numbers = ask(client, video, "What?", 50, "scorer", 0.02)
    kept = assistant.answer(str(video), "What?", score_threshold=0.02, max_new_tokens=1).video_tokens_kept
    assert "scores from 0.02 kept, learned scorer" in said
    assert f"{kept} of 144" in timeline
    assert "scores from 0.02 kept, learned scorer" in numbers
    with pytest.raises(gradio_client.exceptions.AppError, match="not comparable between videos"):
        ask(client, video, "What?", 50, "random", 0.02)


BAD = {
    "text": (lambda path: path.write_text("not a video"), "Cannot read video file .*bad.mp4.* as a video"),
    "long": (lambda path: write_clip(path, 6, fps=1), "lasts 6.0 s, but at most 5.0 s are taken here"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_file_that_cannot_be_asked_about_is_refused_and_the_next_question_works(client, video, tmp_path, kind):
    make, words = BAD[kind]
    make(tmp_path / "bad.mp4")
    with pytest.raises(gradio_client.exceptions.AppError, match=words) as refused:
        ask(client, tmp_path / "bad.mp4")
    assert str(tmp_path) not in str(refused.value)
    assert "frames read" in ask(client, video)[0]


def test_a_file_above_the_limit_is_not_taken(served):
    sizes = 2**20 + 1, 2**20
    taken = [httpx.post(f"{served.url}gradio_api/upload", files={"files": ("a.mp4", bytes(size))}) for size in sizes]
    assert [answer.status_code for answer in taken] == [413, 200]


def test_no_path_outside_its_own_folders_is_read(served, video):
    """As a program that does without Gradio's client, which would upload the file."""
    cache = cache_of(served)
    for path in video, Path("/etc/hostname"), Path(__file__), cache.parent / "sample_clip.mp4", cache / ".." / "x.mp4":
        given = {"path": str(path), "meta": {"_type": "gradio.FileData"}}
        begun = httpx.post(f"{served.url}gradio_api/call/ask", json={"data": ["What?", given, 50, "scorer"]}).json()
        answer = httpx.get(f"{served.url}gradio_api/call/ask/{begun['event_id']}", timeout=PATIENCE).text
        assert "event: error" in answer
        assert "event: generating" not in answer
        assert httpx.get(f"{served.url}gradio_api/file={path}").status_code in (403, 404)


FILE_DATA = {"_type": "gradio.FileData"}


@pytest.mark.parametrize("kind", ["capitals", "only url", "stream", "no meta", "dots"])
def test_no_address_is_fetched_and_no_form_of_a_path_gets_round_the_uploads(served, monkeypatch, kind):
    fetched: list[str] = []

    def fetch(url: str, *limits: float, **options: Any) -> Any:
        fetched.append(url)
        raise ValueError("fetched")

    async def fetch_for_gradio(url: str, cache_dir: str) -> Any:  # it fetches from public addresses alone
        fetch(url)

    monkeypatch.setattr(sources, "download", fetch)
    monkeypatch.setattr(video_reading_stts.httpx, "get", fetch)
    monkeypatch.setattr(gradio.processing_utils, "async_ssrf_protected_download", fetch_for_gradio)
    address = "http://127.0.0.1:1/a.mp4"
    given: Any = {
        "capitals": {"path": address.upper(), "meta": FILE_DATA},
        "only url": {"path": "a.mp4", "url": address, "meta": FILE_DATA},
        "stream": {"path": address, "is_stream": True, "meta": FILE_DATA},
        "no meta": {"path": __file__},
        "dots": {"path": f"{cache_of(served)}/../../../../../{__file__}", "meta": FILE_DATA},
    }[kind]
    with httpx.Client(base_url=served.url, timeout=PATIENCE) as browser:
        begun = browser.post("gradio_api/call/ask", json={"data": ["What?", given, 50, "scorer"]}).json()
        answer = browser.get(f"gradio_api/call/ask/{begun['event_id']}").text
    assert fetched == []
    assert "event: error" in answer
    assert "frames read" not in answer


@pytest.mark.slow
def test_two_visitors_are_answered_at_once(served, gate, video):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(ask, gradio_client.Client(served.url, verbose=False), video, "Wait for it.")
        assert gate.reached.wait(PATIENCE)
        assert "frames read" in ask(gradio_client.Client(served.url, verbose=False), video)[0]
        assert not first.done()
        gate.open.set()
        assert "frames read" in first.result(PATIENCE)[0]


def test_an_answer_that_is_cancelled_ends_and_the_next_question_works(client, served, gate, video):
    job = client.submit("Wait for it.", gradio_client.handle_file(video), 50, "scorer", api_name="/ask")
    assert gate.reached.wait(PATIENCE)
    threading.Timer(0.5, gate.open.set).start()  # what is being written is written to its next word
    job.cancel()
    assert gate.closed.wait(PATIENCE)
    # Gradio's client drops a question that it sends while the server closes the stream of the one before.
    stream = client.streaming_future
    assert stream is None or concurrent.futures.wait([stream], PATIENCE).done
    assert "Answered from cache" in ask(client, video)[0]


def test_when_a_visitor_leaves_its_clips_go(served, video):
    client = gradio_client.Client(served.url, verbose=False)
    ask(client, video)
    held = len(served.visits.clips)
    served.visits.leave(client.session_hash)
    assert len(served.visits.clips) == held - 1


def test_an_upload_that_broke_off_is_not_kept(served):
    with small_disk(1000):
        broken = httpx.post(f"{served.url}gradio_api/upload", files={"files": ("a.mp4", bytes(5000))})
    assert broken.status_code == 500
    (left,) = cache_of(served).glob("tmp*")
    for age, stays in (500, True), (700, False):
        os.utime(left, (0, time.time() - age))
        served.leave(SimpleNamespace(session_hash="me"))
        assert left.exists() == stays


def test_a_full_disk_is_said_and_an_overlay_is_drawn_once(served, video, monkeypatch):
    request = SimpleNamespace(session_hash="me")
    list(served.ask("What?", str(video), 50, "scorer", request))
    with small_disk(1000), pytest.raises(gradio.Error, match="The disk of this server is full"):
        list(served.draw(request))
    sizes = [Path(shown[served.overlay]).stat().st_size for shown in served.draw(request) if served.overlay in shown]
    assert sizes[0] > 1000
    monkeypatch.setattr("stts_hf.demo.app.write_overlays", None)
    assert [served.overlay in shown for shown in served.draw(request)] == [False]
    served.visits.leave("me")


def test_a_question_that_is_quicker_than_the_choice_of_its_clip_is_answered(served, video):
    request = SimpleNamespace(session_hash="quick")
    asked = served.ask("What?", str(video), 50, "scorer", request)
    next(asked)
    chosen = list(served.choose(str(video), request))
    assert all(served.timeline not in changes for changes in chosen)
    assert all("value" not in changes[served.chat].constructor_args for changes in chosen)
    *_, last = asked
    assert [message["role"] for message in last[served.chat]] == ["user", "assistant"]
    assert "72 of 144" in last[served.timeline]
    served.visits.leave("quick")


def test_the_answer_about_a_clip_that_is_replaced_ends_and_clears_what_it_showed(served, video, tmp_path):
    request = SimpleNamespace(session_hash="moves on")
    other = write_clip(tmp_path / "other.mp4", 5)
    list(served.choose(str(video), request))
    held = len(served.visits.clips)
    asked = served.ask("What?", str(video), 50, "scorer", request)
    next(asked), next(asked)
    list(served.choose(str(other), request))
    (last,) = asked
    assert last[served.chat] == []
    assert last[served.timeline] == ""
    assert len(served.visits.clips) == held
    assert list(served.ask("Where?", str(video), 50, "scorer", request)) == []  # it waited in the queue
    *_, last = served.ask("What?", str(other), 50, "scorer", request)
    assert "frames read" in last[served.chat][-1]["content"]
    served.visits.leave("moves on")


def test_it_listens_on_this_machine_only_and_keeps_its_files_to_itself(served):
    assert served.url.startswith("http://127.0.0.1:")
    assert cache_of(served).parent.stat().st_mode & 0o077 == 0
    assert os.environ["GRADIO_TEMP_DIR"] == str(cache_of(served))


def test_stop_is_answered_while_the_video_is_still_read(served, video):
    request: Any = SimpleNamespace(session_hash="stops")
    *_, answered = served.ask("Where is it?", str(video), 70, "cosine", request)
    running = served.ask("What moves?", str(video), 50, "scorer", request)
    next(running)  # shows the question; nothing is read yet
    shown = served.stop(request)
    assert "Stopped" in shown[served.chat][-1]["content"]
    last = list(running)[-1]
    assert "Stopped" in last[served.chat][-1]["content"]
    assert "empty answer" not in last[served.chat][-1]["content"]
    for python in (answered[served.code].value, last[served.code].value):  # a question with its own settings
        assert ("Where is it?" in python) == ("0.7" in python) == ("cosine" in python) != ("What moves?" in python)
    assert served.chat not in served.stop(request)  # nothing runs any more
    served.visits.leave("stops")
