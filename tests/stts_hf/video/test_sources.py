"""Downloads end at their limits, and addresses are told from files."""

import io
import threading
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from PIL import Image

from stts_hf.video.sources import download, is_url, opened
from tests.modeling.test_video_sources import send, serving


def test_a_download_is_read_from_its_beginning():
    with serving(lambda handler: send(handler, b"ab", b"c")) as url, download(url, 100, 30.0) as file:
        assert file.read() == b"abc"


@pytest.mark.parametrize("videos", [lambda url: url, lambda url: [url, url]], ids=["video", "images"])
def test_endless_download_ends_at_the_limit_of_size(videos):
    def endless(handler: Any) -> None:
        with suppress(OSError):  # the reader has left
            send(handler)
            while True:
                handler.wfile.write(bytes(2**16))

    said = "larger than max_download_bytes=1000000"
    with serving(endless) as url, pytest.raises(ValueError, match=said), opened([videos(url)], 1_000_000, 30.0):
        pass


@pytest.mark.parametrize("headers", [b"", b"HTTP/1.1 200 OK\r\n\r\n"], ids=["in its headers", "in its body"])
def test_download_that_drips_ends_at_the_limit_of_time(headers):
    stop = threading.Event()

    def drip(handler: Any) -> None:
        handler.wfile.write(headers)
        with suppress(OSError):
            while not stop.wait(0.02):
                handler.wfile.write(b"H")

    with serving(drip) as url, pytest.raises(ValueError, match=r"longer than max_download_seconds=0\.3"):
        download(url, 1_000_000, 0.3)
    stop.set()


def test_addresses_and_pictures_alone_are_replaced_and_files_closed_again():
    row, array = {"bytes": None, "path": "clip.mp4"}, np.zeros((2, 8, 8, 3))
    image = io.BytesIO()
    Image.new("L", (3, 2)).save(image, "PNG")
    with serving(lambda handler: send(handler, image.getvalue())) as url:
        videos = [url, "clip.mp4", row, array, [{"path": url}, {"bytes": image.getvalue()}]]
        with opened(videos, 1000, 30.0) as (first, *others, listed):
            assert first.read() == image.getvalue()
            assert others == videos[1:4]
            assert [(picture.mode, picture.size) for picture in listed] == [("RGB", (3, 2))] * 2
        assert first.closed


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("http://a.b/c.mp4", True),
        ("HTTPS://a.b/c.mp4", True),
        ({"bytes": None, "path": "https://a.b/c.mp4"}, True),
        ({"bytes": b"data", "path": "https://a.b/c.mp4"}, False),
        ("a.mp4", False),
        ("http.mp4", False),
        ("ftp://a.b/c.mp4", False),
        (b"http://a.b", False),
        (None, False),
    ],
    ids=str,
)
def test_addresses_are_told_from_files(source, expected):
    assert is_url(source) is expected
