"""What a visitor leaves behind who never says goodbye: it goes a while after the last question, here 12 seconds."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stts_hf.demo.held_clips import Answerer, Limits
from tests.stts_hf.demo.conftest import PATIENCE, WITHOUT_GRADIO

pytest.importorskip("gradio", reason=WITHOUT_GRADIO)
gradio_client = pytest.importorskip("gradio_client", reason=WITHOUT_GRADIO)
httpx = pytest.importorskip("httpx", reason=WITHOUT_GRADIO)
pytestmark = pytest.mark.slow  # it waits for all that time


@pytest.fixture(scope="module")
def forgetful(assistant, video) -> Iterator[Any]:
    from stts_hf.demo import app
    from stts_hf.demo.serving import own_folder, serve

    own_folder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "HOUR", 12)
        page: Any = app.Page(Answerer({"scorer": assistant}, Limits(new_tokens=1)), video)
        _, page.url, _ = serve(page, server_name="127.0.0.1", prevent_thread_lock=True, quiet=True)
    yield page
    page.blocks.close()


def wait_until(holds: Callable[[], bool]) -> None:
    started = time.monotonic()
    while not holds():
        assert time.monotonic() - started < PATIENCE
        time.sleep(0.05)


def test_files_and_clips_go_and_the_next_question_says_so(forgetful, video):
    """Also those that nobody asked about."""
    with video.open("rb") as file:
        httpx.post(f"{forgetful.url}gradio_api/upload", files={"files": ("unused.mp4", file)}).raise_for_status()
    cache = Path(forgetful.blocks.GRADIO_CACHE)
    (unused,) = cache.glob("*/unused.mp4")
    client = gradio_client.Client(forgetful.url, verbose=False)
    _, chat, *_ = client.predict("What?", gradio_client.handle_file(video), 50, "scorer", api_name="/ask")
    assert "frames read" in chat[-1]["content"][0]["text"]
    upload = Path(forgetful.visits.find(client.session_hash).video)
    wait_until(lambda: forgetful.visits.find(client.session_hash) is None)
    wait_until(lambda: not upload.exists())
    assert len(forgetful.visits.clips) == 0
    wait_until(lambda: not unused.exists())
    client.close()
    kept = {"path": str(upload), "meta": {"_type": "gradio.FileData"}}  # as the page sends it
    begun = httpx.post(f"{forgetful.url}gradio_api/call/ask", json={"data": ["And now?", kept, 50, "scorer", 0]}).json()
    answer = httpx.get(f"{forgetful.url}gradio_api/call/ask/{begun['event_id']}", timeout=PATIENCE).text
    assert "The video is not kept here any more. Choose it again." in answer
