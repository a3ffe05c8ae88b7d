"""Small video files for the tests, and a reader that shares no idea with the one under test: it decodes everything.

Every frame carries its own number as a 4 x 4 chequer of bits, large enough to survive lossy codecs, so a test can say
which frame it was shown.
"""

import struct
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch

from stts_hf.modeling.video_reading_stts import STTSVideoMetadata, VideoFile
from stts_hf.video.processors import measure

_BITS_PER_SIDE = 4
_CELL = 16  # a macroblock of the codecs used here, so that neighbouring bits do not bleed into each other


def numbered_frame(number: int, size: tuple[int, int] = (96, 128)) -> np.ndarray:
    """Frame `number` (0 to 65535) as uint8 `(H, W, 3)`: its bits in the top left corner, a drifting ramp elsewhere."""
    height, width = size
    columns = np.arange(width)[None, :, None] + 3 * number
    rows = np.arange(height)[:, None, None] * np.array([1, 2, 1])
    frame = ((columns + rows) % 200 + 20).astype(np.uint8)
    bits = [(number >> bit) & 1 for bit in range(_BITS_PER_SIDE**2)]
    for bit, value in enumerate(bits):
        top, left = _CELL * (bit // _BITS_PER_SIDE), _CELL * (bit % _BITS_PER_SIDE)
        frame[top : top + _CELL, left : left + _CELL] = 255 * value
    return frame


def frame_number(frame: np.ndarray) -> int:
    """The number that `numbered_frame` drew into `frame`, uint8 `(H, W, 3)`."""
    number = 0
    for bit in range(_BITS_PER_SIDE**2):
        top, left = _CELL * (bit // _BITS_PER_SIDE), _CELL * (bit % _BITS_PER_SIDE)
        cell = frame[top + 4 : top + _CELL - 4, left + 4 : left + _CELL - 4]
        number |= int(cell.mean() > 127) << bit
    return number


def write_clip(
    path: Path | str,
    num_frames: int = 50,
    *,
    fps: float = 25,
    times: Sequence[float] | None = None,
    start: float = 0.0,
    size: tuple[int, int] = (96, 128),
    codec: str = "libx264",
    gop: int = 10,
    max_b_frames: int = 0,
    container_format: str | None = None,
    container_options: dict[str, str] | None = None,
    codec_options: dict[str, str] | None = None,
    pix_fmt: str = "yuv420p",
    audio: bool = False,
) -> Path:
    """Writes numbered frames; `times` (seconds, ascending) makes the frame rate variable, `start` shifts them all."""
    path = Path(path)
    rate = Fraction(fps).limit_denominator(1001)
    if times is None:
        times = [number / fps for number in range(num_frames)]
    with av.open(str(path), "w", format=container_format, options=container_options or {}) as container:
        stream: Any = container.add_stream(codec, rate=rate)
        stream.height, stream.width = size
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else pix_fmt
        stream.codec_context.gop_size = gop
        stream.codec_context.max_b_frames = max_b_frames
        if codec == "libx264":
            stream.options = {"preset": "ultrafast", "sc_threshold": "0", "bf": str(max_b_frames)} | (
                codec_options or {}
            )
        elif codec_options:
            stream.options = codec_options
        # MPEG-4 part 2, MPEG-2 and AVI want the frame rate's own time base.
        ticks = rate if codec in ("mpeg4", "mpeg2video") or path.suffix == ".avi" else 90000
        time_base = Fraction(1) / ticks
        stream.codec_context.time_base = time_base
        sound: Any = container.add_stream("aac", rate=16000) if audio else None
        for number, time in enumerate(times):
            frame = av.VideoFrame.from_ndarray(numbered_frame(number, size), format="rgb24")
            frame.time_base = time_base
            frame.pts = round((start + time) / time_base)
            container.mux(stream.encode(frame))
            if sound is not None and number % 25 == 0:
                _mux_one_second_of_silence(container, sound, number // 25)
        container.mux(stream.encode(None))
        if sound is not None:
            container.mux(sound.encode(None))
    return path


def write_audio(path: Path | str, cover: bool = False) -> Path:
    """A file with sound and nothing to see, but for a cover picture if asked for."""
    with av.open(str(path), "w", format="mp4") as container:
        sound = container.add_stream("aac", rate=16000)
        if cover:
            picture: Any = container.add_stream("mjpeg", rate=1)
            picture.height, picture.width, picture.pix_fmt = 96, 128, "yuvj420p"
            picture.disposition = av.stream.Disposition.attached_pic.value
            container.mux(picture.encode(av.VideoFrame.from_ndarray(numbered_frame(0), format="rgb24")))
            container.mux(picture.encode(None))
        for second in range(2):
            _mux_one_second_of_silence(container, sound, second)
        container.mux(sound.encode(None))
    return Path(path)


def _mux_one_second_of_silence(container: Any, stream: Any, second: int) -> None:
    silence = av.AudioFrame.from_ndarray(np.zeros((1, 16000), dtype=np.float32), format="fltp", layout="mono")
    silence.sample_rate = 16000
    silence.time_base = Fraction(1, 16000)
    silence.pts = second * 16000
    container.mux(stream.encode(silence))


def set_display_matrix(path: Path | str, matrix: tuple[int, int, int, int]) -> None:
    """Writes the 2 x 2 part `(a, b, c, d)` of an mp4's display matrix in place, as a phone that was turned does.

    ISO 14496-12, 8.3.2: a pixel at `(x, y)` is shown at `(a x + c y, b x + d y)`, plus a shift nobody needs here.
    """
    data = bytearray(Path(path).read_bytes())
    header = data.index(b"tkhd")
    version = data[header + 4]
    start = header + (56 if version == 1 else 44)
    a, b, c, d = (value << 16 for value in matrix)
    data[start : start + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    Path(path).write_bytes(bytes(data))


def hide_beginning(path: Path | str, seconds: float) -> None:
    """Makes an mp4's edit list start `seconds` into the video, as a lossless cut does (ISO 14496-12, 8.6.6)."""
    data = bytearray(Path(path).read_bytes())
    scale = struct.unpack_from(">I", data, data.index(b"mdhd") + 16)[0]
    first_entry = data.index(b"elst") + 12  # type, version and flags, number of entries
    struct.pack_into(">i", data, first_entry + 4, round(seconds * scale))
    Path(path).write_bytes(bytes(data))


def decode_everything(path: Path | str, place: int = 0) -> tuple[list[Fraction], list[np.ndarray], Fraction]:
    """Every frame of a file from first to last: times relative to the first frame, uint8 `(H, W, 3)`, the duration.

    place: of the stream among those with video.
    """
    with av.open(str(path)) as container:
        stream: Any = container.streams.video[place]
        frames: list[Any] = sorted(container.decode(stream), key=lambda frame: frame.pts)
        times = [(frame.pts - frames[0].pts) * frame.time_base for frame in frames]
        last = frames[-1].duration * frames[-1].time_base or 1 / Fraction(stream.average_rate)
        return times, [frame.to_ndarray(format="rgb24") for frame in frames], times[-1] + last


def shown_at(times: Sequence[Fraction], moment: float) -> int:
    """Which frame a player shows at `moment`: the last one whose time has come."""
    return max(index for index, time in enumerate(times) if float(time) <= moment + 1e-6)


def read_clip(
    source: Any, moments: Callable[[VideoFile], Any] | None = None, size: tuple[int, int] | None = None
) -> tuple[list[np.ndarray], STTSVideoMetadata]:
    """Frames uint8 `(H, W, 3)` that are on screen at `moments(file)` (seconds), all of them without it."""
    with VideoFile(source) as file:
        seconds = np.asarray(file.times if moments is None else moments(file)) + 1e-6
        indices = np.unique((np.searchsorted(file.times, seconds, side="right") - 1).clip(min=0)).tolist()
        frames, metadata = file.read(indices, size or measure(file, indices))
    return list(frames.permute(0, 2, 3, 1).numpy()), metadata


def read_tensor(source: Any) -> tuple[torch.Tensor, STTSVideoMetadata]:
    """All frames in their own size, uint8 `(T, 3, H, W)`."""
    frames, metadata = read_clip(source)
    return torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2).contiguous(), metadata
