"""Frames of a video file at given moments, decoding only what leads up to them.

A decoder can start at keyframes only. So each wanted frame is decoded from the keyframe before it, and whatever lies
between is skipped; stretches that lie apart are decoded by several threads at once.
"""

import contextlib
import itertools
import queue
import struct
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.video_utils import VideoMetadata

from .video_index_stts import VideoFile, av
from .video_torchcodec_stts import TorchcodecFile, choose_decoder, torchcodec_index

try:
    from av.sidedata.sidedata import SideDataContainer
except ImportError:  # without PyAV, which `VideoFile` says, or where another version keeps it elsewhere
    SideDataContainer = None  # type: ignore[assignment,misc]

_TOLERANCE = 1e-6  # seconds: a moment that rounding put just before a frame's time still means that frame
_DECODE_ON = 16  # frames: up to this gap it is cheaper to decode on than to flush the decoder and fill it again
_LONG = 128  # frames: from this length on a stretch is cut at the next keyframe, for another thread to go on from
_MAX_THREADS = 8
# A decoder holds up to 16 frames that others refer to: 8 at once for 480p and 720p, 4 for 1080p, 1 for 4K.
_MAX_PIXELS_AT_ONCE = 2**23

# One stretch of the file: the keyframe (ticks) to start at, and the positions to decode from there on.
_Stretch = tuple[int, list[int]]
# A decoded frame: its position, its height and width, and what `transform` made of it.
_Decoded = tuple[int, tuple[int, int], Any]


@dataclass
class STTSVideoMetadata(VideoMetadata):
    """`VideoMetadata` with the real time of every frame shown, so that it holds for variable frame rates too.

    `frame_times`: seconds since the first frame of the video, one per frame shown. `frames_indices` counts the frames
    of the file in the order in which they are shown.
    """

    frame_times: list[float] | None = None

    @property
    def timestamps(self) -> list[float]:
        """Seconds since the first frame of the video, one per frame shown."""
        return super().timestamps if self.frame_times is None else self.frame_times


def decode_video(
    source: Any,
    sample_times: Callable[[Any], Iterable[float]] | None = None,
    transform: Callable[[np.ndarray], Any] | None = None,
    decoder: str = "auto",
) -> tuple[list[Any], STTSVideoMetadata]:
    """Decodes the frames that are on screen at given moments, upright and in RGB.

    A moment shows the last frame whose time has come, the end shows the last frame. A frame that several moments fall
    on is returned once, so there may be fewer frames than moments. At most as many threads decode as PyTorch computes
    with (`torch.get_num_threads()`).

    Args:
        source: path of a file (a still image is a video of one frame), its bytes, or an open binary file.
        sample_times: gets the video's metadata (`duration`: seconds from the first frame to the end of the last) and
            returns ascending moments in seconds since the first frame. `None` decodes every frame.
        transform: applied to each frame, uint8 `(height, width, 3)`, as soon as it is decoded; several threads may
            call it at once.
        decoder: "pyav", "torchcodec", or "auto" for torchcodec where it is installed. What torchcodec cannot do is
            left to PyAV in either case: files without times, whose frames can only be counted, mirrored ones, and
            stretches it fails on; the metadata's `video_backend` is then "pyav". Of damaged frames it shows what it
            can make of them, without a warning.

    Returns:
        The transformed frames and their metadata.

    Raises:
        ValueError: the file is missing, empty, not a video, has only sound, or no frame of it can be decoded; or
            `decoder` is none of the three.
        ImportError: PyAV, or torchcodec where it is asked for, is not installed.

    Warns when frames are damaged or the file ends before the duration it claims; what is there is used, with its true
    times. Warns once if torchcodec is installed but cannot be loaded.
    """
    chosen = choose_decoder(decoder)
    with VideoFile(source) as file:
        metadata, wanted = _plan(file, sample_times)
        frames: list[Any] = []
        shown: list[int] = []
        read = _Reading(file, transform, chosen)
        for position, size, frame in read.frames(wanted):
            if not shown or position > shown[-1]:  # where a frame is damaged its predecessor comes again
                frames.append(frame)
                shown.append(position)
                metadata.height, metadata.width = size
        if not frames:
            raise ValueError(f"Not one frame of {file.name} could be decoded. Pass a file that a video player opens.")
        missing = len(set(wanted) - set(shown))
        if missing:
            warnings.warn(
                f"{missing} of {len(wanted)} frames wanted from {file.name} are damaged; whole frames before them "
                "are shown instead where there are any.",
                stacklevel=2,
            )
        metadata.video_backend = read.decoder
        metadata.frames_indices = shown
        metadata.frame_times = file.times[shown].tolist()
        return frames, metadata


