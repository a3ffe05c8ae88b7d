"""The corpus: video files of every kind that cameras, programs, faults and attackers make, and what reading must give.

Every file is made by the tests themselves, small, the same each time. `BY_KIND` holds whole ones and what is no video,
`BROKEN` those that are damaged after they were written.
"""

import functools
import io
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from packaging.version import Version
from PIL import Image, features

from tests.clips import hide_beginning, numbered_frame, set_display_matrix, write_audio, write_clip

# PyAV 15's FFmpeg converts the colours of these otherwise than the command's: the mean is up to 1.3 away.
OF_OLD_PYAV = 1.5 if Version(av.__version__) < Version("16") else 1.0
Make = Callable[[Path], Any]  # writes into a folder; returns what to read


@dataclass(frozen=True)
class Case:
    """
    make: writes it. refused: what its error says, None where frames are
    to come. is_timed: whether FFmpeg tells when each frame is shown; else frames are counted. tolerance: how far
    pixels may be, in the mean over the worst frame, from those of the `ffmpeg` command, an older version; same_command:
    whether it reads the file at all. limit: bytes of memory that reading it may take.
    """

    make: Make
    refused: str | None = None
    stream: int = 0
    turn: Callable[[np.ndarray], np.ndarray] = np.asarray
    tolerance: float = 1.0
    is_timed: bool = True
    same_command: bool = True
    limit: int = 100_000_000


def clip(name: str, num_frames: int = 40, **options: Any) -> Make:
    return lambda folder: write_clip(folder / name, num_frames, **options)


def data(name: str, content: bytes) -> Make:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return make


def renamed(name: str, make: Make) -> Make:
    return lambda folder: make(folder).rename(folder / name)


def turned(matrix: tuple[int, int, int, int]) -> Make:
    def make(folder: Path) -> Path:
        path = write_clip(folder / "a.mp4", 20)
        set_display_matrix(path, matrix)
        return path

    return make


def cut_losslessly(folder: Path) -> Path:
    path = write_clip(folder / "a.mp4", 40)
    hide_beginning(path, 5 / 25)
    return path


def pictures(count: int = 6) -> list[Image.Image]:
    return [Image.fromarray(numbered_frame(number)) for number in range(count)]


def animated(name: str, **options: Any) -> Make:
    def make(folder: Path) -> Path:
        if name.endswith(".avif") and not features.check("avif"):
            pytest.skip("Pillow writes AVIF since 11.3")
        first, *others = pictures()
        first.save(folder / name, save_all=True, append_images=others, **options)
        return folder / name

    return make


def still(name: str, orientation: int | None = None, size: tuple[int, int] | None = None) -> Make:
    """A picture of Pillow. orientation: by its EXIF. size: width and height of a black one."""

    def make(folder: Path) -> Path:
        exif = Image.Exif()
        if orientation is not None:
            exif[274] = orientation
        picture = Image.new("1", size) if size else pictures(6)[5]
        picture.save(folder / name, exif=exif)
        return folder / name

    return make


def joined_pictures(folder: Path) -> Path:
    """A pipe of PNG files, as `cat *.png` makes it."""
    file = io.BytesIO()
    for picture in pictures():
        picture.save(file, "PNG")
    return data("a.png", file.getvalue())(folder)


def without_frames(name: str) -> Make:
    """A video stream that ends before its first frame."""

    def make(folder: Path) -> Path:
        with av.open(str(folder / name), "w") as container:
            stream: Any = container.add_stream("libx264", rate=25)
            stream.height, stream.width, stream.pix_fmt = 96, 128, "yuv420p"
            container.start_encoding()
        return folder / name

    return make


def several_streams(first: tuple[int, int], second: tuple[int, int]) -> Make:
    """Two videos in one file, as of a camera with a preview."""

    def make(folder: Path) -> Path:
        with av.open(str(folder / "both.mkv"), "w") as container:
            streams: list[Any] = [container.add_stream("libx264", rate=25) for _ in range(2)]
            for stream, size in zip(streams, (first, second), strict=True):
                stream.height, stream.width, stream.pix_fmt = *size, "yuv420p"
            for number in [*range(30), None]:
                for stream, size in zip(streams, (first, second), strict=True):
                    picture = None if number is None else av.VideoFrame.from_ndarray(numbered_frame(number, size))
                    container.mux(stream.encode(picture))
        return folder / "both.mkv"

    return make


