"""The tiny checkpoint's processor, and a folder of small clips and pictures."""

from pathlib import Path

import pytest
from PIL import Image

from stts_hf import STTSProcessor
from tests.checkpoints import TINY
from tests.clips import write_clip


@pytest.fixture(scope="session")
def processor() -> STTSProcessor:
    return STTSProcessor.from_pretrained(TINY)


@pytest.fixture(scope="session")
def media(tmp_path_factory) -> Path:
    """
    `two.mp4`, `three.mp4`, `five.mkv` are shown as 2, 3, 5 frames; `damaged.mp4` looks like a video to nobody;
    `wide.png` and `turned.jpg` (stored on its side); `speech.srt`.
    """
    folder = tmp_path_factory.mktemp("media")
    write_clip(folder / "two.mp4", 5, fps=10)
    write_clip(folder / "three.mp4", 10, fps=10)
    write_clip(folder / "five.mkv", 20, fps=10)
    (folder / "damaged.mp4").write_bytes(b"not a video" * 50)
    Image.new("RGB", (160, 90), (200, 10, 10)).save(folder / "wide.png")
    orientation = Image.Exif()
    orientation[0x0112] = 6
    Image.new("RGB", (300, 40), (10, 200, 10)).save(folder / "turned.jpg", exif=orientation)
    (folder / "speech.srt").write_text("1\n00:00:00,000 --> 00:00:01,250\nHello\n<i>there</i>\n")
    return folder
