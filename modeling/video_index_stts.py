"""A video file opened, and when each of its frames is shown: what must be known before decoding can skip anything.

The file's packets are read through once without decoding them, which tells when every frame is shown and where the
keyframes are. Nothing is taken from the container's header: frame counts, durations and frame rates there are missing
or wrong too often.
"""

import copy
import io
import itertools
import os
import warnings
from array import array
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np

try:
    import av
except ImportError:  # arrays and lists of frames need no decoder
    av = None  # type: ignore[assignment]


_FALLBACK_FPS = Fraction(25)


class VideoFile:
    """One video stream of one file: its packets, and the times of its frames.

    Attributes:
        name: what to call the file in messages.
        times: when each frame is shown, float64, ascending, in seconds since the first one.
        ticks: the same as the file counts (int64, in units of the stream's time base, not from zero), or `None` where
            frames cannot be found by time and have to be counted.
        keyframes: ticks of the frames at which decoding can start, int64.
        duration: seconds from the first frame to the end of the last.
        fps: frames per second on average.

    Raises:
        ValueError: the file is missing, empty, not a video, or has only sound.
        ImportError: PyAV is not installed.
    """

    def __init__(self, source: Any):
        if av is None:
            raise ImportError("Decoding video files needs PyAV: `pip install av`.")
        self.name, self._source = _checked_source(source)
        self._container: Any = None
        self.rewind()
        try:
            self._index()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "VideoFile":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def close(self) -> None:
        if self._container is not None:
            self._container.close()
            self._container = None

    @property
    def source(self) -> Any:
        """A path, the file's bytes, or an open file."""
        return self._source

    @property
    def can_open_again(self) -> bool:
        """Whether others may read the file at the same time; an open file has one place to read at."""
        return isinstance(self._source, str | bytes)

    def open_again(self) -> "VideoFile":
        """A second handle with the same index, for another thread. The caller closes it."""
        other = copy.copy(self)
        other._container = None
        other.rewind()
        return other

    @property
    def codec(self) -> Any:
        """The decoder, PyAV's `CodecContext`."""
        return self._stream.codec_context

    @property
    def time_base(self) -> Fraction:
        """Seconds of one tick."""
        return self._stream.time_base

    @property
    def stream_index(self) -> int:
        """Place of the video stream among all streams of the file."""
        return self._stream.index

    @property
    def num_pixels(self) -> int:
        """Pixels of one frame as the header says, 0 if it does not."""
        return self.codec.width * self.codec.height

    def rewind(self) -> None:
        """Opens the file, or opens it again at its very beginning, where no container fails to go."""
        self.close()
        source = io.BytesIO(self._source) if isinstance(self._source, bytes) else self._source
        if not isinstance(source, str):
            source.seek(0)
        try:
            self._container = av.open(source)
        except (av.error.FFmpegError, UnicodeDecodeError) as error:
            raise ValueError(
                f"Cannot read {self.name} as a video: it is not a video file, or is cut off before its index. Pass a "
                "file that a video player opens."
            ) from error
        self._stream = _video_stream(self._container, self.name)
        # A decoder's own threads would hang a process that is forked while one is around and then frees its copy.
        self.codec.thread_type, self.codec.thread_count = "NONE", 1

    def packets(self) -> Iterator[Any]:
        """Packets from the current place to the end of the file, or of what can be read of it."""
        try:
            for packet in self._container.demux(self._stream):
                if packet.size:
                    yield packet
        except av.error.FFmpegError:
            return

    def packets_from(self, keyframe: int) -> Iterator[Any]:
        """Packets from `keyframe` (ticks) on.

        Seeking may land too late (MPEG-TS), far too early (no index) or fail; the beginning of the file never does.
        """
        before = 0
        while keyframe - before > self.keyframes[0]:
            try:
                self._container.seek(keyframe - before, stream=self._stream)
            except av.error.FFmpegError:
                break
            packets = self.packets()
            for packet in packets:
                if packet.is_keyframe and packet.pts == keyframe:
                    return itertools.chain([packet], packets)
                if packet.pts is not None and packet.pts > keyframe:
                    break
            before = max(2 * before, round(1 / self.time_base))
        self.rewind()
        return itertools.dropwhile(lambda packet: packet.pts != keyframe, self.packets())

    def _index(self) -> None:
        """Reads all packets; sets `times`, `ticks`, `keyframes`, `duration` and `fps`."""
        # Flat arrays, 18 bytes a packet: Python objects would take several times as much.
        all_pts, all_lengths, all_hidden, all_keyframes = array("q"), array("q"), bytearray(), bytearray()
        is_timed = True
        for packet in self.packets():
            pts = packet.pts
            if pts is None:
                is_timed, pts = False, 0
            all_pts.append(pts)
            all_lengths.append(packet.duration or 0)
            all_hidden.append(packet.is_discard)  # by an edit list; may be a keyframe that others are decoded from
            all_keyframes.append(packet.is_keyframe)
        pts, lengths = np.array(all_pts, dtype=np.int64), np.array(all_lengths, dtype=np.int64)
        visible = np.frombuffer(all_hidden, dtype=np.uint8) == 0
        if not visible.any():
            raise ValueError(f"{self.name} holds no video frames. Pass a file that a video player opens.")
        keyframes = pts[np.frombuffer(all_keyframes, dtype=np.uint8) != 0]
        self.keyframes = keyframes if len(keyframes) else pts[:1]
        self.ticks: np.ndarray | None = None
        if not is_timed or (np.diff(self.keyframes) <= 0).any():
            # A raw stream has no times, and a recording that was joined together starts over: only counting is left.
            rate = self._stream.average_rate or self._stream.guessed_rate or _FALLBACK_FPS
            steps, step, length = np.arange(np.count_nonzero(visible)), 1 / Fraction(rate), 1 / Fraction(rate)
        else:
            # What is shown before the first keyframe refers to frames that are not in the file.
            ticks = np.unique(pts[visible])
            decodable = ticks[ticks >= self.keyframes[0]]
            ticks = decodable if len(decodable) else ticks
            steps, step = ticks - ticks[0], self.time_base
            length = int(lengths[visible & (pts == ticks[-1])].max()) * step
            if self._container.format.name != "avi":  # AVI stores times in the order of decoding
                self.ticks = ticks
        last = int(steps[-1]) * step
        fps = (len(steps) - 1) / last if len(steps) > 1 else 1 / (length or 1 / _FALLBACK_FPS)
        self.times = steps * step.numerator / step.denominator  # exact product, so rounded once
        self.duration = float(last + (length or 1 / fps))
        self.fps = float(fps)
        self._warn_if_cut_off()

    def _warn_if_cut_off(self) -> None:
        claimed = 0.0
        if self._stream.duration:
            claimed = float(self._stream.duration * self.time_base)
        elif self._container.duration:
            # FFmpeg's Matroska counts from zero, whenever the first frame comes.
            claimed = (self._container.duration - max(0, self._container.start_time or 0)) / av.time_base
        if self.duration < claimed - 1.0:
            warnings.warn(
                f"The frames of {self.name} end after {self.duration:.1f} s although the file claims {claimed:.1f} s: "
                "it may be cut off. Frames are sampled from what is there.",
                stacklevel=5,
            )


def _checked_source(source: Any) -> tuple[str, Any]:
    """What to call the source in messages, and what to open: a path, bytes, or a file that can be read twice."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        return "the video's bytes", bytes(source)
    if not isinstance(source, (str, os.PathLike)):
        if not hasattr(source, "read"):
            raise ValueError(f"source must be a path, bytes or an open binary file, got {type(source).__name__}.")
        return "the video's bytes", source if hasattr(source, "seek") else source.read()
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
