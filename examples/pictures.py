"""Makes every picture of README, docs and cards again, for `make pictures`. Pages are shown by Chromium.

docs/how_it_works.svg is drawn by hand.
"""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from stts_hf.cli.main import main as stts_hf
from stts_hf.visualize.sample_clip import write_sample_clip

REPOSITORY = Path(__file__).resolve().parents[1]
DOCS, TINY = REPOSITORY / "docs", REPOSITORY / "hub_configs" / "stts-tiny"
QUESTION = "Which way does the red ring move?"


@contextmanager
def browser() -> Iterator[Any]:
    """A page of 1280 pixels in Chromium. Exits with a sentence where it is not installed."""
    path = shutil.which("chromium")
    if path is None:
        sys.exit("make pictures needs Chromium: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium.new_page(viewport={"width": 1280, "height": 900})
        chromium.close()


def shoot(shown: Any, name: str, height: int | None = None) -> None:
    """Writes what a page shows as a picture of the docs. height: of the upper part that is taken."""
    shown.wait_for_timeout(1500)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "page.png")
        shown.screenshot(path=path, full_page=True)
        with Image.open(path) as picture:
            part = picture.convert("RGB").crop((0, 0, picture.width, min(height or picture.height, picture.height)))
            part.save(DOCS / name, quality=82, optimize=True)
    print(DOCS / name)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, browser() as shown:
        clip, checkpoint = Path(folder, "clip.mp4"), ["--checkpoint", str(TINY)]
        write_sample_clip(clip)
        sheet = ["--pruning-ratio", "0.7", "--output", str(DOCS / "contact_sheet.png")]
        assert stts_hf(["run", str(clip), QUESTION, *checkpoint, *sheet]) == 0
        seen = ["--pruning-ratio", "0.7", "--question", QUESTION, "--output", f"{folder}/seen", "--repeats", "0"]
        assert stts_hf(["visualize", str(clip), *checkpoint, *seen]) == 0
        shown.goto(f"file://{folder}/seen/report.html")
        shown.set_viewport_size({"width": 1280, "height": 2000})  # pictures out of sight are not drawn
        shoot(shown, "visualize.jpg")
        lost = ["--selector", "random", "--pruning-ratio", "0.9", "--output", f"{folder}/why.html"]
        assert stts_hf(["explain", str(clip), "Which letter flashes up?", *checkpoint, *lost]) == 0
        shown.goto(f"file://{folder}/why.html")
        shoot(shown, "explain.jpg")
        shoot_demo(shown)


def shoot_demo(shown: Any) -> None:
    """The demo after a question at half the tokens, and the same with nothing dropped."""
    import stts_hf as package
    from stts_hf.demo.held_clips import Limits
    from stts_hf.demo.serving import build, serve

    page = build(package.load(TINY), limits=Limits(new_tokens=12), about="stts-tiny on cpu")
    _, url, _ = serve(page, server_name="127.0.0.1", prevent_thread_lock=True, quiet=True)
    shown.set_viewport_size({"width": 1280, "height": 900})
    shown.goto(url)
    shown.click("#sample")
    shown.click(f"text={QUESTION}")
    shown.wait_for_selector("#seen video")
    shown.click("#compare")
    shown.wait_for_function("!document.querySelector('#numbers').innerText.includes('not measured yet')")
    shoot(shown, "demo.png")
    page.blocks.close()


if __name__ == "__main__":
    main()
