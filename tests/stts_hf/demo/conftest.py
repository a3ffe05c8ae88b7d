"""The app, served on loopback as the command serves it, with a tiny model that talks long."""

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stts_hf import STTSProcessor
from stts_hf.inference.assistant import VideoAssistant
from tests.checkpoints import TINY, load_talkative
from tests.clips import write_clip

PATIENCE = 300  # seconds until what would hang fails
WITHOUT_GRADIO = "the app needs the extra `demo`: pip install 'stts-hf[demo]'"


@pytest.fixture(scope="session")
def assistant() -> VideoAssistant:
    return VideoAssistant(load_talkative(), STTSProcessor.from_pretrained(TINY))


@pytest.fixture(scope="session")
def video(tmp_path_factory) -> Path:
    """Two seconds."""
    return Path(write_clip(tmp_path_factory.mktemp("video") / "two seconds.mp4", 20, fps=10))


class Gate:
    """Stands before what answers: a question that begins with "Wait" is answered halfway until `open` is set."""

    def __init__(self) -> None:
        self.open, self.closed, self.reached = threading.Event(), threading.Event(), threading.Event()

    def reset(self) -> None:
        for event in (self.open, self.closed, self.reached):
            event.clear()

    def __call__(self, answer: Callable[..., Generator[Any, None, None]]) -> Callable[..., Generator[Any, None, None]]:
        def gated(owner: str, video: str, question: str, *rest: Any) -> Generator[Any, None, None]:
            answers = answer(owner, video, question, *rest)
            try:
                for progress in answers:
                    yield progress
                    if question.startswith("Wait") and progress.text:
                        self.reached.set()
                        assert self.open.wait(PATIENCE)
            finally:
                answers.close()
                self.closed.set()

        return gated


@contextmanager
def serving(assistant: VideoAssistant) -> Iterator[Any]:
    """The app, with `url`, `gate` and `page`, its components and what it knows of visitors."""
    from stts_hf.demo.held_clips import Limits
    from stts_hf.demo.serving import build, serve

    gate = Gate()
    page: Any = build(assistant, limits=Limits(upload_mb=1, seconds=5, clips=2, new_tokens=12), on_gpu=gate)
    _, url, _ = serve(page, server_name="127.0.0.1", prevent_thread_lock=True, quiet=True)
    page.url, page.gate = url, gate
    yield page
    page.blocks.close()


@pytest.fixture(scope="session")
def served(assistant) -> Iterator[Any]:
    pytest.importorskip("gradio", reason=WITHOUT_GRADIO)
    with serving(assistant) as page:
        yield page


@pytest.fixture
def gate(served) -> Iterator[Gate]:
    served.gate.reset()
    yield served.gate
    served.gate.open.set()
