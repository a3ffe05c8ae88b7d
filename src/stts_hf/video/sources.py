"""What a video may come as: downloads within limits, pictures, decoders of torchcodec."""

import contextlib
import io
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np
import torch
from huggingface_hub.utils import httpx
from PIL import Image
from transformers.image_utils import load_image

from stts_hf.modeling import video_reading_stts as reading
from stts_hf.modeling.video_processing_stts import Source, check_amount
from stts_hf.modeling.video_reading_stts import STTSVideoMetadata, VideoFile, held_source

# Settings of a processor or of a call, and their defaults.
LIMITS = {"max_download_bytes": 2**31, "max_download_seconds": 600.0}


def is_url(source: Any) -> bool:
    """Whether reading `source` would download it: an http(s) address, or a row of `datasets` that holds only one."""
    return reading.is_url(held_source(source))


def download_limits(processor: Any, **call: Any) -> tuple[int, float]:
    """Most bytes and seconds of a download, by the options of a `call`, else by the processor."""
    limits = [call.get(name, getattr(processor.video_processor, name, default)) for name, default in LIMITS.items()]
    for name, limit in zip(LIMITS, limits, strict=True):
        check_amount(name, limit)
    return int(limits[0]), limits[1]


def download(url: str, max_bytes: int, max_seconds: float) -> BinaryIO:
    """Downloads a file into a temporary one, open at its beginning, which is deleted when it is closed.

    Raises:
        ValueError: the address cannot be read, or the file is larger or takes longer than the limits allow.
    """
    file: Any = tempfile.TemporaryFile()  # noqa: SIM115
    problems: list[Exception] = []

    def fetch() -> None:
        try:
            with httpx.stream("GET", url, follow_redirects=True, timeout=min(30.0, max_seconds)) as response:
                response.raise_for_status()
                for chunk in response.iter_bytes():
                    file.write(chunk)  # fails once the file is closed
                    if file.tell() > max_bytes:
                        raise ValueError(f"it is larger than max_download_bytes={max_bytes}")
        except Exception as error:  # handed to the thread that waits
            problems.append(error)

    # In a thread: a server that sends a byte a second keeps every timeout of one read from being reached.
    thread = threading.Thread(target=fetch, name="download_video", daemon=True)
    thread.start()
    thread.join(max_seconds)
    if thread.is_alive():
        problems.append(ValueError(f"it takes longer than max_download_seconds={max_seconds:g}"))
    if problems:
        file.close()
        raise ValueError(
            f"Cannot download {url!r}: {problems[0]}. Check the address, raise the limit, or pass a file."
        ) from problems[0]
    file.seek(0)
    return file


@contextlib.contextmanager
def opened(videos: Sequence[Any], max_bytes: int, max_seconds: float) -> Iterator[list[Any]]:
    """The videos in forms that every processor takes, until the `with` block ends.

    An address becomes an open file, pictures become PIL images, and a torchcodec `VideoDecoder` a `DecodedVideo`.

    Raises:
        ValueError: a download fails (see `download`), or a video has no frames.
    """
    with contextlib.ExitStack() as files:

        def fetch(source: Any) -> Any:
            return (
                files.enter_context(download(held_source(source), max_bytes, max_seconds)) if is_url(source) else source
            )

        def prepare(index: int, video: Any) -> Any:
            if isinstance(video, Image.Image):
                return [video]
            if isinstance(video, list | tuple):
                if not video:
                    raise ValueError(f"videos[{index}] has no frames. Pass at least one.")
                return [frame if hasattr(frame, "shape") else load_picture(fetch(frame)) for frame in video]
            if hasattr(video, "get_frame_at"):
                source = Source(f"<{type(video).__name__}>")
                source.held = DecodedVideo(video)
                return source
            return fetch(video)

        yield [prepare(index, video) for index, video in enumerate(videos)]


def open_picture(source: Any) -> Image.Image:
    """The picture at a path, in bytes or in an open file; not decoded. Raises `ValueError` for an EPS drawing."""
    if isinstance(source, Image.Image):
        return source
    picture = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
    if picture.format == "EPS":
        raise ValueError(
            "A picture is an EPS file, which PIL would have another program (Ghostscript) draw. Convert it to PNG."
        )
    return picture


def load_picture(source: Any) -> Image.Image:
    """A frame of a video, upright and in RGB: what `open_picture` takes, a row of `datasets`, or base64."""
    source = held_source(source)
    is_encoded = isinstance(source, str) and not os.path.exists(source)
    return load_image(source if is_encoded else open_picture(source)).convert("RGB")


class DecodedVideo(VideoFile):
    """A torchcodec `VideoDecoder` in place of a file."""

    def __init__(self, decoder: Any):
        self._decoder, self.fps = decoder, decoder.metadata.average_fps
        self.times, self.duration = np.arange(len(decoder)) / self.fps, decoder.metadata.duration_seconds

    def close(self) -> None:
        """The decoder is the caller's."""

    def read(self, indices: Any, size: tuple[int, int], resizing: Any = None) -> tuple[torch.Tensor, STTSVideoMetadata]:
        metadata = self.describe(indices)
        metadata.video_backend = "torchcodec"
        pictures, times = [], []
        for index in metadata.frames_indices or []:
            frame = self._decoder.get_frame_at(index)
            picture = (frame.data if frame.data.shape[0] == 3 else frame.data.permute(2, 0, 1)).cpu()
            metadata.height, metadata.width = picture.shape[1:]
            pictures.append((resizing or reading.resize)(picture, size))
            times.append(frame.pts_seconds - self._decoder.metadata.begin_stream_seconds)
        metadata.frame_times = times
        return torch.stack(pictures), metadata
