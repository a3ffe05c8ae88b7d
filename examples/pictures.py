"""Makes every picture of README, docs and cards again, for `make pictures`. Pages are shown by Chromium.

docs/how_it_works.svg is drawn by hand.
"""

import io
import itertools
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from examples.clips.files import write_video
from examples.clips.sample_clip import sample_frames
from stts_hf.cli.main import main as stts_hf
from stts_hf.visualize.sample_clip import write_sample_clip

REPOSITORY = Path(__file__).resolve().parents[1]
DOCS, TINY = REPOSITORY / "docs", REPOSITORY / "hub_configs" / "stts-tiny"
QUESTION, FLASH = "Which way does the red ring move?", "Which letter flashes up?"
# Height, width, and what brightness is divided by.
CLIPS = {"landscape": (270, 480, 1), "portrait": (480, 270, 1), "dark": (360, 360, 3)}
WIDTHS, SCHEMES, MOST = (1280, 390), ("light", "dark"), 2600  # MOST: pixels of a page's height


@contextmanager
def browser() -> Iterator[Any]:
    """A page of 1280 pixels in Chromium. Exits with a sentence where it is not installed."""
    path = shutil.which("chromium")
    if path is None:
        sys.exit("make pictures needs Chromium: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=path, args=["--no-sandbox"])
        shown = chromium.new_page(viewport={"width": 1280, "height": 900})
        shown.set_default_timeout(180_000)  # milliseconds; a busy machine answers slowly
        yield shown
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


def shoot_views(shown: Any, name: str) -> None:
    """Writes what a page shows in a window and on a phone, light and dark, side by side, at half the size."""
    views = []
    for scheme, width in itertools.product(SCHEMES, WIDTHS):
        height = 2000 if name.startswith("report") else 844  # pictures out of sight are not drawn
        shown.set_viewport_size({"width": width, "height": height})
        shown.emulate_media(color_scheme=scheme)
        shown.wait_for_timeout(1000)
        with Image.open(io.BytesIO(shown.screenshot(full_page=True))) as picture:
            part = picture.convert("RGB").crop((0, 0, picture.width, min(MOST, picture.height)))
            views.append(part.resize((part.width // 2, part.height // 2), Image.Resampling.LANCZOS))
    whole = Image.new("RGB", (sum(view.width + 8 for view in views) - 8, max(view.height for view in views)), "#808080")
    for place, view in enumerate(views):
        whole.paste(view, (sum(before.width + 8 for before in views[:place]), 0))
    (DOCS / "states").mkdir(exist_ok=True)
    whole.save(DOCS / "states" / f"{name}.webp", quality=50, method=6)
    print(DOCS / "states" / f"{name}.webp")


def shrink(picture: Path, card: Path) -> None:
    """Writes a picture for a card, which goes to the Hub with the checkpoint: below 100 kB."""
    with Image.open(picture) as whole:
        whole.convert("RGB").resize((1000, round(1000 * whole.height / whole.width))).save(card, quality=60, method=6)
    print(card)


def shoot_states(shown: Any, folder: str) -> None:
    """Every state of demo, report and explanation, with a landscape, a portrait and a dark clip."""
    checkpoint = ["--checkpoint", str(TINY), "--max-new-tokens", "12"]
    clips = {}
    for kind, (height, width, divisor) in CLIPS.items():
        frames = sample_frames((number / 8 for number in range(31)), 3.875, height, width)
        clips[kind] = Path(folder, f"{kind}.mp4")
        write_video(clips[kind], (frame // divisor for frame in frames), 8, b=str(8 * height * width))
    for kind, clip in clips.items():
        seen = ["--pruning-ratio", "0.7", "--question", QUESTION, "--output", f"{folder}/{kind}"]
        assert stts_hf(["visualize", str(clip), *checkpoint, *seen]) == 0
        shown.goto(f"file://{folder}/{kind}/report.html")
        shoot_views(shown, f"report-{kind}")
        lost = ["--selector", "random", "--pruning-ratio", "0.9", "--output", f"{folder}/{kind}.html"]
        assert stts_hf(["explain", str(clip), FLASH, *checkpoint, *lost]) == 0
        shown.goto(f"file://{folder}/{kind}.html")
        shoot_views(shown, f"explain-{kind}")
    with demo() as url:
        shown.goto(url)
        shoot_views(shown, "demo-start")
        shown.fill("#box textarea", FLASH)
        shown.press("#box textarea", "Enter")
        shown.wait_for_selector(".toast-body")
        shoot_views(shown, "demo-error")
        for kind, clip in clips.items():
            shown.goto(url)
            shown.set_input_files("#clip input[type=file]", str(clip))
            shown.wait_for_selector("#clip video")
            for question in (QUESTION, FLASH):
                shown.fill("#box textarea", question)
                shown.press("#box textarea", "Enter")
                shown.wait_for_function(
                    "words => document.querySelector('#code')?.innerText.includes(words)", arg=question
                )
                shown.wait_for_selector("#seen video")
            shoot_views(shown, f"demo-{kind}")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, browser() as shown:
        clip, checkpoint = Path(folder, "clip.mp4"), ["--checkpoint", str(TINY)]
        write_sample_clip(clip)
        sheet = ["--pruning-ratio", "0.7", "--output", str(DOCS / "contact_sheet.png")]
        assert stts_hf(["run", str(clip), QUESTION, *checkpoint, *sheet]) == 0
        shrink(DOCS / "contact_sheet.png", TINY / "contact_sheet.webp")
        seen = ["--pruning-ratio", "0.7", "--question", QUESTION, "--output", f"{folder}/seen", "--repeats", "0"]
        assert stts_hf(["visualize", str(clip), *checkpoint, *seen]) == 0
        shown.goto(f"file://{folder}/seen/report.html")
        shown.set_viewport_size({"width": 1280, "height": 2000})  # pictures out of sight are not drawn
        shoot(shown, "visualize.jpg")
        lost = ["--selector", "random", "--pruning-ratio", "0.9", "--output", f"{folder}/why.html"]
        assert stts_hf(["explain", str(clip), FLASH, *checkpoint, *lost]) == 0
        shown.goto(f"file://{folder}/why.html")
        shoot(shown, "explain.jpg")
        with demo() as url:
            shoot_demo(shown, url)
        shoot_states(shown, folder)


@contextmanager
def demo() -> Iterator[str]:
    """The address of a demo of stts-tiny."""
    import stts_hf as package
    from stts_hf.demo.held_clips import Limits
    from stts_hf.demo.serving import build, serve

    page = build(package.load(TINY), limits=Limits(new_tokens=12), about="stts-tiny on cpu")
    _, url, _ = serve(page, server_name="127.0.0.1", prevent_thread_lock=True, quiet=True)
    yield url
    page.blocks.close()


def shoot_demo(shown: Any, url: str) -> None:
    """The demo after a question at half the tokens, and the same with nothing dropped."""
    shown.set_viewport_size({"width": 1280, "height": 900})
    shown.goto(url)
    shown.click("#sample")
    shown.click(f"text={QUESTION}")
    shown.wait_for_selector("#seen video")
    shown.click("#compare")
    shown.wait_for_function("!document.querySelector('#numbers').innerText.includes('not measured yet')")
    shoot(shown, "demo.png")


if __name__ == "__main__":
    main()
