"""Frames of a video file at given moments, decoding only what leads up to them.

A decoder can start at keyframes only. So the file's packets are read through once without decoding them (microseconds
each), which tells when every frame is shown and where the keyframes are; then each wanted frame is decoded from the
keyframe before it, and whatever lies between is skipped. Nothing is taken from the container's header: frame counts,
durations and frame rates there are missing or wrong too often.
"""

import io
import itertools
import os
import struct
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from transformers.video_utils import VideoMetadata

try:
    import av
except ImportError:  # arrays and lists of frames need no decoder
    av = None  # type: ignore[assignment]


_FALLBACK_FPS = Fraction(25)
_TOLERANCE = 1e-6  # seconds: a moment that rounding put just before a frame's time still means that frame
_DECODE_ON = 16  # frames: up to this gap it is cheaper to decode on than to flush the decoder and fill it again


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
) -> tuple[list[Any], STTSVideoMetadata]:
    """Decodes the frames that are on screen at given moments, upright and in RGB.

    A moment shows the last frame whose time has come, the end shows the last frame. A frame that several moments fall
    on is returned once, so there may be fewer frames than moments.

    Args:
        source: path of a file (a still image is a video of one frame), its bytes, or an open binary file.
        sample_times: gets the video's metadata (`duration`: seconds from the first frame to the end of the last) and
            returns ascending moments in seconds since the first frame. `None` decodes every frame.
        transform: applied to each frame, uint8 `(height, width, 3)`, as soon as it is decoded.

    Returns:
        The transformed frames and their metadata.

    Raises:
        ValueError: the file is missing, empty, not a video, has only sound, or no frame of it can be decoded.
        ImportError: PyAV is not installed.

    Warns when frames are damaged or the file ends before the duration it claims; what is there is used, with its true
    times.
    """
    with _Reader(source) as reader:
        metadata, wanted = _plan(reader, sample_times)
        times = reader.times
        frames: list[Any] = []
        shown: list[int] = []
        for position, frame in reader.read(wanted):
            if not shown or position > shown[-1]:  # where a frame is damaged its predecessor comes again
                frames.append(transform(frame) if transform is not None else frame)
                shown.append(position)
                metadata.height, metadata.width = frame.shape[:2]
        if not frames:
            raise ValueError(f"Not one frame of {reader.name} could be decoded. Pass a file that a video player opens.")
        missing = len(set(wanted) - set(shown))
        if missing:
            warnings.warn(
                f"{missing} of {len(wanted)} frames wanted from {reader.name} are damaged; whole frames before them "
                "are shown instead where there are any.",
                stacklevel=2,
            )
        metadata.frames_indices = shown
        metadata.frame_times = [times[position] for position in shown]
        return frames, metadata


def probe_video(source: Any, sample_times: Callable[[Any], Iterable[float]] | None = None) -> STTSVideoMetadata:
    """Metadata that `decode_video` returns for an undamaged file, without decoding: `height` and `width` are missing.

    Reads the file's packets once. Arguments and errors as in `decode_video`.
    """
    with _Reader(source) as reader:
        metadata, wanted = _plan(reader, sample_times)
        metadata.frames_indices = wanted
        metadata.frame_times = [reader.times[position] for position in wanted]
        return metadata


def _plan(
    reader: "_Reader", sample_times: Callable[[Any], Iterable[float]] | None
) -> tuple[STTSVideoMetadata, list[int]]:
    """Metadata of the file and, ascending, which of its frames are on screen at the moments to show."""
    times = reader.times
    metadata = STTSVideoMetadata(
        total_num_frames=len(times), fps=reader.fps, duration=reader.duration, video_backend="pyav"
    )
    moments = times if sample_times is None else sample_times(metadata)
    return metadata, sorted({max(0, bisect_right(times, float(moment) + _TOLERANCE) - 1) for moment in moments})


