"""Frames of a video file, decoding only what leads up to those that are shown.

`VideoFile` first reads all packets without decoding them, since headers are often wrong: they say when each frame is
shown and at which keyframes decoding can start. FFmpeg gets the bytes of one file, never a name, and `_FORMATS` names
no format that leads to other files or hosts.
"""

import copy
import io
import itertools
import os
import struct
import threading
import warnings
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from huggingface_hub.utils import httpx
from torchvision.transforms.v2 import InterpolationMode  # type: ignore[import-untyped]  # it has no types
from torchvision.transforms.v2 import functional as tvF
from transformers.video_utils import VideoMetadata

try:
    import av
    from av.sidedata.sidedata import SideDataContainer
except ImportError:  # decoded frames need no decoder
    av = None  # type: ignore[assignment]

_FORMATS = (
    "mov,matroska,avi,mpegts,mpeg,mpegvideo,m4v,h261,h263,h264,hevc,vvc,av1,obu,ivf,flv,live_flv,asf,ogg,rm,nut,mxf,"
    "gxf,wtv,dv,dhav,nsv,nuv,pva,ty,vc1,vc1test,dirac,dnxhd,cavsvideo,avs2,avs3,mjpeg,mjpeg_2000,smjpeg,yuv4mpegpipe,"
    "bink,smk,roq,flic,swf,cine,gif,apng,png_pipe,jpeg_pipe,webp_pipe,bmp_pipe,tiff_pipe,jpegxl_pipe,j2k_pipe"
)
MAX_GAP = 16  # frames: up to this gap it is cheaper to decode on than to flush the decoder and fill it again
MAX_RUN = 128  # frames: a longer run is cut at the next keyframe, from which another thread continues
REORDER_DEPTH = 16  # frames: H.264 and HEVC show none further from its place in the file
# A decoder holds up to 16 frames that others refer to: 8 decoders at once for 480p and 720p, 4 for 1080p, 1 for 4K.
MAX_DECODED_PIXELS = 2**23
MAX_FRAME_PIXELS = 2**26  # a small file can claim frames of gigabytes; 8K has half as many pixels
# Before 17.1, PyAV frees more options than there are where streams turn up late, as in MPEG-PS, and crashes.
_BOUNDS_PROBING = av is not None and tuple(map(int, av.__version__.split(".")[:2])) >= (17, 1)
Keep = Callable[[int, int, Any], None]  # what is done with (place, index, frame): a place among the wanted frames


@dataclass
class STTSVideoMetadata(VideoMetadata):
    """`VideoMetadata` with the true time of every frame shown, for variable frame rates too."""

    frame_times: list[float] | None = None  # seconds since the first frame of the video, one per frame shown
    num_damaged: int = 0  # frames whose place the whole frame before takes, once, so that fewer may be shown

    @property
    def timestamps(self) -> list[float]:
        return super().timestamps if self.frame_times is None else self.frame_times


