"""Downloads end at their limits, and addresses are told from files."""

import threading
from contextlib import suppress
from typing import Any

import pytest

from stts_hf.video.sources import download, downloaded, is_url
from tests.modeling.test_video_sources import send, serving


def test_a_download_is_read_from_its_beginning():
    with serving(lambda handler: send(handler, b"ab", b"c")) as url, download(url, 100, 30.0) as file:
        assert file.read() == b"abc"


@pytest.mark.parametrize("videos", [lambda url: url, lambda url: [[url, url]]], ids=["video", "images"])
def test_endless_download_ends_at_the_limit_of_size(videos):
    def endless(handler: Any) -> None:
        with suppress(OSError):  # the reader has left
            send(handler)
            while True:
                handler.wfile.write(bytes(2**16))

    said = "larger than max_download_bytes=1000000"
    with serving(endless) as url, pytest.raises(ValueError, match=said), downloaded(videos(url), 1_000_000, 30.0):
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


def test_addresses_alone_are_replaced_and_closed_again():
    row = {"bytes": None, "path": "clip.mp4"}
    with serving(lambda handler: send(handler, b"abc")) as url:
        with downloaded([url, "clip.mp4", row, [{"path": url}, 3]], 100, 30.0) as (first, *others, listed):
            assert (first.read(), listed[0].read()) == (b"abc", b"abc")
            assert (others, listed[1]) == (["clip.mp4", row], 3)
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
