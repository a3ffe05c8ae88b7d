"""Where a video comes from: a path, an address, bytes, an open file or a row of `datasets`, checked and opened.

Only `download` opens connections, and only for http(s) addresses.
"""

import io
import os
import tempfile
import threading
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

from huggingface_hub.utils import httpx


def is_url(source: Any) -> bool:
    """Whether reading `source` would download it: an http(s) address, or a row of `datasets` that holds only one."""
    source = _held(source)
    return isinstance(source, str) and source.lower().startswith(("http://", "https://"))


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


def _held(source: Any) -> Any:
    """What a row of `datasets` holds: its bytes, else its path. Other sources are what they are."""
    if not isinstance(source, Mapping):
        return source
    held = source.get("path") if source.get("bytes") is None else source["bytes"]
    if held is None:
        raise ValueError(f"A video given as a dict needs 'bytes' or 'path', got the keys {sorted(map(str, source))}.")
    return held


def checked_source(source: Any, max_bytes: int, max_seconds: float) -> tuple[str, Any]:
    """What to call the source in messages, and what to read: a path, bytes, or an open file that can be rewound."""
    source = _held(source)
    if is_url(source):
        return f"the video downloaded from {source!r}", download(source, max_bytes, max_seconds)
    if hasattr(source, "read"):
        if not isinstance(source.read(0), bytes):
            raise ValueError("The video file is open as text. Open it in binary mode, 'rb'.")
        if getattr(source, "seekable", lambda: hasattr(source, "seek"))():
            return "the open video file", source
        source = source.read()
    if isinstance(source, bytes | bytearray | memoryview):
        if len(source) == 0:
            raise ValueError("The video's bytes are empty. Read or download them again.")
        return "the video's bytes", bytes(source)
    if not isinstance(source, str | os.PathLike):
        raise ValueError(f"A video must be a path, bytes or an open binary file, got {type(source).__name__}.")
    path = os.fsdecode(source)
    if not os.path.isfile(path):
        held = ": it is a folder" if os.path.isdir(path) else ": it is a pipe or device" if os.path.exists(path) else ""
        raise ValueError(f"There is no video file {path!r}{held}. Pass the path of an existing file.")
    if os.path.getsize(path) == 0:
        raise ValueError(f"The video file {path!r} is empty. Copy or download it again.")
    return f"video file {path!r}", path


class ByteStream:
    """What FFmpeg sees of a source: bytes without a name. PyAV would take a file's name from its attribute `name`."""

    def __init__(self, source: Any, keep_open: bool = False):
        if isinstance(source, str | bytes):
            source = open(source, "rb") if isinstance(source, str) else io.BytesIO(source)  # noqa: SIM115
        self.read, self.tell, self._seek = source.read, source.tell, source.seek
        self.close: Callable[[], None] = (lambda: None) if keep_open else source.close

    def seek(self, offset: int, whence: int = 0) -> int:
        """As of files, but -1 where there is no such place: damaged files send FFmpeg there, which can go on."""
        try:
            return self._seek(offset, whence)
        except (OSError, ValueError):
            return -1
