"""Downloads of videos, within limits. Nothing else in the package opens connections for them."""

import contextlib
import tempfile
import threading
from collections.abc import Iterator
from typing import Any, BinaryIO

from huggingface_hub.utils import httpx

from stts_hf.modeling.video_reading_stts import held_source

# Settings of a processor or of a call, and what they are where neither says more.
LIMITS = {"max_download_bytes": 2**31, "max_download_seconds": 600.0}


def is_url(source: Any) -> bool:
    """Whether reading `source` would download it: an http(s) address, or a row of `datasets` that holds only one."""
    source = held_source(source)
    return isinstance(source, str) and source.lower().startswith(("http://", "https://"))


def download_limits(processor: Any) -> tuple[int, float]:
    """Most bytes and seconds of a download."""
    max_bytes, max_seconds = (getattr(processor.video_processor, name, default) for name, default in LIMITS.items())
    return int(max_bytes), max_seconds


def download(url: str, max_bytes: int, max_seconds: float) -> BinaryIO:
    """Downloads a file into a temporary one, open at its beginning, which is deleted when it is closed.

    Raises:
        ValueError: the address cannot be read, or the file is larger or takes longer than the limits allow.
    """
    file: Any = tempfile.TemporaryFile()  # noqa: SIM115
    problems: list[Exception] = []
    is_late = threading.Event()

    def fetch() -> None:
        try:
            with httpx.stream("GET", url, follow_redirects=True, timeout=min(30.0, max_seconds)) as response:
                response.raise_for_status()
                for chunk in response.iter_bytes():
                    if is_late.is_set():
                        return
                    file.write(chunk)
                    if file.tell() > max_bytes:
                        raise ValueError(f"it is larger than max_download_bytes={max_bytes}")
        except Exception as error:  # handed to the thread that waits
            problems.append(error)

    # In a thread: a server that sends a byte a second keeps every timeout of one read from being reached.
    thread = threading.Thread(target=fetch, name="download_video", daemon=True)
    thread.start()
    thread.join(max_seconds)
    if thread.is_alive():
        is_late.set()
        problems.append(ValueError(f"it takes longer than max_download_seconds={max_seconds:g}"))
    if problems:
        file.close()
        raise ValueError(
            f"Cannot download {url!r}: {problems[0]}. Check the address, raise the limit, or pass a file."
        ) from problems[0]
    file.seek(0)
    return file


@contextlib.contextmanager
def downloaded(videos: Any, max_bytes: int, max_seconds: float) -> Iterator[Any]:
    """The videos, with an open file in place of each address, until the `with` block ends; errors as of `download`."""
    with contextlib.ExitStack() as files:

        def fetch(video: Any) -> Any:
            if isinstance(video, list | tuple):
                return [fetch(some) for some in video]
            if is_url(video):
                return files.enter_context(download(held_source(video), max_bytes, max_seconds))
            return video

        yield fetch(videos)