def size_changes(folder: Path) -> Path:
    """A broadcast whose pictures become smaller midway."""
    large, small = (write_clip(folder / f"{height}.ts", 20, size=(height, 128)) for height in (96, 64))
    return data("both.ts", large.read_bytes() + small.read_bytes())(folder)


def without_some_times(folder: Path) -> Path:
    """A broadcast in which every third picture comes without a time (ISO 13818-1, 2.4.3.7: it is optional)."""
    content = bytearray(write_clip(folder / "a.ts", 40).read_bytes())
    place, number = -1, 0
    while (place := content.find(b"\0\0\1\xe0", place + 1)) >= 0:
        if content[place + 7] & 0x80 and (number := number + 1) % 3 == 2:
            length = 10 if content[place + 7] & 0x40 else 5
            content[place + 7] &= 0x3F
            content[place + 9 : place + 9 + length] = b"\xff" * length
    return data("few_times.ts", bytes(content))(folder)


def patched(name: str, change: Callable[[bytearray], None], **options: Any) -> Make:
    """A clip whose header claims what is not so."""

    def make(folder: Path) -> Path:
        content = bytearray(write_clip(folder / name, 40, **options).read_bytes())
        change(content)
        return data(name, bytes(content))(folder)

    return make


def claim_samples(content: bytearray) -> None:
    """ISO 14496-12, 8.7.3: all samples have one size, and there are 8 million of them."""
    start = content.index(b"stsz") + 8
    struct.pack_into(">II", content, start, 1, 8_000_000)


def claim_size(content: bytearray) -> None:
    struct.pack_into(">HH", content, content.index(b"avc1") + 28, 65535, 65535)


def fifo(folder: Path) -> Path:
    os.mkfifo(folder / "pipe.mp4")
    return folder / "pipe.mp4"


def leading_elsewhere(name: str, content: str) -> Make:
    """A file that names others, one of which is there."""

    def make(folder: Path) -> Path:
        write_clip(folder / "clip.mp4", 10)
        return data(name, content.encode())(folder)

    return make


SDP = "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\na=rtpmap:96 H264/90000\n"
LEADING_ELSEWHERE = {
    "sdp": SDP,
    "ffconcat": "ffconcat version 1.0\nfile clip.mp4\n",
    "nested ffconcat": "ffconcat version 1.0\nfile self.mp4\n",
    "m3u8": "#EXTM3U\n#EXT-X-TARGETDURATION:3\n#EXTINF:2.4,\nclip.mp4\n#EXT-X-ENDLIST\n",
    "m3u8 without end": "#EXTM3U\n#EXT-X-TARGETDURATION:3\n#EXTINF:2.4,\nclip.mp4\n",
    "m3u8 of a pipe": "#EXTM3U\n#EXT-X-TARGETDURATION:3\n#EXTINF:2.4,\npipe\n#EXT-X-ENDLIST\n",
    "dash": '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static"></MPD>',
    "avisynth": 'AVISource("clip.avi")\n',
    "subtitles": "1\n00:00:00,000 --> 00:00:01,000\nhello\n",
}
WAV = b"RIFF\x24\0\0\0WAVEfmt \x10\0\0\0\1\0\1\0@\x1f\0\0\x80>\0\0\2\0\x10\0data" + bytes(4000)
UNEVEN = np.cumsum(np.random.default_rng(0).uniform(0.01, 0.4, 60)).round(3).tolist()
MINUTES = [60.0 * minute for minute in range(600)]
NO_FILE = "There is no video file"
EMPTY = "Cannot read video file .*a.mp4"
UNKNOWN = "Cannot read .* as a video: it is not a video file of a known format, or is cut off"
UNDECODED = "Not one frame of .* can be decoded"
X265 = {"x265-params": "log-level=none"}
NEGATIVE = {"avoid_negative_ts": "disabled"}
INTERLACED = {"x264-params": "interlaced=1"}

