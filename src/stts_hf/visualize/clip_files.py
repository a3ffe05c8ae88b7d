"""Writes frames as a video file, reproducibly."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

import av
import numpy as np

TICKS = 90_000  # per second, of frames that come with times of their own


@contextlib.contextmanager
def video_writer(
    path: str | os.PathLike, fps: float, options: Mapping[str, str], container_options: Mapping[str, str] | None = None
) -> Iterator[Callable[..., None]]:
    """
    Gives `write(frame, start, end)`: a frame, uint8 (height, width, 3) of even sizes, and seconds on screen, or
    `1 / fps` each. Encodes as H.264, or else MPEG-4. options: of the encoder.
    """
    codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
    # With threads or lookahead, x264's output is not reproducible.
    options = {"threads": "1", "rc-lookahead": "0", **options}
    with av.open(os.fspath(path), "w", options=dict(container_options or {})) as container:
        stream: Any = container.add_stream(codec, rate=Fraction(fps).limit_denominator(1001), options=options)
        stream.pix_fmt = "yuv420p"
        lasting: dict[int, int] = {}

        def mux(picture: av.VideoFrame | None) -> None:
            for packet in stream.encode(picture):
                packet.duration = lasting.get(packet.pts, packet.duration)  # the encoder's guess, from `fps`
                container.mux(packet)

        def write(frame: np.ndarray, start: float | None = None, end: float | None = None) -> None:
            if not stream.codec_context.is_open:  # the first frame sets the size
                stream.height, stream.width = frame.shape[:2]
                if start is not None:
                    stream.codec_context.time_base = Fraction(1, TICKS)
            picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
            if start is not None and end is not None:
                picture.time_base = Fraction(1, TICKS)
                picture.pts = round(start * TICKS)
                lasting[picture.pts] = round(end * TICKS) - picture.pts
            mux(picture)

        yield write
        mux(None)
