"""Video files for measuring, made on the spot: a short clip is drawn and encoded, longer ones repeat its packets."""

import os
import tempfile
from pathlib import Path
from typing import Any

import av

from stts_hf.visualize.sample_clip import write_sample_clip

FPS = 25
SIZE_480P = (480, 854)
_DRAWN_SECONDS = 30.0


def write_clip(path: str | os.PathLike, seconds: float, size: tuple[int, int] = SIZE_480P) -> None:
    """
    Writes an MP4 of at least `seconds` seconds, 25 frames a second; raises `ValueError` for less than one frame.

    Up to 30 seconds are drawn and encoded; what is longer repeats them, packet by packet, which takes seconds where
    encoding an hour would take most of one. A decoder cannot tell: every repetition begins with a keyframe.
    """
    drawn = min(seconds, _DRAWN_SECONDS)
    with tempfile.TemporaryDirectory() as folder:
        piece = Path(folder) / "piece.mp4"
        write_sample_clip(piece, seconds=drawn, fps=FPS, size=size)
        repeat_clip(piece, path, max(1, -(-round(seconds * FPS) // round(drawn * FPS))))


def repeat_clip(source: str | os.PathLike, destination: str | os.PathLike, times: int) -> None:
    """Writes the video of `source` `times` times over into `destination`, without decoding it."""
    with av.open(os.fspath(source)) as read:
        stream = read.streams.video[0]
        time_base: Any = stream.time_base
        packets: list[Any] = [
            (bytes(packet), packet.pts, packet.dts, packet.duration, packet.is_keyframe)
            for packet in read.demux(stream)
            if packet.size
        ]
        length = max(pts + duration for _, pts, _, duration, _ in packets) - min(pts for _, pts, *_ in packets)
        with av.open(os.fspath(destination), "w") as written:
            copy = written.add_stream_from_template(stream)
            copy.time_base = time_base
            for repetition in range(times):
                for data, pts, dts, duration, is_keyframe in packets:
                    packet = av.Packet(data)
                    packet.stream, packet.time_base = copy, time_base
                    packet.pts, packet.dts = pts + repetition * length, dts + repetition * length
                    packet.duration, packet.is_keyframe = duration, is_keyframe
                    written.mux(packet)
