"""Downloads end at their limits, and frames that cannot be shown are refused."""

import io
import threading
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
import pytest
from PIL import Image

from stts_hf.video.sources import decoded_frames, download, open_source
from tests.clips import write_clip
from tests.modeling.test_video_sources import send, serving

SIX = np.zeros((6, 8, 8, 3), dtype=np.uint8)


@pytest.mark.parametrize("videos", [lambda url: url, lambda url: [url, url]], ids=["video", "images"])
def test_endless_download_ends_at_the_limit_of_size(videos):
    def endless(handler: Any) -> None:
        with suppress(OSError):  # the reader has left
            send(handler)
            while True:
                handler.wfile.write(bytes(2**16))

    said = "larger than max_download_bytes=1000000"
    with serving(endless) as url, pytest.raises(ValueError, match=said), ExitStack() as files:
        open_source(videos(url), "video", (1_000_000, 30.0), files)


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


def test_pictures_are_frames_wherever_they_lie():
    image = io.BytesIO()
    Image.new("L", (3, 2), 7).save(image, "PNG")
    with serving(lambda handler: send(handler, image.getvalue())) as url, ExitStack() as files:
        pictures = [url, {"path": url}, {"bytes": image.getvalue()}, Image.new("RGBA", (3, 2), (7, 7, 7, 9))]
        frames = open_source(pictures, "video", (1000, 30.0), files)
    assert np.array_equal(frames, np.full((4, 2, 3, 3), 7))


def test_a_downloaded_file_is_closed_after_it_is_read(tmp_path):
    clip = write_clip(tmp_path / "a.mp4", 3)
    with serving(lambda handler: send(handler, clip.read_bytes())) as url, ExitStack() as files:
        file = open_source(url, "video", (1_000_000, 30.0), files)
        source = file._source
        assert (len(file.times), source.closed) == (3, False)
    assert source.closed


@pytest.mark.parametrize(
    ("video", "metadata", "samples", "message"),
    [
        (np.full((6, 8, 8, 3), np.nan), None, True, "video has NaN or infinite"),
        (np.zeros((0, 8, 8, 3)), None, True, "must hold frames .* got shape"),
        (SIX, {"total_num_frames": 99}, True, "6 frames, .*frames_indices.: 99.*do_sample_frames=False"),
        (SIX, {"total_num_frames": 99, "frames_indices": [0, 1]}, False, "frames_indices.: 2"),
        (SIX, {"fps": 0.0}, True, "has fps=0.0"),
        (SIX, {"fps": 25.0, "frame_times": [0.0, 0.5]}, True, "video has 6 frames, .*frame_times.: 2"),
    ],
)
def test_frames_that_cannot_be_shown_are_refused(video, metadata, samples, message):
    with pytest.raises(ValueError, match=message):
        decoded_frames(video, metadata, "video", samples)
