"""A Hub on loopback with what is pushed to it, and rows to train on."""

from pathlib import Path

import pytest

from tests.checkpoints import TINY, load_tiny, write_small_clip
from tests.hub_server import LoopbackHub
from tests.training_files import write_data


@pytest.fixture
def hub():
    with LoopbackHub() as hub:
        yield hub


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> Path:
    return write_small_clip(tmp_path_factory.mktemp("clip"))


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
