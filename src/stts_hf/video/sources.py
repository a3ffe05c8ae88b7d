"""What a video may come as: downloads within limits, pictures, decoders of torchcodec."""

import contextlib
import io
import math
import os
import tempfile
import threading
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np
import torch
from huggingface_hub.utils import httpx
from PIL import Image
from transformers.image_utils import ChannelDimension, infer_channel_dimension_format, load_image

from stts_hf.modeling import video_reading_stts as reading
from stts_hf.modeling.video_processing_stts import check_amount
from stts_hf.modeling.video_reading_stts import STTSVideoMetadata, VideoFile

# Settings of a processor or of a call, and their defaults.
LIMITS = {"max_download_bytes": 2**31, "max_download_seconds": 600.0}


def held_source(source: Any) -> Any:
    """The bytes that a row of `datasets` holds, else its path; other sources as they are."""
    if not isinstance(source, Mapping):
        return source
    return source.get("path") if source.get("bytes") is None else source["bytes"]


def is_url(source: Any) -> bool:
    """Whether reading `source` would download it: an http(s) address, or a row of `datasets` that holds only one."""
    return reading.is_url(held_source(source))


def download_limits(processor: Any, **call: Any) -> tuple[int, float]:
    """Most bytes and seconds of a download, by the options of a `call`, else by the processor."""
    limits = [call.get(name, getattr(processor.video_processor, name, default)) for name, default in LIMITS.items()]
    for name, limit in zip(LIMITS, limits, strict=True):
        check_amount(name, limit)
    return int(limits[0]), limits[1]


def download(url: str, max_bytes: int, max_seconds: float) -> BinaryIO:
    """Downloads into a temporary file, open at its beginning. Raises `ValueError`, also beyond the limits."""
    file: Any = tempfile.TemporaryFile()  # noqa: SIM115
    problems: list[Exception] = []

    def fetch() -> None:
        try:
            with httpx.stream("GET", url, follow_redirects=True, timeout=min(30.0, max_seconds)) as response:
                response.raise_for_status()
                for chunk in response.iter_bytes():
                    file.write(chunk)  # fails once the file is closed
                    if file.tell() > max_bytes:
                        raise ValueError(f"it is larger than max_download_bytes={max_bytes}")
        except Exception as error:  # handed to the thread that waits
            problems.append(error)

    # In a thread: a server that sends a byte a second keeps every timeout of one read from being reached.
    thread = threading.Thread(target=fetch, name="download_video", daemon=True)
    thread.start()
    thread.join(max_seconds)
    if thread.is_alive():
        problems.append(ValueError(f"it takes longer than max_download_seconds={max_seconds:g}"))
    if problems:
        file.close()
        raise ValueError(
            f"Cannot download {url!r}: {problems[0]}. Check the address, raise the limit, or pass a file."
        ) from problems[0]
    file.seek(0)
    return file


def open_source(video: Any, name: str, limits: tuple[int, float], files: contextlib.ExitStack) -> Any:
    """
    A video as an open `VideoFile`, or as decoded frames in one array. What is opened is closed with `files`.

    video: a path, http(s) address, bytes, open binary file, row `{"bytes": ..., "path": ...}` of `datasets`, torchcodec
    `VideoDecoder`, picture or list of pictures (files too), or array of frames. name: for messages. limits: of
    `download_limits`. Raises `ValueError` where it cannot be read.
    """

    def fetch(source: Any) -> Any:
        source = held_source(source)
        return files.enter_context(download(source, *limits)) if is_url(source) else source

    if hasattr(video, "shape"):
        return video
    if isinstance(video, Image.Image | list | tuple):
        pictures = list(video) if isinstance(video, list | tuple) else [video]
        if not pictures:
            raise ValueError(f"{name} has no frames. Pass at least one.")
        frames = [np.asarray(one if hasattr(one, "shape") else load_picture(fetch(one))) for one in pictures]
        if len(sizes := {frame.shape for frame in frames}) > 1:
            raise ValueError(f"{name} has frames of several sizes: {sorted(sizes)}. Resize them first.")
        return np.stack(frames)
    if hasattr(video, "get_frame_at"):
        return DecodedVideo(video)
    return files.enter_context(VideoFile(fetch(video)))


