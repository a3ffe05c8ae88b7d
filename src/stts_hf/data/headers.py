"""What files say of themselves in their headers: whether they open as what they should be, and how large they are."""

import io
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from PIL import Image
from transformers.image_utils import load_image

from stts_hf.modeling.processing_stts import STTSProcessor

from .rows import Sample, is_url, row_errors

Result = TypeVar("Result")

_ORIENTATION = 0x0112  # EXIF: from 5 on, the picture is shown turned by a quarter
_AHEAD = 4  # results a thread may be ahead: a sample may hold the bytes of its video


def in_order(function: Callable[[int], Result], count: int, num_threads: int) -> Generator[Result, None, None]:
    """`function(0)`, `function(1)`, ... from threads a little ahead, so that few results are held at a time."""
    with ThreadPoolExecutor(num_threads) as pool:
        waiting: deque[Future[Result]] = deque()
        try:
            for index in range(count):
                waiting.append(pool.submit(function, index))
                if len(waiting) >= _AHEAD * num_threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def check_headers(sample: Sample) -> None:
    """Raises `RowError` where a video or image does not open as one. What is fetched from a URL is not looked at."""
    for key, sources, check in (("videos", sample.videos, _open_video), ("images", sample.images, _open_image)):
        for source in sources:
            if isinstance(source, str) and is_url(source):
                continue
            name = repr(source) if isinstance(source, str) else "its bytes"
            with row_errors(sample.id, f"{key}: {name} cannot be opened: "):
                check(io.BytesIO(source) if isinstance(source, bytes) else source)


def _open_video(source: Any) -> None:
    import av

    with av.open(source) as container:
        if not container.streams.video:
            raise ValueError("there is no video stream in it.")


def _open_image(source: Any) -> None:
    if not isinstance(source, Image.Image):
        Image.open(source).close()


def read_headers(processor: STTSProcessor, sample: Sample) -> tuple[list[list[float]], list[tuple[int, int]]]:
    """
    Times (seconds) of the frames that each video will show, and height and width of each image. Raises `RowError` where
    a file does not open. Nothing is decoded.
    """
    with row_errors(sample.id):
        times = [processor.video_processor.probe(video).frame_times for video in sample.videos]
        return times, [_image_size(image) for image in sample.images]


def _image_size(source: Any) -> tuple[int, int]:
    if isinstance(source, str) and is_url(source):
        source = load_image(source)
    is_open = isinstance(source, Image.Image)
    image = source if is_open else Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
    width, height = image.size
    turned = image.getexif().get(_ORIENTATION, 1) >= 5
    if not is_open:
        image.close()
    return (width, height) if turned else (height, width)
