"""The app in a headless Chromium: what a person does, in a window and in one of a phone."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clips import write_clip
from tests.stts_hf.demo.conftest import PATIENCE, WITHOUT_GRADIO

pytest.importorskip("gradio", reason=WITHOUT_GRADIO)
playwright = pytest.importorskip("playwright.sync_api", reason="browser tests need playwright: pip install playwright")
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="browser tests need Chromium: apt-get install chromium"),
]
WIDTHS = {"window": 1280, "phone": 390}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def visit(served, browser, request) -> Iterator[Any]:
    """Opens the page in a browser of its own; `page.elsewhere` is what it asked of other hosts."""
    contexts = []

    def visit(width: int = 1280) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 844})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(1000 * PATIENCE)
        page.elsewhere = []
        page.on("request", lambda asked: note_request(page, asked.url))
        page.goto(served.url)
        page.wait_for_selector("#box textarea")
        return page

    def note_request(page: Any, url: str) -> None:
        if not url.startswith((served.url, "data:", "blob:")):
            page.elsewhere.append(url)

    yield visit
    for context in contexts:
        context.close()


def upload(page: Any, path: Path) -> None:
    page.set_input_files("#clip input[type=file]", str(path))
    page.wait_for_selector("#clip video")


def ask(page: Any, question: str) -> None:
    page.fill("#box textarea", question)
    page.press("#box textarea", "Enter")


def wait_for(page: Any, words: str, where: str = "#chat") -> None:
    page.wait_for_function("([at, words]) => document.querySelector(at)?.innerText.includes(words)", arg=[where, words])


def wait_until_answered(page: Any) -> None:
    page.wait_for_selector("#box .submit-button")


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_one_uploads_asks_moves_the_ratio_and_asks_again(visit, video, width):
    page = visit(width)
    upload(page, video)
    ask(page, "What moves?")
    wait_for(page, "9 frames read in")
    wait_for(page, "72 of 144", "#tokens")
    page.wait_for_selector("#seen video")  # what the model saw comes to the front by itself
    ask(page, "Where is it?")
    wait_for(page, "Answered from cache")
    wait_until_answered(page)
    page.fill("#drop input[type=number]", "25")
    page.press("#drop input[type=number]", "Tab")
    ask(page, "And now?")
    wait_for(page, "108 of 144", "#tokens")
    wait_for(page, "25% dropped", "#numbers")
    wait_until_answered(page)
    page.click("#compare")
    wait_for(page, "nothing dropped")
    page.wait_for_function("!document.querySelector('#numbers').innerText.includes('not measured yet')")
    assert page.is_hidden("#compare")
    assert "108 of 144" in page.inner_text("#tokens")  # what is looked at stays
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.elsewhere == []


def test_the_sample_clip_answers_a_question_that_is_offered(visit):
    page = visit()
    page.click("#sample")
    page.click("text=Which letter flashes up?")
    wait_for(page, "16 frames read in")


def test_both_pictures_and_the_timeline_are_at_the_same_moment(visit, video):
    page = visit()
    upload(page, video)
    ask(page, "What moves?")
    page.wait_for_selector("#seen video")
    wait_until_answered(page)
    page.evaluate("document.querySelector('#seen video').pause()")
    box = page.locator("figure.timeline svg").bounding_box()
    page.mouse.click(box["x"] + 0.6 * box["width"], box["y"] + 20)
    at = "id => Math.abs(document.querySelector(id + ' video').currentTime - 1.2) < 0.05"
    page.wait_for_function(at, arg="#seen")
    page.click("role=tab[name='Video']")
    page.wait_for_function(at, arg="#clip")
    page.evaluate("document.querySelector('#clip video').currentTime = 0.5")
    page.wait_for_function("Math.abs(document.querySelector('.playhead').getAttribute('x1') - 250) < 15")
    page.click("role=tab[name='What the model saw']")
    page.wait_for_function("Math.abs(document.querySelector('#seen video').currentTime - 0.5) < 0.05")


def test_an_answer_is_stopped_and_what_was_written_stays(visit, gate, video):
    page = visit()
    upload(page, video)
    ask(page, "Wait for it.")
    assert gate.reached.wait(PATIENCE)
    page.wait_for_selector("#chat .origin")
    page.click("#box .stop-button")
    wait_for(page, "Stopped")  # while the answer still waits
    gate.open.set()
    wait_until_answered(page)
    assert gate.closed.wait(PATIENCE)
    assert "Wait for it." in page.inner_text("#chat")
    ask(page, "And now?")
    wait_for(page, "Answered from cache")


def test_what_is_asked_during_an_answer_is_sent_after_it_and_an_empty_box_asks_nothing(visit, gate, video):
    page = visit()
    upload(page, video)
    ask(page, "Wait for it.")
    assert gate.reached.wait(PATIENCE)
    page.wait_for_selector("#chat .origin")  # so that the box is empty by now
    page.press("#box textarea", "Enter")
    ask(page, "And now?")
    gate.open.set()
    wait_for(page, "Answered from cache")
    wait_until_answered(page)
    assert page.input_value("#box textarea") == ""
    page.press("#box textarea", "Enter")
    ask(page, "<|video|>")
    wait_for(page, "control token", "body")
    assert page.locator(".toast-body").count() == 1


def test_a_browser_that_leaves_ends_its_answer(visit, served, gate, tmp_path):
    mine = write_clip(tmp_path / "only_mine.mp4", 9)
    page = visit()
    upload(page, mine)
    ask(page, "Wait for it.")
    assert gate.reached.wait(PATIENCE)
    held = len(served.visits.clips)
    page.close()
    gate.open.set()
    assert gate.closed.wait(PATIENCE)
    other = visit()  # and the next one is answered
    upload(other, mine)
    ask(other, "What moves?")
    wait_for(other, "frames read in")
    assert len(served.visits.clips) == held