def decoded_frames(video: Any, given: Any, name: str, samples: bool) -> tuple[torch.Tensor, STTSVideoMetadata]:
    """Decoded frames as `(T, channels, height, width)`, and a copy of their metadata, which must fit them."""
    frames: Any = torch.from_numpy(np.ascontiguousarray(video)) if isinstance(video, np.ndarray) else video
    if frames.ndim != 4 or not frames.numel():
        raise ValueError(f"{name} must hold frames (T, height, width, 3), got shape {tuple(frames.shape)}.")
    if frames.is_floating_point() and not torch.isfinite(frames).all():
        raise ValueError(f"{name} has NaN or infinite pixel values. Clean the frames before passing them.")
    shown = STTSVideoMetadata(**{"total_num_frames": len(frames), **dict(given or {})})
    if shown.fps is not None and not 0 < shown.fps < math.inf:
        raise ValueError(f"The video_metadata of {name} has fps={shown.fps}. Pass a number above 0, or None.")
    if samples or shown.frames_indices is None:
        shown.frames_indices = list(range(shown.total_num_frames))
    counts = {"frames_indices": shown.frames_indices, "frame_times": shown.frame_times}
    wrong = {key: len(values) for key, values in counts.items() if values is not None and len(values) != len(frames)}
    if wrong:
        advice = "Pass one for each frame, and do_sample_frames=False if frames were sampled before."
        raise ValueError(f"{name} has {len(frames)} frames, but its video_metadata counts {wrong}. {advice}")
    layout = infer_channel_dimension_format(frames, num_channels=(1, 3, 4))
    return (frames.permute(0, 3, 1, 2).contiguous() if layout == ChannelDimension.LAST else frames), shown


def one_each(metadata: Any, num_videos: int) -> list[Any]:
    """The metadata of each video, `None` if there is none."""
    if metadata is None:
        return [None] * num_videos
    entries = metadata if isinstance(metadata, list) else [metadata]
    flat = [entry for item in entries for entry in (item if isinstance(item, list) else [item])]
    if len(flat) != num_videos:
        raise ValueError(f"video_metadata has {len(flat)} entries for {num_videos} videos. Pass one entry per video.")
    return flat


def open_picture(source: Any, processor: Any = None) -> Image.Image:
    """The picture at a path, in bytes, a file or, with `processor`, at an address; not decoded. Refuses EPS."""
    if isinstance(source, Image.Image):
        return source
    if processor is not None and is_url(source):
        with download(source, *download_limits(processor)) as file:
            source = file.read()
    picture = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
    if picture.format == "EPS":
        raise ValueError("A picture is an EPS file, for which PIL would start Ghostscript. Convert it to PNG.")
    return picture


def load_picture(source: Any) -> Image.Image:
    """A frame of a video, upright and in RGB: what `open_picture` takes, or base64."""
    is_encoded = isinstance(source, str) and not os.path.exists(source)
    return load_image(source if is_encoded else open_picture(source)).convert("RGB")


class DecodedVideo(VideoFile):
    """A torchcodec `VideoDecoder` in place of a file."""

    def __init__(self, decoder: Any):
        self._decoder, self.fps = decoder, decoder.metadata.average_fps
        self.times, self.duration = np.arange(len(decoder)) / self.fps, decoder.metadata.duration_seconds

    def close(self) -> None:
        """The decoder is the caller's."""

    def read(self, indices: Any, size: tuple[int, int], resizing: Any = None) -> tuple[torch.Tensor, STTSVideoMetadata]:
        metadata = self.describe(indices)
        metadata.video_backend = "torchcodec"
        pictures, times = [], []
        for index in metadata.frames_indices or []:
            frame = self._decoder.get_frame_at(index)
            picture = (frame.data if frame.data.shape[0] == 3 else frame.data.permute(2, 0, 1)).cpu()
            metadata.height, metadata.width = picture.shape[1:]
            pictures.append((resizing or reading.resize)(picture, size))
            times.append(frame.pts_seconds - self._decoder.metadata.begin_stream_seconds)
        metadata.frame_times = times
        return torch.stack(pictures), metadata