def probe_video(source: Any, sample_times: Callable[[Any], Iterable[float]] | None = None) -> STTSVideoMetadata:
    """Metadata that `decode_video` returns for an undamaged file, without decoding: `height` and `width` are missing.

    Reads the file's packets once. Arguments and errors as in `decode_video`.
    """
    with VideoFile(source) as file:
        metadata, wanted = _plan(file, sample_times)
        metadata.frames_indices = wanted
        metadata.frame_times = file.times[wanted].tolist()
        return metadata


def _plan(
    file: VideoFile, sample_times: Callable[[Any], Iterable[float]] | None
) -> tuple[STTSVideoMetadata, list[int]]:
    """Metadata of the file and, ascending, which of its frames are on screen at the moments to show."""
    metadata = STTSVideoMetadata(
        total_num_frames=len(file.times), fps=file.fps, duration=file.duration, video_backend="pyav"
    )
    moments = file.times if sample_times is None else np.fromiter(sample_times(metadata), dtype=np.float64)
    positions = np.searchsorted(file.times, moments + _TOLERANCE, side="right") - 1
    return metadata, np.unique(positions.clip(min=0)).tolist()


class _Reading:
    """Decoding of one file, by the calling thread or by several."""

    def __init__(self, file: VideoFile, transform: Callable[[np.ndarray], Any] | None, decoder: str):
        self.file, self.transform = file, transform
        # torchcodec finds frames by time only, and turns pictures but does not mirror them.
        self.decoder = "pyav" if decoder == "pyav" or file.ticks is None or _is_mirrored(file) else decoder

    def frames(self, positions: Sequence[int]) -> Iterator[_Decoded]:
        """The frames at ascending `positions` in the order of showing.

        Yields each with its position; where one cannot be decoded, the frame before it and that one's position.
        """
        if self.file.ticks is None:
            yield from self._count(positions)
            return
        stretches = list(_stretches(self.file, positions))
        workers = min(torch.get_num_threads(), _MAX_THREADS, len(stretches)) if self.file.can_open_again else 1
        workers = max(1, min(workers, _MAX_PIXELS_AT_ONCE // max(1, self.file.num_pixels)))
        index = torchcodec_index(self.file, positions) if self.decoder == "torchcodec" else None
        with contextlib.ExitStack() as opened:
            # Each thread takes a handle, decodes one stretch with it and gives it back.
            handles: queue.SimpleQueue[tuple[VideoFile, TorchcodecFile | None]] = queue.SimpleQueue()
            for number in range(workers):
                file = self.file if number == 0 else opened.enter_context(self.file.open_again())
                other = None if index is None else TorchcodecFile(self.file, index)
                handles.put((file, other))

            def decode(stretch: _Stretch) -> list[_Decoded]:
                file, other = handles.get()
                try:
                    return list(self._stretch(file, other, *stretch))
                finally:
                    handles.put((file, other))

            if workers == 1:
                for stretch in stretches:
                    yield from decode(stretch)
                return
            pool = opened.enter_context(ThreadPoolExecutor(workers, thread_name_prefix="decode_video"))
            for decoded in pool.map(decode, stretches):
                yield from decoded

    def _stretch(
        self, file: VideoFile, other: TorchcodecFile | None, keyframe: int, positions: list[int]
    ) -> Iterator[_Decoded]:
        """Decodes one stretch, by torchcodec as far as it goes."""
        if other is None:
            yield from self._seek(file, keyframe, positions)
            return
        for done, position in enumerate(positions):
            picture = other.read(position)
            if picture is None:
                self.decoder = "pyav"
                for start, rest in _stretches(file, positions[done:]):
                    yield from self._seek(file, start, rest)
                return
            yield self._transformed(position, picture)

    def _transformed(self, position: int, picture: np.ndarray) -> _Decoded:
        size = picture.shape[:2]
        return position, (size[0], size[1]), picture if self.transform is None else self.transform(picture)

    def _seek(self, file: VideoFile, keyframe: int, positions: list[int]) -> Iterator[_Decoded]:
        ticks: Any = file.ticks
        targets = [int(ticks[position]) for position in positions]
        wanted = set(targets)
        shown: Any = None

        def last_whole() -> _Decoded:
            return self._transformed(int(np.searchsorted(ticks, shown.pts, side="right")) - 1, _upright(shown))

        for frame in _decode(file, _until(file.packets_from(keyframe), wanted), wanted):
            # What is shown before the keyframe refers to frames that were skipped.
            if frame.pts is None or frame.pts < keyframe or frame.is_corrupt:
                continue
            while targets and frame.pts > targets[0]:  # that one was damaged and never came out
                targets.pop(0)
                if shown is not None:
                    yield last_whole()
            shown = frame
            if targets and frame.pts == targets[0]:
                targets.pop(0)
                yield last_whole()
            if not targets:
                return
        if targets and shown is not None:
            yield last_whole()

    def _count(self, positions: Sequence[int]) -> Iterator[_Decoded]:
        remaining = list(positions)
        self.file.rewind()
        shown = None
        for count, frame in enumerate(_decode(self.file, self.file.packets())):
            shown = (count, frame)
            if count == remaining[0]:
                yield self._transformed(remaining.pop(0), _upright(frame))
                if not remaining:
                    return
        if shown is not None:
            yield self._transformed(shown[0], _upright(shown[1]))


def _stretches(file: VideoFile, positions: Sequence[int]) -> Iterator[_Stretch]:
    """Positions that are decoded in one go, and the keyframe to start each go at."""
    ticks: Any = file.ticks
    before = np.searchsorted(file.keyframes, ticks[positions], side="right") - 1
    keyframes = file.keyframes[before]
    starts = np.searchsorted(ticks, keyframes, side="right") - 1
    group: list[int] = []
    first = 0
    for position, keyframe, start in zip(positions, keyframes.tolist(), starts.tolist(), strict=True):
        if group and (start > group[-1] + _DECODE_ON or start >= group[0] + _LONG):
            yield first, group
            group = []
        if not group:
            first = keyframe
        group.append(position)
    if group:
        yield first, group


def _until(packets: Iterator[Any], wanted: set[int]) -> Iterator[Any]:
    """Packets until all frames `wanted` (ticks) have come, and one more: in interlaced video that may be another half.

    What a frame refers to comes before it. So the decoder can be emptied right then rather than fed until the last
    frame comes out by itself, many frames later.
    """
    missing = set(wanted)
    for packet in packets:
        yield packet
        missing.discard(packet.pts)
        if not missing:
            yield from itertools.islice(packets, 1)
            return


def _decode(file: VideoFile, packets: Iterator[Any], wanted: set[int] | None = None) -> Iterator[Any]:
    """Frames in the order of showing. Given `wanted` (ticks), leaves out others that no frame refers to."""
    for packet in itertools.chain(packets, [None]):
        skip = wanted is not None and packet is not None and packet.pts not in wanted
        file.codec.skip_frame = "NONREF" if skip else "DEFAULT"
        try:
            yield from file.codec.decode(packet)
        except (av.error.FFmpegError, EOFError):  # damaged: what comes after may be whole
            continue


def _upright(frame: Any) -> np.ndarray:
    """The frame as it is meant to be seen, uint8 `(height, width, 3)`: turned and mirrored as its metadata says.

    The display matrix shows a pixel at `(x, y)` at `(a x + c y, b x + d y)` (ISO 14496-12, 8.3.2); cameras write right
    angles, anything else is taken for the nearest one.
    """
    # In this thread: a process forked while such a frame awaits the garbage collector hangs on ending its threads.
    one_thread = {"threads": 1} if int(av.__version__.split(".")[0]) >= 17 else {}  # the only way before
    picture = frame.to_ndarray(format="rgb24", **one_thread)
    a, b, c, d = _display_matrix(frame)
    if abs(b) + abs(c) > abs(a) + abs(d):
        picture = picture.swapaxes(0, 1)
        flip_rows, flip_columns = b < 0, c < 0
    else:
        flip_rows, flip_columns = d < 0, a < 0
    if flip_rows:
        picture = picture[::-1]
    if flip_columns:
        picture = picture[:, ::-1]
    return np.ascontiguousarray(picture)


def _display_matrix(frame: Any) -> tuple[int, int, int, int]:
    # Not `frame.side_data`: the frame would hold what holds the frame until garbage is collected, and a 4K frame takes
    # 12.4 MB (1.5 bytes a pixel).
    side_data = frame.side_data if SideDataContainer is None else SideDataContainer(frame)  # type: ignore[call-arg]
    data = [bytes(item) for item in side_data if item.type.name == "DISPLAYMATRIX"]
    if not data:
        return 1, 0, 0, 1
    a, b, _, c, d = struct.unpack("=5i", data[0][:20])
    return a, b, c, d


def _is_mirrored(file: VideoFile) -> bool:
    first = next(_decode(file, file.packets_from(int(file.keyframes[0]))), None)
    a, b, c, d = (1, 0, 0, 1) if first is None else _display_matrix(first)
    return a * d < b * c
