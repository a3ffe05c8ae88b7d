"""torchcodec as the decoder, where the user installed it: the same frames, found by the same times."""

import functools
import importlib
import importlib.util
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .video_index_stts import VideoFile

_TOLERANCE = 1e-6  # seconds; it rounds times to float64, and the closest frames are 10 times as far apart
_NEAR = 17  # frames, more than a decoder holds back to put them in order: 16 at most in H.264 and HEVC
DECODERS = ("auto", "pyav", "torchcodec")


def choose_decoder(decoder: str) -> str:
    """Returns "pyav" or "torchcodec"; "auto" is torchcodec where it is installed.

    Raises:
        ValueError: `decoder` is none of "auto", "pyav" and "torchcodec".
        ImportError: "torchcodec" is asked for and cannot be used.

    Warns if torchcodec is installed and cannot be used: it wants an FFmpeg and the PyTorch that it was built for.
    """
    if decoder not in DECODERS:
        raise ValueError(f"video_decoder must be one of {', '.join(map(repr, DECODERS))}, got {decoder!r}.")
    if decoder == "pyav":
        return decoder
    problem = _problem()
    if decoder == "torchcodec" and problem is not None:
        raise ImportError(
            f"video_decoder='torchcodec' cannot be used: {problem}. Mend that, or choose video_decoder='pyav'."
        )
    if problem is not None and _is_installed():
        warnings.warn(
            f"torchcodec cannot be used, so PyAV decodes videos: {problem}. Mend that, or choose "
            "video_decoder='pyav' to be rid of this warning.",
            stacklevel=3,
        )
    return "pyav" if problem else "torchcodec"


def _is_installed() -> bool:
    return importlib.util.find_spec("torchcodec") is not None


@functools.cache
def _problem() -> str | None:
    """What keeps torchcodec from being used, `None` if nothing does."""
    if not _is_installed():
        return "it is not installed (`pip install torchcodec`)"
    try:
        # Not by an import statement: transformers would demand torchcodec of whoever loads a checkpoint with this file.
        module = importlib.import_module("torchcodec")
        importlib.import_module("torchcodec.decoders")
    except Exception as error:  # a library that does not fit raises RuntimeError, OSError or ImportError
        while error.__cause__ is not None and isinstance(error.__cause__, Exception):
            error = error.__cause__
        return f"it cannot be loaded ({' '.join(str(error).split())[:200]})"
    # Since 0.16 it loads without FFmpeg too, and can then decode images only.
    if getattr(module, "ffmpeg_major_version", 0) is None:
        return "it finds no FFmpeg libraries (versions 4 to 8)"
    return None


@dataclass(frozen=True)
class TorchcodecIndex:
    """Where the frames that will be asked for are, in the form that torchcodec reads.

    Attributes:
        places: where torchcodec counts each frame, by its position in the file.
        mappings: JSON like that of `ffprobe -show_frames`.
    """

    places: dict[int, int]
    mappings: bytes


def torchcodec_index(file: VideoFile, positions: Sequence[int]) -> TorchcodecIndex:
    """The index for ascending `positions` of `file`, which must have `ticks`.

    It lists these frames and the keyframes they are decoded from, not the whole file: torchcodec makes a dictionary of
    each entry, in every thread again. What it counts in entries must be as many frames in the file: it takes the next
    entry for the next frame, and seeks (instead of decoding on) to a keyframe that is more entries away than a decoder
    holds back. So the frame before each and `_NEAR` before each keyframe are there too.
    """
    ticks: Any = file.ticks
    shown = np.asarray(positions)
    wanted = ticks[shown]
    keyframes = np.unique(file.keyframes[(np.searchsorted(file.keyframes, wanted, side="right") - 1).clip(min=0)])
    near = np.searchsorted(ticks, keyframes)[:, None] - np.arange(1, _NEAR + 1)
    others = np.concatenate([near.ravel(), shown - 1]).clip(min=0)
    known = np.unique(np.concatenate([keyframes, ticks[others], wanted]))
    frames = [
        {"pts": pts, "duration": 1, "key_frame": int(is_key)}  # the duration is demanded, but finds no frame
        for pts, is_key in zip(known.tolist(), np.isin(known, keyframes).tolist(), strict=True)
    ]
    places = dict(zip(positions, np.searchsorted(known, wanted).tolist(), strict=True))
    return TorchcodecIndex(places, json.dumps({"frames": frames}).encode())


class TorchcodecFile:
    """A file opened by torchcodec, which is told where frames are and so need not read the file for it.

    Args:
        file: must have `ticks`.
        index: `torchcodec_index(file, positions)`.
    """

    def __init__(self, file: VideoFile, index: TorchcodecIndex):
        self._file, self._index = file, index
        self._decoder: Any = None

    def read(self, position: int) -> np.ndarray | None:
        """The frame at `position` of those indexed, uint8 `(height, width, 3)`, `None` if it cannot be had this way."""
        ticks: Any = self._file.ticks
        try:
            if self._decoder is None:
                self._decoder = self._open()
            frame = self._decoder.get_frame_at(self._index.places[position])
        except (RuntimeError, IndexError, ValueError):  # how it says that a container or a packet is beyond it
            return None
        if abs(frame.pts_seconds - float(int(ticks[position]) * self._file.time_base)) > _TOLERANCE:
            return None
        return np.ascontiguousarray(frame.data.numpy())  # odd widths come with padding

    def _open(self) -> Any:
        source = self._file.source
        if not isinstance(source, str | bytes):
            source.seek(0)
        return importlib.import_module("torchcodec.decoders").VideoDecoder(
            source,
            stream_index=self._file.stream_index,
            dimension_order="NHWC",
            num_ffmpeg_threads=1,
            custom_frame_mappings=self._index.mappings,
        )
