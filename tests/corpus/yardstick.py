"""What FFmpeg itself makes of a file, decoded from its beginning to its end: by its libraries, and by its command."""

import contextlib
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import dropwhile
from pathlib import Path

import av
import numpy as np

from tests.clips import decode_everything, shown_at

COMMAND = shutil.which("ffmpeg")
Decoded = tuple[list[Fraction], list[np.ndarray], Fraction]  # times from the first frame on, frames, duration


def by_libraries(path: Path, stream: int = 0, is_timed: bool = True) -> Decoded:
    """Every frame as it is stored. Where FFmpeg tells no times, each lasts 1/25 s, as in clips of `write_clip`."""
    if is_timed:
        return decode_everything(path, stream)
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=stream)]
    return [Fraction(place, 25) for place in range(len(frames))], frames, Fraction(len(frames), 25)


def by_libraries_as_far_as_they_get(path: Path, start: int | None = None) -> dict[int, list[np.ndarray]]:
    """The frames of a damaged file by their pts, without packets that cannot be decoded and frames marked as corrupt.

    In one thread, as here: with more of them FFmpeg makes up other pixels for what is missing. start: pts of the packet
    to start at, by default the first one; what is missing is made up from other frames then.
    """
    found: dict[int, list[np.ndarray]] = {}
    with contextlib.suppress(av.error.FFmpegError), av.open(str(path), metadata_errors="replace") as container:
        for stream in (stream for stream in container.streams.video[:1] if stream.codec_context is not None):
            stream.codec_context.thread_type, stream.codec_context.thread_count = "NONE", 1
            packets: Iterator[av.Packet] = container.demux(stream)
            for packet in packets if start is None else dropwhile(lambda packet: packet.pts != start, packets):
                with contextlib.suppress(av.error.FFmpegError, EOFError):
                    for frame in packet.decode():
                        if not frame.is_corrupt:
                            found.setdefault(-1 if frame.pts is None else frame.pts, []).append(
                                frame.to_ndarray(format="rgb24")
                            )
    return found


def by_command(path: Path) -> tuple[list[Fraction], list[np.ndarray]]:
    """Every frame as `ffmpeg` shows it, and its time; none where it cannot read the file."""
    options = ["-an", "-sn", "-fps_mode", "passthrough", "-vf", "showinfo", "-pix_fmt", "rgb24", "-f", "rawvideo", "-"]
    run = subprocess.run([str(COMMAND), "-nostdin", "-i", str(path), *options], capture_output=True, timeout=120)
    log = run.stderr.decode(errors="replace")
    shown = re.findall(r"pts: *(-?\d+|NOPTS) .*?s:(\d+)x(\d+)", log)
    if not shown:
        return [], []
    base = Fraction(re.findall(r"config in time_base: (\d+/\d+)", log)[0])
    width, height = map(int, shown[0][1:])
    frames = list(np.frombuffer(run.stdout, np.uint8).reshape(-1, height, width, 3))
    pts = [place if stamp == "NOPTS" else int(stamp) for place, (stamp, *_) in enumerate(shown)][: len(frames)]
    return [(stamp - pts[0]) * base for stamp in pts], frames


def moments(duration: Fraction, num_frames: int, rate: float) -> Sequence[float]:
    """Seconds at which a video is looked at: `rate` times each and at the end, or evenly where that is too often."""
    by_rate = [*np.arange(0, float(duration) - 1e-9, 1 / rate), float(duration)]
    return by_rate if len(by_rate) <= num_frames else np.linspace(0, float(duration), num_frames).tolist()


def expected_indices(decoded: Decoded, num_frames: int, rate: float) -> list[int]:
    times, _, duration = decoded
    return sorted({shown_at(times, moment) for moment in moments(duration, num_frames, rate)})