class VideoFile(AbstractContextManager):
    """The video stream of one file, a context manager. A still image is a video of one frame.

    Of several streams it is the one marked as default, then the one with most pixels. Raises `ValueError` for a source
    that is no file or holds no video that the installed FFmpeg decodes. Warns if the file ends before the duration it
    claims; what is there is used, with its true times.

    Args:
        source: path, http(s) address, bytes or open binary file.

    Attributes:
        times: when each frame is shown, float64, ascending, in seconds since the first one.
        pts: the same in units of the stream's time base (int64, not from zero); `None` where frames must be counted.
        keyframes: pts of the frames at which decoding can start, int64.
        duration: seconds from the first frame to the end of the last.
        fps: frames per second on average.
    """

    def __init__(self, source: Any):
        if av is None:
            raise ImportError("Decoding video files needs PyAV: `pip install av`.")
        self._name, self._source = open_source(source)
        self._bytes = ByteStream(self._source, keep_open=hasattr(source, "read"))
        self._container: Any = None
        self.pts: np.ndarray | None = None
        try:
            self._rewind()
            self._index()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        if self._container is not None:
            self._container.close()
        self._bytes.close()

    def describe(self, indices: Sequence[int] | None = None) -> STTSVideoMetadata:
        """What `read` returns for an undamaged file, without decoding: `height` and `width` are missing."""
        indices = list(range(len(self.times)) if indices is None else indices)
        metadata = STTSVideoMetadata(len(self.times), self.fps, duration=self.duration, video_backend="pyav")
        metadata.frames_indices, metadata.frame_times = indices, self.times[indices].tolist()
        return metadata

    def read(
        self,
        indices: Sequence[int] | None,
        size: tuple[int, int],
        resizing: Callable[[torch.Tensor, tuple[int, int]], torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, STTSVideoMetadata]:
        """Decodes frames, upright and in RGB, in at most `torch.get_num_threads()` threads. Warns of damaged ones.

        indices: ascending, `None` for all. size: height and width that each frame gets by `resizing(frame, size)`, by
        default `resize`, once it is decoded. Returns uint8 `(T, 3, height, width)` and their metadata. Raises
        `ValueError` if no frame can be decoded.
        """
        metadata = self.describe(indices)
        wanted: list[int] = metadata.frames_indices or []
        found = np.full(len(wanted), -1)  # index of the frame shown in place of each wanted one
        # One tensor from the start: small ones would lie among what the decoder frees, and keep that from the system.
        frames = torch.empty(len(wanted), 3, *size, dtype=torch.uint8)

        def keep(place: int, index: int, frame: Any) -> None:
            picture = torch.from_numpy(upright(frame)).permute(2, 0, 1)
            metadata.height, metadata.width = picture.shape[1:]
            frames[place] = picture if picture.shape[1:] == size else (resizing or resize)(picture, size)
            found[place] = index

        self._decode_all(wanted, keep)
        places = np.flatnonzero(found > np.maximum.accumulate(np.append(-1, found))[:-1]).tolist()
        if not places:
            raise ValueError(
                f"Not one frame of {self._name} can be decoded. Convert it to MP4, at most {MAX_FRAME_PIXELS:,} pixels."
            )
        metadata.num_damaged = int(np.count_nonzero(found != wanted))
        if metadata.num_damaged:
            warnings.warn(
                f"{metadata.num_damaged} of {len(wanted)} frames of {self._name} are damaged. Others are shown.",
                stacklevel=2,
            )
            metadata.frames_indices = found[places].tolist()
            metadata.frame_times = self.times[found[places]].tolist()
            frames = frames[places]
        return frames, metadata

    def _rewind(self) -> None:
        """Opens the file, or opens it again at its very beginning, where no container fails to go."""
        if self._container is not None:
            self._container.close()
        self._bytes.seek(0)
        limits = {"max_pixels": str(MAX_FRAME_PIXELS)}
        options: dict[str, Any] = {"format_whitelist": _FORMATS, "protocol_whitelist": "none"}
        options = {"container_options": options, "options": limits if _BOUNDS_PROBING else {}}
        try:  # metadata may be in other encodings than UTF-8; nothing here reads it
            self._container = av.open(self._bytes, "r", buffer_size=2**16, metadata_errors="replace", **options)
        except av.error.FFmpegError as error:
            raise ValueError(
                f"Cannot read {self._name} as a video: it is not a video file of a known format, or is cut off before "
                "its index, or claims to need more memory than there is. Pass a file that a video player opens."
            ) from error
        cover = av.stream.Disposition.attached_pic
        streams = [stream for stream in self._container.streams.video if not stream.disposition & cover]
        if not streams:
            raise ValueError(f"There is no video in {self._name}. Pass a file with a video stream.")

        def rank(stream: Any) -> tuple[bool, int, int]:  # as FFmpeg's command does: an animated AVIF, not its preview
            pixels = stream.codec_context.width * stream.codec_context.height if stream.codec_context else 0
            return bool(stream.disposition & av.stream.Disposition.default), pixels, stream.frames

        self._stream = max(streams, key=rank)
        self._codec = self._stream.codec_context
        if self._codec is None:
            raise ValueError(f"The installed FFmpeg has no decoder for {self._name}. Convert it to H.264.")
        # A decoder's own threads would hang a process that is forked while one is around and then frees its copy.
        self._codec.thread_type, self._codec.thread_count = "NONE", 1
        self._codec.options = limits

    def _packets(self) -> Iterator[Any]:
        """Packets from the current place to the end of the file, or of what can be read of it."""
        try:
            yield from (packet for packet in self._container.demux(self._stream) if packet.size)
        except (av.error.FFmpegError, IndexError):  # at the end PyAV 18.1's `demux` misses streams that began midway
            return

    def _packets_from(self, keyframe: int) -> Iterator[Any]:
        """Packets from `keyframe` (pts) on. Seeking may land too late (MPEG-TS), far too early (no index) or fail."""
        before = 0
        while keyframe - before > self.keyframes[0]:
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
        self._rewind()
        return itertools.dropwhile(lambda packet: packet.pts != keyframe, self._packets())

    def _index(self) -> None:
        """Reads all packets; sets `times`, `pts`, `keyframes`, `duration` and `fps`."""
        # A flat array, 32 bytes a packet: Python objects would take several times as much.
        numbers, is_timed = array("q"), True
        for packet in self._packets():
            is_timed = is_timed and packet.pts is not None
            # Packets to discard are hidden by an edit list; they may be keyframes that others are decoded from.
            numbers.extend((packet.pts or 0, packet.duration or 0, packet.is_discard, packet.is_keyframe))
        pts, lengths, is_hidden, is_keyframe = np.array(numbers, dtype=np.int64).reshape(-1, 4).T
        visible = is_hidden == 0
        if not visible.any():
            raise ValueError(f"{self._name} holds no video frames. Pass a file that a video player opens.")
        keyframes = pts[is_keyframe != 0]
        self.keyframes = keyframes if len(keyframes) else pts[:1]
        stream = self._stream
        if not is_timed or (np.diff(self.keyframes) <= 0).any():
            # A raw stream has no times, and a recording that was joined together starts over: only counting is left.
            # `average_rate` of a raw stream is FFmpeg's default, 25; `guessed_rate` is what the stream says.
            step = length = 1 / Fraction(stream.guessed_rate or stream.average_rate or 25)
            steps = np.arange(np.count_nonzero(visible))
        else:
            shown = np.unique(pts[visible])
            # Frames before the first keyframe refer to frames that are not in the file.
            shown = shown[shown >= self.keyframes[0]] if shown[-1] >= self.keyframes[0] else shown
            steps, step = shown - shown[0], stream.time_base
            length = int(lengths[visible & (pts == shown[-1])].max()) * step
            if self._container.format.name != "avi":  # AVI stores times in the order of decoding
                self.pts = shown
        last = int(steps[-1]) * step
        fps = (len(steps) - 1) / last if last else 1 / (length or Fraction(1, 25))
        self.times = steps * step.numerator / step.denominator  # exact product, so rounded once
        self.duration, self.fps = float(last + (length or 1 / fps)), float(fps)
        claimed = float((stream.duration or 0) * stream.time_base)
        if not claimed and self._container.duration:
            # FFmpeg's Matroska counts from zero, whenever the first frame comes.
            claimed = (self._container.duration - max(0, self._container.start_time or 0)) / av.time_base
        if self.duration < claimed - 1.0:
            warnings.warn(
                f"The frames of {self._name} end at {self.duration:.1f} of {claimed:.1f} s: it may be cut off.",
                stacklevel=4,
            )

    def _decode_all(self, wanted: list[int], keep: Keep) -> None:
        """Hands each wanted frame to `keep(place, index, frame)`, from several threads where runs lie apart."""
        if self.pts is None:
            _deliver(self._count_frames(), range(len(wanted)), wanted, keep)
            return
        # A run: the places among `wanted` that are decoded in one go, from the keyframe before the first.
        keyframes = self.keyframes[np.searchsorted(self.keyframes, self.pts[wanted], side="right") - 1]
        starts = np.searchsorted(self.pts, keyframes, side="right") - 1
        runs: list[tuple[int, list[int]]] = []
        for place, (keyframe, start) in enumerate(zip(keyframes.tolist(), starts.tolist(), strict=True)):
            if runs and start <= wanted[place - 1] + MAX_GAP and start < wanted[runs[-1][1][0]] + MAX_RUN:
                runs[-1][1].append(place)
            else:
                runs.append((keyframe, [place]))
        # An open file of the caller cannot be opened again to be read at several places at once.
        most = min(torch.get_num_threads(), 8, len(runs)) if isinstance(self._source, str | bytes) else 1
        workers = max(1, min(most, MAX_DECODED_PIXELS // max(1, self._codec.width * self._codec.height)))
        ended = threading.Event()

        def decode(worker: int) -> None:
            with self._reopened() if worker else nullcontext(self) as file:
                for keyframe, places in itertools.takewhile(lambda _: not ended.is_set(), runs[worker::workers]):
                    frames = file._frames_from(keyframe, [wanted[place] for place in places])
                    _deliver(frames, places, wanted, keep)

        with ThreadPoolExecutor(workers, thread_name_prefix="read_video") as pool:
            try:
                deque(pool.map(decode, range(workers)), maxlen=0)  # raises what a thread raised
            finally:
                ended.set()  # on an error or Ctrl-C, before the pool waits for its threads

    def _reopened(self) -> "VideoFile":
        file = copy.copy(self)
        file._container, file._bytes = None, ByteStream(self._source)
        file._rewind()
        return file

    def _count_frames(self) -> Iterator[tuple[int, Any]]:
        """Whole frames of a stream without times, each after its index, which it keeps where others are lost."""
        self._rewind()
        index = -1
        for frame in self._decode(self._packets()):
            ahead = REORDER_DEPTH if self._codec.has_b_frames else 0
            index = index + 1 if frame is None else max(index + 1, (frame.pts or 0) - ahead)
            if frame is not None and not frame.is_corrupt:
                yield index, frame

    def _frames_from(self, keyframe: int, indices: list[int]) -> Iterator[tuple[int, Any]]:
        """Whole frames from a keyframe on, each after its index; those not in `indices` may be left out."""
        pts: Any = self.pts
        for frame in self._decode(self._packets_from(keyframe), set(pts[indices].tolist())):
            # Frames before the keyframe refer to frames that were skipped.
            if frame is not None and frame.pts is not None and frame.pts >= keyframe and not frame.is_corrupt:
                index = int(np.searchsorted(pts, frame.pts, side="right")) - 1
                if pts[index] == frame.pts:
                    yield index, frame

    def _decode(self, packets: Iterator[Any], wanted: set[int] | None = None) -> Iterator[Any]:
        """Frames as shown, `None` for one that cannot be decoded; may leave out those whose pts is not `wanted`."""
        count = 0
        for packet in itertools.chain(packets, [None]):
            if self.pts is None and packet is not None:
                packet.pts = count  # the frame has it too
                count += not packet.is_discard  # no frame comes of those
            # What an edit list hides is decoded too: FFmpeg mends damaged frames with others.
            skip = wanted is not None and packet is not None and not packet.is_discard and packet.pts not in wanted
            self._codec.skip_frame = "NONREF" if skip else "DEFAULT"
            try:
                yield from self._codec.decode(packet)
            except (av.error.FFmpegError, EOFError):  # damaged: what comes after may be whole
                yield None


class ByteStream:
    """A source without its attribute `name`, which PyAV would hand to FFmpeg."""

    def __init__(self, source: Any, keep_open: bool = False):
        if isinstance(source, str | bytes):
            source = open(source, "rb") if isinstance(source, str) else io.BytesIO(source)  # noqa: SIM115
        self.read, self.tell, self._seek = source.read, source.tell, source.seek
        self.close: Callable[[], None] = (lambda: None) if keep_open else source.close

    def seek(self, offset: int, whence: int = 0) -> int:
        """As of files, but -1 for an impossible position: damaged files send FFmpeg there, which can go on."""
        try:
            return self._seek(offset, whence)
        except (OSError, ValueError):
            return -1


def is_url(source: Any) -> bool:
    """Whether `source` is an http(s) address."""
    return isinstance(source, str) and source.lower().startswith(("http://", "https://"))


def open_source(source: Any) -> tuple[str, Any]:
    """What to call a source in messages, and what to read: a path, bytes, or an open file that can be rewound."""
    if is_url(source):
        try:
            response = httpx.get(source, follow_redirects=True, timeout=30.0).raise_for_status()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ValueError(f"Cannot download {source!r}: {error}. Check the address, or pass a file.") from error
        return f"the video downloaded from {source!r}", response.content
    if hasattr(source, "read") and isinstance(source.read(0), bytes):
        if getattr(source, "seekable", lambda: hasattr(source, "seek"))():
            return "the open video file", source
        source = source.read()
    if isinstance(source, bytes | bytearray | memoryview):
        return "the video's bytes", bytes(source)
    found = os.fsdecode(source) if isinstance(source, str | os.PathLike) else type(source)
    if isinstance(found, str) and os.path.isfile(found):
        return f"video file {found!r}", found
    raise ValueError(f"There is no video file {found!r}. Pass the path or http(s) address of one.")


def _deliver(frames: Iterator[tuple[int, Any]], places: Sequence[int], wanted: list[int], keep: Keep) -> None:
    """Hands wanted frames to `keep`; for a damaged one that does not come, the whole frame before it.

    With damaged times a wanted frame may come late, so up to `REORDER_DEPTH` frames after the last one are decoded.
    """
    awaited: dict[int, list[int]] = {}  # places by the index wanted there
    for place in places:
        awaited.setdefault(wanted[place], []).append(place)
    ahead, beyond = deque(awaited), 0  # beyond: frames after the last wanted one
    whole: tuple[int, Any] | None = None
    for index, frame in frames:
        while ahead and ahead[0] < index:
            lost = awaited.get(ahead.popleft(), [])
            if whole is not None:
                for place in lost:
                    keep(place, *whole)
        if whole is None or index >= whole[0]:
            whole = index, frame
        for place in awaited.pop(index, []):
            keep(place, index, frame)
        beyond += index > wanted[places[-1]]
        if not awaited or beyond > REORDER_DEPTH:
            return
    if whole is not None and ahead:
        for place in awaited.get(ahead[0], []):
            keep(place, *whole)


def resize(
    picture: torch.Tensor, size: tuple[int, int], interpolation: InterpolationMode = InterpolationMode.BILINEAR
) -> torch.Tensor:
    """A picture, uint8 `(3, height, width)`, in another size, by the steps of native preprocessing."""
    # One colour at a time: a 4K frame takes 100 MB in float32.
    colours = [tvF.resize(colour.float(), list(size), interpolation, antialias=False) for colour in picture.split(1)]
    return torch.cat(colours).round().clamp(0, 255).to(torch.uint8)


def upright(frame: Any) -> np.ndarray:
    """The frame as uint8 `(height, width, 3)`, turned and mirrored by right angles as its metadata says.

    The display matrix shows a pixel at `(x, y)` at `(a x + c y, b x + d y)` (ISO 14496-12, 8.3.2). A frame with other
    side data that PyAV does not know (EXIF, several views) is turned but not mirrored.
    """
    # In this thread: a process forked while such a frame awaits the garbage collector hangs on ending its threads.
    one_thread = {"threads": 1} if int(av.__version__.split(".")[0]) >= 17 else {}  # the only way before
    picture = frame.to_ndarray(format="rgb24", **one_thread)
    try:  # not `frame.side_data`: that is a cycle, and keeps 12 MB of a 4K frame until garbage is collected
        side_data: Any = SideDataContainer(frame)  # type: ignore[call-arg]
    except ValueError:
        return np.ascontiguousarray(np.rot90(picture, round(frame.rotation / 90)))
    matrices = [bytes(item) for item in side_data if item.type.name == "DISPLAYMATRIX"]
    a, b, _, c, d = struct.unpack("=5i", matrices[0][:20]) if matrices else (1, 0, 0, 0, 1)
    if abs(b) + abs(c) > abs(a) + abs(d):
        picture, a, d = picture.swapaxes(0, 1), c, b
    return np.ascontiguousarray(picture[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1])