BY_KIND: dict[str, dict[str, Case]] = {
    "ordinary": {
        "mp4": Case(clip("a.mp4", max_b_frames=2)),
        "mkv": Case(clip("a.mkv", max_b_frames=2)),
    },
    "one frame, two frames": {
        "one frame": Case(clip("a.mp4", 1)),
        "two frames": Case(clip("a.mp4", 2, max_b_frames=2)),
        "one frame gif": Case(still("a.gif")),
    },
    "1 x 1 pixel": {
        "1x1 vp9": Case(clip("a.webm", 20, size=(1, 1), codec="libvpx-vp9")),
        "1x1 h264": Case(clip("a.mp4", 20, size=(1, 1), pix_fmt="yuv444p")),
        "1x1 png": Case(still("a.png", size=(1, 1))),
    },
    "8000 x 10 and 10 x 8000 pixels": {
        "8000x10": Case(clip("a.mp4", 20, size=(10, 8000))),
        "10x8000": Case(clip("a.mp4", 20, size=(8000, 10))),
    },
    "odd sizes": {
        "odd vp9": Case(clip("a.webm", 20, size=(97, 127), codec="libvpx-vp9")),
        "odd h264": Case(clip("a.mp4", 20, size=(97, 127), pix_fmt="yuv444p")),
        "odd mjpeg": Case(clip("a.mov", 20, size=(97, 127), codec="mjpeg"), tolerance=OF_OLD_PYAV),
    },
    "10 bits and more": {
        "10-bit h264": Case(clip("a.mp4", 20, pix_fmt="yuv420p10le")),
        "10-bit hevc": Case(clip("a.mp4", 20, codec="libx265", codec_options=X265, pix_fmt="yuv420p10le")),
        "12-bit hevc": Case(
            clip("a.mp4", 20, codec="libx265", codec_options=X265, pix_fmt="yuv420p12le"), tolerance=OF_OLD_PYAV
        ),
        "10-bit av1": Case(clip("a.mp4", 20, codec="libsvtav1", pix_fmt="yuv420p10le")),
        "10-bit prores": Case(clip("a.mov", 20, codec="prores_ks", pix_fmt="yuv422p10le")),
        "16-bit png": Case(clip("a.mov", 10, codec="png", pix_fmt="rgb48be")),
    },
    "gray": {
        "gray": Case(clip("a.mp4", 20, pix_fmt="gray")),
        "10-bit gray": Case(clip("a.mp4", 20, pix_fmt="gray10le")),
    },
    "alpha": {
        "vp9 with alpha": Case(clip("a.webm", 20, codec="libvpx-vp9", pix_fmt="yuva420p")),
        "prores with alpha": Case(clip("a.mov", 20, codec="prores_ks", pix_fmt="yuva444p10le")),
        "qtrle with alpha": Case(clip("a.mov", 20, codec="qtrle", pix_fmt="argb")),
        "apng with alpha": Case(clip("a.apng", 20, codec="apng", pix_fmt="rgba")),
    },
    "4:4:4, 4:2:2, 4:1:1, 4:4:0, RGB, full range": {
        "4:4:4": Case(clip("a.mp4", 20, pix_fmt="yuv444p")),
        "4:2:2": Case(clip("a.mp4", 20, pix_fmt="yuv422p")),
        "4:1:1": Case(clip("a.mkv", 20, codec="ffv1", pix_fmt="yuv411p")),
        "4:4:0": Case(clip("a.webm", 20, codec="libvpx-vp9", pix_fmt="yuv440p")),
        "rgb": Case(clip("a.mp4", 20, codec="libx264rgb", pix_fmt="rgb24")),
        "full range": Case(clip("a.mp4", 20, pix_fmt="yuvj420p")),
    },
    "variable rate": {
        "uneven mp4": Case(clip("a.mp4", times=UNEVEN, max_b_frames=2)),
        "uneven mkv": Case(clip("a.mkv", times=UNEVEN, max_b_frames=2)),
        "uneven gif": Case(animated("a.gif", duration=[100, 200, 1000, 50, 70, 500])),
    },
    "negative times": {
        "negative mkv": Case(clip("a.mkv", start=-0.5, container_options=NEGATIVE), is_timed=False),
        "negative mp4": Case(clip("a.mp4", start=-0.5, container_options=NEGATIVE)),
        "edit list": Case(cut_losslessly),
    },
    "missing times": {
        "raw h264": Case(clip("a.h264", max_b_frames=2), is_timed=False),
        "raw mjpeg": Case(clip("a.mjpeg", codec="mjpeg"), is_timed=False),
        "avi reordered": Case(clip("a.avi", max_b_frames=2), is_timed=False),
        "mpeg-ts without some": Case(without_some_times, is_timed=False),
    },
    "rotated, mirrored": {
        "rotated 90": Case(turned((0, 1, -1, 0)), turn=lambda frame: np.rot90(frame, -1)),
        "rotated 180": Case(turned((-1, 0, 0, -1)), turn=lambda frame: np.rot90(frame, 2)),
        "rotated 270": Case(turned((0, -1, 1, 0)), turn=np.rot90),
        "mirrored": Case(turned((-1, 0, 0, 1)), turn=np.fliplr),
        "mirrored and turned": Case(turned((0, 1, 1, 0)), turn=lambda frame: frame.swapaxes(0, 1)),
        "jpeg rotated 90": Case(still("a.jpg", orientation=6), turn=lambda frame: np.rot90(frame, -1)),
    },
    "interlaced": {
        "interlaced mpeg2": Case(
            clip("a.ts", codec="mpeg2video", codec_options={"flags": "+ilme+ildct"}), tolerance=2.5
        ),
        "interlaced h264": Case(clip("a.mp4", codec_options=INTERLACED), tolerance=2.5),
    },
    "non-zero start": {
        "late mp4": Case(clip("a.mp4", start=3.0, max_b_frames=2)),
        "late mkv": Case(clip("a.mkv", start=3.0, max_b_frames=2)),
        "late ts": Case(clip("a.ts", start=3.0, max_b_frames=2)),
        "ts over its clock's end": Case(clip("a.ts", start=2**33 / 90000 - 1)),
    },
    "several streams": {
        "two streams": Case(several_streams((96, 128), (64, 96))),
        "preview first": Case(several_streams((64, 96), (192, 256)), stream=1),
        "sound too": Case(clip("a.mp4", audio=True)),
        "animated avif": Case(animated("a.avif", duration=100), stream=1),
    },
    "GIF, APNG, MJPEG": {
        "gif": Case(clip("a.gif", 20, codec="gif", pix_fmt="rgb8", fps=10)),
        "apng": Case(clip("a.apng", 20, codec="apng", pix_fmt="rgb24")),
        "mjpeg": Case(clip("a.avi", 20, codec="mjpeg")),
    },
    "pictures and image sequences": {
        "joined png": Case(joined_pictures, is_timed=False),
        "jpeg": Case(still("a.jpg")),
        "jpeg with exif": Case(still("a.jpg", orientation=1)),
        "webp": Case(still("a.webp")),
        "tiff": Case(still("a.tiff")),
    },
    "hours long, a frame a minute": {
        "10 hours mp4": Case(clip("a.mp4", times=MINUTES, size=(64, 64))),
        "10 hours mkv": Case(clip("a.mkv", times=MINUTES, size=(64, 64))),
    },
    "wrong extension": {
        "mp4 as .avi": Case(renamed("b.avi", clip("a.mp4"))),
        "mkv as .mp4": Case(renamed("b.mp4", clip("a.mkv"))),
        "ts as .jpg": Case(renamed("b.jpg", clip("a.ts"))),
        "gif as .txt": Case(renamed("b.txt", animated("a.gif", duration=100))),
        "mp4 as .m3u8": Case(renamed("b.m3u8", clip("a.mp4")), same_command=False),
        "no extension": Case(renamed("b", clip("a.webm", codec="libvpx"))),
    },
    "size changes midway": {
        "size changes": Case(size_changes, is_timed=False, tolerance=2.5),
    },
    "no frames": {
        "mp4 without frames": Case(without_frames("a.mp4"), "There is no video in"),
        "mkv without frames": Case(without_frames("a.mkv"), UNKNOWN),
    },
    "audio only": {
        "sound": Case(lambda folder: write_audio(folder / "a.m4a"), "There is no video in"),
        "sound with a cover": Case(lambda folder: write_audio(folder / "a.m4a", cover=True), "There is no video in"),
        "wav": Case(data("a.wav", WAV), UNKNOWN),
    },
    "no file: missing, a directory, a FIFO, a device": {
        "missing": Case(lambda folder: folder / "none.mp4", NO_FILE),
        "directory": Case(lambda folder: folder, NO_FILE),
        "fifo": Case(fifo, NO_FILE),
        "device": Case(lambda folder: "/dev/zero", NO_FILE),
        "pattern": Case(lambda folder: folder / "img%03d.png", NO_FILE),
    },
    "no video: empty, text, zeros, noise": {
        "empty": Case(data("a.mp4", b""), EMPTY),
        "text": Case(data("a.mp4", b"no video at all\n" * 1000), UNKNOWN),
        "zeros": Case(data("a.mp4", bytes(100_000)), UNKNOWN),
        "noise": Case(data("a.mp4", np.random.default_rng(0).bytes(100_000)), UNKNOWN),
    },
    "animated WebP": {
        "animated webp": Case(animated("a.webp", duration=100), UNDECODED),
    },
    "playlists that point elsewhere": {
        kind: Case(leading_elsewhere("self.mp4", content), UNKNOWN) for kind, content in LEADING_ELSEWHERE.items()
    },
    "headers that claim too much": {
        "huge png": Case(still("a.png", size=(9_000, 9_000)), UNDECODED),
        "huge gif": Case(still("a.gif", size=(9_000, 9_000)), UNDECODED),
        "mp4 of 65535 x 65535": Case(patched("a.mp4", claim_size)),
        "mp4 of 8 million frames": Case(patched("a.mp4", claim_samples), UNDECODED, limit=300_000_000),
    },
}
CASES = {name: case for cases in BY_KIND.values() for name, case in cases.items()}


