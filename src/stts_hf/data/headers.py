"""What files say of themselves: whether they open as what they should be, from their headers alone."""

import io
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from PIL import Image

from .rows import Sample, is_url, row_errors

Result = TypeVar("Result")

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
