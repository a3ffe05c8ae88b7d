"""Frames as a video file that is the same whenever and wherever it is written."""

import os
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

import av
import numpy as np


def write_video(path: str | os.PathLike, frames: Iterable[np.ndarray], fps: float, **options: str) -> None:
    """
    Writes frames, uint8 (height, width, 3) of even sizes, as H.264, or as MPEG-4 where PyAV comes without it. path: its
    ending picks the container. options: of the encoder, such as `crf="24"`.
    """
    codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
    # With threads or a look at frames to come, x264 writes other pictures every time.
    options = {"threads": "1", "rc-lookahead": "0"} | options
    with av.open(os.fspath(path), "w") as container:
        stream: Any = container.add_stream(codec, rate=Fraction(fps).limit_denominator(1001), options=options)
        stream.pix_fmt = "yuv420p"
        for number, frame in enumerate(frames):
            if number == 0:  # known to nobody before
                stream.height, stream.width = frame.shape[:2]
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))