# --- files that were whole ---

WHOLE: dict[str, Make] = {
    "mp4, index in front": clip("a.mp4", 60, max_b_frames=2, container_options={"movflags": "faststart"}),
    "mp4, index at the end": clip("a.mp4", 60, max_b_frames=2),
    "mp4 in fragments": clip("a.mp4", 60, container_options={"movflags": "frag_keyframe+empty_moov"}),
    "mkv": clip("a.mkv", 60, max_b_frames=2),
    "webm": clip("a.webm", 60, codec="libvpx-vp9", codec_options={"cpu-used": "8", "deadline": "realtime"}),
    "ts": clip("a.ts", 60, max_b_frames=2),
    "avi": clip("a.avi", 60, codec="mpeg4"),
    "gif": clip("a.gif", 40, codec="gif", pix_fmt="rgb8", fps=10),
}


def cut(content: bytes, tenths: int) -> bytes:
    return content[: len(content) * tenths // 10]


def flip(content: bytes, seed: int, count: int = 20) -> bytes:
    """The same with `count` bytes changed, anywhere."""
    rng = np.random.default_rng(seed)
    changed = bytearray(content)
    for place in rng.integers(len(content), size=count).tolist():
        changed[place] ^= int(rng.integers(1, 256))
    return bytes(changed)


def overwrite(content: bytes, start: float, end: float, filling: bytes = b"\0") -> bytes:
    """The same with a part filled, as a download with holes leaves it."""
    first, last = round(start * len(content)), round(end * len(content))
    return content[:first] + filling * (last - first) + content[last:]


BROKEN: dict[str, dict[str, Callable[[bytes], bytes]]] = {
    **{
        f"truncated: {name}": {f"{tenths}0 %": functools.partial(cut, tenths=tenths) for tenths in range(1, 10)}
        for name in WHOLE
    },
    **{
        f"flipped bytes: {name}": {f"seed {seed}": functools.partial(flip, seed=seed) for seed in range(6)}
        for name in WHOLE
    },
    **{
        f"holes, swapped ends: {name}": {
            "middle": functools.partial(overwrite, start=0.4, end=0.6),
            "end": functools.partial(overwrite, start=0.5, end=1.0),
            "beginning": functools.partial(overwrite, start=0.0, end=0.1),
            "second half": lambda content: content[len(content) // 2 :],
            "twice": lambda content: content * 2,
            "noise after it": lambda content: content + np.random.default_rng(1).bytes(50_000),
        }
        for name in WHOLE
    },
}