class _Reader:
    """One video stream of one file.

    Attributes:
        times: when each frame is shown, ascending, in seconds since the first one.
        duration: seconds from the first frame to the end of the last.
        fps: frames per second on average.
    """

    def __init__(self, source: Any):
        if av is None:
            raise ImportError("Decoding video files needs PyAV: `pip install av`.")
        self.name, self._source = _checked_source(source)
        self._container: Any = None
        self._open()
        try:
            self._index()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "_Reader":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def close(self) -> None:
        if self._container is not None:
            self._container.close()

    def read(self, positions: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
        """The frames at ascending `positions` in the order of showing, uint8 `(height, width, 3)`.

        Yields each with its position; where one cannot be decoded, the frame before it and that one's position.
        """
        if self._ticks is None:
            return self._read_by_counting(positions)
        return self._read_by_seeking(positions, self._ticks)

    def _open(self) -> None:
        """Opens the file, or opens it again at its very beginning, where no container fails to go."""
        self.close()
        if not isinstance(self._source, str):
            self._source.seek(0)
        try:
            self._container = av.open(self._source)
        except (av.error.FFmpegError, UnicodeDecodeError) as error:
            raise ValueError(
                f"Cannot read {self.name} as a video: it is not a video file, or is cut off before its index. Pass a "
                "file that a video player opens."
            ) from error
        self._stream = _video_stream(self._container, self.name)
        self._stream.thread_type = "AUTO"

    def _index(self) -> None:
        """Reads all packets; sets `times`, `duration`, `fps` and, where frames can be found by time, `_ticks`."""
        stream = self._stream
        # An edit list may hide frames (`is_discard`), also keyframes that others are decoded from.
        packets = [
            (packet.pts, packet.duration or 0, packet.is_discard, packet.is_keyframe) for packet in self._packets()
        ]
        visible = [(pts, length) for pts, length, is_hidden, _ in packets if not is_hidden]
        if not visible:
            raise ValueError(f"{self.name} holds no video frames. Pass a file that a video player opens.")
        self._keyframes = [pts for pts, _, _, is_keyframe in packets if is_keyframe] or [packets[0][0]]
        self._ticks: list[int] | None = None
        header_fps = stream.average_rate or stream.guessed_rate or _FALLBACK_FPS
        if any(pts is None for pts, _, _, _ in packets) or _descends(self._keyframes):
            # A raw stream has no times, and a recording that was joined together starts over: only counting is left.
            shown = [position / header_fps for position in range(len(visible))]
            length = 1 / header_fps
        else:
            # What is shown before the first keyframe refers to frames that are not in the file.
            times = {pts for pts, _ in visible}
            ticks = sorted({pts for pts in times if pts >= self._keyframes[0]} or times)
            shown = [(tick - ticks[0]) * stream.time_base for tick in ticks]
            length = max(length for pts, length in visible if pts == ticks[-1]) * stream.time_base
            if self._container.format.name != "avi":  # AVI stores times in the order of decoding
                self._ticks = ticks
        fps = (len(shown) - 1) / shown[-1] if len(shown) > 1 else 1 / (length or 1 / _FALLBACK_FPS)
        self.times = [float(time) for time in shown]
        self.duration = float(shown[-1] + (length or 1 / fps))
        self.fps = float(fps)
        self._warn_if_cut_off()

    def _warn_if_cut_off(self) -> None:
        claimed = 0.0
        if self._stream.duration:
            claimed = float(self._stream.duration * self._stream.time_base)
        elif self._container.duration:
            claimed = self._container.duration / av.time_base
        if self.duration < claimed - 1.0:
            warnings.warn(
                f"The frames of {self.name} end after {self.duration:.1f} s although the file claims {claimed:.1f} s: "
                "it may be cut off. Frames are sampled from what is there.",
                stacklevel=5,
            )

    def _packets(self) -> Iterator[Any]:
        """Packets from the current place to the end of the file, or of what can be read of it."""
        try:
            for packet in self._container.demux(self._stream):
                if packet.size:
                    yield packet
        except av.error.FFmpegError:
            return

    def _packets_from(self, keyframe: int) -> Iterator[Any]:
        """Packets from `keyframe` (ticks) on.

        Seeking may land too late (MPEG-TS), far too early (no index) or fail; the beginning of the file never does.
        """
        before = 0
        while keyframe - before > self._keyframes[0]:
            try:
                self._container.seek(keyframe - before, stream=self._stream)
            except av.error.FFmpegError:
                break
            packets = self._packets()
            for packet in packets:
                if packet.is_keyframe and packet.pts == keyframe:
                    return itertools.chain([packet], packets)
                if packet.pts is not None and packet.pts > keyframe:
                    break
            before = max(2 * before, round(1 / self._stream.time_base))
        self._open()
        return itertools.dropwhile(lambda packet: packet.pts != keyframe, self._packets())

    def _decode(self, packets: Iterator[Any], wanted: set[int] | None = None) -> Iterator[Any]:
        """Frames in the order of showing. Given `wanted` (ticks), leaves out others that no frame refers to."""
        context = self._stream.codec_context
        for packet in itertools.chain(packets, [None]):
            skip = wanted is not None and packet is not None and packet.pts not in wanted
            context.skip_frame = "NONREF" if skip else "DEFAULT"
            try:
                yield from context.decode(packet)
            except (av.error.FFmpegError, EOFError):  # damaged: what comes after may be whole
                continue

    def _read_by_seeking(self, positions: Sequence[int], ticks: list[int]) -> Iterator[tuple[int, np.ndarray]]:
        wanted = {ticks[position] for position in positions}
        for keyframe, targets in self._groups(positions, ticks):
            shown = None
            for frame in self._decode(self._packets_from(keyframe), wanted):
                # What is shown before the keyframe refers to frames that were skipped.
                if frame.pts is None or frame.pts < keyframe or frame.is_corrupt:
                    continue
                while targets and frame.pts > ticks[targets[0]]:  # that one was damaged and never came out
                    targets.pop(0)
                    if shown is not None:
                        yield bisect_right(ticks, shown.pts) - 1, _upright(shown)
                shown = frame
                if targets and frame.pts == ticks[targets[0]]:
                    yield targets.pop(0), _upright(frame)
                if not targets:
                    break
            if targets and shown is not None:
                yield bisect_right(ticks, shown.pts) - 1, _upright(shown)

    def _groups(self, positions: Sequence[int], ticks: list[int]) -> Iterator[tuple[int, list[int]]]:
        """Positions that are decoded in one go, and the keyframe (ticks) to start each go at."""
        group: list[int] = []
        start = 0
        for position in positions:
            keyframe = self._keyframes[bisect_right(self._keyframes, ticks[position]) - 1]
            if group and bisect_right(ticks, keyframe) - 1 > group[-1] + _DECODE_ON:
                yield start, group
                group = []
            if not group:
                start = keyframe
            group.append(position)
        if group:
            yield start, group

    def _read_by_counting(self, positions: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
        remaining = list(positions)
        self._open()
        shown = None
        for count, frame in enumerate(self._decode(self._packets())):
            shown = (count, frame)
            if count == remaining[0]:
                yield remaining.pop(0), _upright(frame)
                if not remaining:
                    return
        if shown is not None:
            yield shown[0], _upright(shown[1])


def _checked_source(source: Any) -> tuple[str, Any]:
    """What to call the source in messages, and what to open: a path or a file that can be read twice."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        source = io.BytesIO(source)
    if not isinstance(source, (str, os.PathLike)):
        if not hasattr(source, "read"):
            raise ValueError(f"source must be a path, bytes or an open binary file, got {type(source).__name__}.")
        data = source.read() if not hasattr(source, "seek") else b""
        return "the video's bytes", io.BytesIO(data) if data else source
    path = os.fspath(source)
    if not os.path.isfile(path):
        raise ValueError(f"There is no video file {path!r}. Pass the path of an existing file.")
    if os.path.getsize(path) == 0:
        raise ValueError(f"The video file {path!r} is empty. Copy or download it again.")
    return f"video file {path!r}", path


def _video_stream(container: Any, name: str) -> Any:
    """The stream to show: the first that is neither a cover picture nor text drawn as a picture (FFmpeg's `tty`)."""
    cover = av.stream.Disposition.attached_pic
    streams = [stream for stream in container.streams.video if not stream.disposition & cover]
    is_text = container.format.name == "tty"
    if is_text or not streams:
        kinds = {"a cover picture" if stream.type == "video" else stream.type for stream in container.streams}
        held = "text" if is_text else ", ".join(sorted(kinds)) or "nothing"
        container.close()
        raise ValueError(f"There is no video in {name}, it holds {held}. Pass a file with a video stream.")
    return streams[0]


def _descends(ticks: Sequence[int]) -> bool:
    return any(later <= earlier for earlier, later in itertools.pairwise(ticks))


def _upright(frame: Any) -> np.ndarray:
    """The frame as it is meant to be seen, uint8 `(height, width, 3)`: turned and mirrored as its metadata says.

    The display matrix shows a pixel at `(x, y)` at `(a x + c y, b x + d y)` (ISO 14496-12, 8.3.2); cameras write right
    angles, anything else is taken for the nearest one.
    """
    picture = frame.to_ndarray(format="rgb24")
    data = [bytes(item) for item in frame.side_data if item.type.name == "DISPLAYMATRIX"]
    if not data:
        return picture
    a, b, _, c, d = struct.unpack("=5i", data[0][:20])
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
