"""A Hub on loopback with what is pushed to it, rows to train on, and small clips and pictures."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import AutoModelForMultimodalLM, AutoProcessor

from stts_hf import STTSProcessor, register_auto_classes
from tests.checkpoints import ALL_TINIES, OTHERS, TINIES, TINY, load_of_one_answer, load_tiny, write_small_clip
from tests.clips import write_clip
from tests.hub_server import LoopbackHub
from tests.tiny import randomise
from tests.training_files import write_data


@pytest.fixture
def hub():
    with LoopbackHub() as hub:
        yield hub


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> Path:
    return write_small_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, processor) -> Path:
    """A tiny model that writes one answer, whatever it is asked."""
    folder = tmp_path_factory.mktemp("checkpoint")
    load_of_one_answer().save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> Path:
    """The tiny checkpoint in shards."""
    folder = tmp_path_factory.mktemp("sharded")
    for file in TINY.iterdir():
        if file.name != "model.safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    load_tiny().save_pretrained(folder, max_shard_size="1MB")
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Three rows about a clip each, as JSONL."""
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def processor() -> STTSProcessor:
    return STTSProcessor.from_pretrained(TINY)


@pytest.fixture(scope="session", params=[*TINIES, *OTHERS])
def any_folder(request) -> Path:
    """The tiny checkpoint of each backbone."""
    register_auto_classes()
    return ALL_TINIES[request.param]


@pytest.fixture(scope="session")
def any_processor(any_folder) -> Any:
    return AutoProcessor.from_pretrained(any_folder)


@pytest.fixture(scope="session")
def any_model(any_folder) -> Any:
    """Not for tests that change it."""
    return AutoModelForMultimodalLM.from_pretrained(any_folder).eval()


@pytest.fixture(scope="session")
def undecided(tmp_path_factory) -> Path:
    """The tiny checkpoint with a random scorer: its own is so sure of clips of another kind that it has no gradient."""
    folder = tmp_path_factory.mktemp("undecided")
    model = load_tiny()
    randomise(model.model.vision_tower.scorer)
    model.save_pretrained(folder)
    STTSProcessor.from_pretrained(TINY).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def media(tmp_path_factory) -> Path:
    """
    `two.mp4`, `three.mp4`, `five.mkv` are shown as 2, 3, 5 frames; `damaged.mp4` looks like a video to nobody;
    `wide.png` and `turned.jpg` (stored on its side); `speech.srt`.
    """
    folder = tmp_path_factory.mktemp("media")
    write_clip(folder / "two.mp4", 5, fps=20)
    write_clip(folder / "three.mp4", 10, fps=20)
    write_clip(folder / "five.mkv", 20, fps=20)
    (folder / "damaged.mp4").write_bytes(b"not a video" * 50)
    Image.new("RGB", (160, 90), (200, 10, 10)).save(folder / "wide.png")
    orientation = Image.Exif()
    orientation[0x0112] = 6
    Image.new("RGB", (300, 40), (10, 200, 10)).save(folder / "turned.jpg", exif=orientation)
    (folder / "speech.srt").write_text("1\n00:00:00,000 --> 00:00:01,250\nHello\n<i>there</i>\n")
    return folder
