"""Which frames of a video the model sees, and how files become the tensors native Molmo2 preprocesses."""

import math
import os
import threading
from typing import Any

import numpy as np
import torch
from huggingface_hub.utils import httpx
from PIL import Image
from transformers.feature_extraction_utils import BatchFeature
from transformers.image_processing_utils import get_size_dict
from transformers.image_utils import ChannelDimension, SizeDict, infer_channel_dimension_format, load_image
from transformers.models.molmo2.video_processing_molmo2 import Molmo2VideoProcessor, Molmo2VideoProcessorKwargs
from transformers.utils import logging
from transformers.video_utils import VideoMetadata, make_batched_videos

from .frame_sampling_stts import check_ratio, frame_budget, sample_indices, sample_times
from .video_decoding_stts import STTSVideoMetadata, decode_video, probe_video

logger = logging.get_logger(__name__)

_PIXELS_AT_ONCE = 2**18  # a frame of 378 x 378: native preprocessing holds several float32 copies of what it gets


class STTSVideoProcessorKwargs(Molmo2VideoProcessorKwargs, total=False):
    """
    max_fps (`int` or `float`, *optional*):
        Sampling rate in frames per second, as long as the video fits into `num_frames` at that rate. `None` always
        spreads `num_frames` over the whole video.
    test_time_scaling (`bool`, *optional*):
        Raise the frame budget to `ceil(num_frames / (1 - pruning_ratio))`, so that pruning leaves as many tokens as
        `num_frames` unpruned frames have.
    pruning_ratio (`float`, *optional*):
        Share of the video's tokens that the model will drop. Only used with `test_time_scaling`.
    video_decoder (`str`, *optional*):
        What decodes files: `"pyav"`, `"torchcodec"`, or `"auto"` for torchcodec where it is installed.
    """

    max_fps: int | float | None  # type: ignore[misc]
    test_time_scaling: bool
    pruning_ratio: int | float
    video_decoder: str


class STTSVideoProcessor(Molmo2VideoProcessor):
    """Molmo2's video processor with the paper's frame sampling and a decoder that skips what is not shown.

    Samples at `max_fps` (2 per second) as long as `num_frames` (64) suffice, else `num_frames` evenly over the whole
    video; the last frame is always among them and no frame comes twice. `fps=` in a call samples the whole video at
    that rate, however many frames that gives. Further settings: `STTSVideoProcessorKwargs`; each works per call too.

    Videos are paths, `http(s)` URLs, the bytes of files, lists of PIL images or of image files, and arrays of decoded
    frames, mixed freely.
    Frames that come without `video_metadata` are taken for `max_fps` per second.

    Raises:
        ValueError: a setting is out of range.
    """

    do_convert_rgb = True
    do_resize = True
    do_rescale = True
    do_normalize = True
    test_time_scaling = False
    pruning_ratio = 0.5
    video_decoder = "auto"
    valid_kwargs = STTSVideoProcessorKwargs  # type: ignore[assignment]

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self._sampling_limits({})

    def preprocess(self, videos: Any, **kwargs: Any) -> BatchFeature:
        """Decodes, samples and preprocesses videos.

        Returns:
            `pixel_values_videos` `(F, N, pixels)`, F frames of all videos, `video_token_pooling` `(F * n, w^2)`,
            `video_grids` `(V, 3)` = `(T, rows, columns)`, and `video_metadata` if `return_metadata=True`.

        Raises:
            ValueError: a file cannot be read (see `decode_video`), frames are missing, not finite or contradict their
                metadata, or a setting is out of range.
        """
        limits = self._sampling_limits(kwargs)
        options = {name: kwargs.get(name, getattr(self, name, None)) for name in self.valid_kwargs.__annotations__}
        if isinstance(videos, list | tuple) and not videos:
            raise ValueError("videos is empty. Pass at least one video, or leave videos out.")
        videos = make_batched_videos(normalize_videos(videos))
        metadata = _one_each(options["video_metadata"], len(videos))
        loaded = [self._load(video, metadata[index], index, options, limits) for index, video in enumerate(videos)]
        return super().preprocess(
            [frames for frames, _ in loaded],
            **(
                kwargs
                | {
                    "video_metadata": [found for _, found in loaded],
                    "do_sample_frames": False,
                    "input_data_format": ChannelDimension.FIRST,
                }
            ),
        )

    def _preprocess(self, videos: list[torch.Tensor], return_tensors: Any = None, **kwargs: Any) -> BatchFeature:  # type: ignore[override]
        """Native preprocessing of a few frames at a time, so that only the result is as large as all frames."""
        pixel_values: Any = None
        pooling, grids, done = [], [], 0  # done: frames
        for video in videos:
            for frames in video.split(max(1, _PIXELS_AT_ONCE // (video.shape[-2] * video.shape[-1]))):
                part = super()._preprocess([frames], **kwargs)
                patches, indices = (
                    part["pixel_values_videos"],
                    part["video_token_pooling"],
                )  # (t, N, pixels), (t * n, w^2)
                if pixel_values is None:
                    pixel_values = patches.new_empty((sum(map(len, videos)), *patches.shape[1:]))
                pixel_values[done : done + len(frames)] = patches
                pooling.append(torch.where(indices >= 0, indices + done * patches.shape[1], indices))
                done += len(frames)
            grids.append(torch.tensor([len(video), *part["video_grids"][0, 1:].tolist()]))
        data = {
            "pixel_values_videos": pixel_values,
            "video_token_pooling": torch.cat(pooling),
            "video_grids": torch.stack(grids),
        }
        return BatchFeature(data, tensor_type=return_tensors)

    def probe(self, video: Any, **kwargs: Any) -> STTSVideoMetadata:
        """Which frames of a video file (a path, a URL or bytes) `preprocess` would show, without decoding any.

        Returns metadata with `frames_indices` and `frame_times`; where frames turn out to be damaged, fewer are shown.
        `kwargs` and errors as in `preprocess`.
        """
        limits = self._sampling_limits(kwargs)
        sample = kwargs.get("do_sample_frames", self.do_sample_frames)
        return probe_video(
            _source(normalize_videos(video)), (lambda found: sample_times(found.duration, *limits)) if sample else None
        )

    def sample_frames(
        self,
        metadata: VideoMetadata,
        num_frames: int | None = None,
        fps: int | float | None = None,
        max_fps: int | float | None = None,
        **kwargs: Any,
    ) -> np.ndarray:
        """Indices of the frames to show of an array with this metadata; what is not given comes from the settings."""
        call = {"num_frames": num_frames, "fps": fps, "max_fps": max_fps} | kwargs
        given = {name: value for name, value in call.items() if value is not None}
        return self._sample_array(metadata, self._sampling_limits(given))

    def _sampling_limits(self, call: dict[str, Any]) -> tuple[int | None, float | None]:
        """Frame budget and rate that the arguments of a call and the settings amount to, validated."""
        given = {name for name, value in call.items() if value is not None}
        if {"fps", "num_frames"} <= given:
            raise ValueError(
                f"num_frames={call['num_frames']} and fps={call['fps']} exclude each other. Pass num_frames and "
                "max_fps for a rate with a budget."
            )
        names = ("num_frames", "fps", "max_fps", "test_time_scaling", "pruning_ratio")
        settings: dict[str, Any] = {name: call.get(name, getattr(self, name, None)) for name in names}
        num_frames, fps, max_fps = settings["num_frames"], settings["fps"], settings["max_fps"]
        if num_frames is not None and (not isinstance(num_frames, int) or num_frames < 1):
            raise ValueError(f"num_frames must be a whole number of at least 1, got {num_frames!r}.")
        for name, rate in (("max_fps", max_fps), ("fps", fps)):
            if rate is not None and not (isinstance(rate, int | float) and 0 < rate < math.inf):
                raise ValueError(f"{name} must be a number of frames per second above 0, got {rate!r}.")
        check_ratio(settings["pruning_ratio"])
        if settings["test_time_scaling"] and num_frames is not None:
            num_frames = frame_budget(num_frames, settings["pruning_ratio"])
        if fps is not None and "num_frames" not in given:
            return None, fps
        return num_frames, max_fps

    def _sample_array(self, metadata: VideoMetadata, limits: tuple[int | None, float | None]) -> np.ndarray:
        if metadata.fps is None:
            metadata.fps = float(limits[1] or self.max_fps or 1)
            logger.warning_once(
                f"Frames came without `fps` and are taken for {metadata.fps:g} per second. Pass `video_metadata` for "
                "true timestamps."
            )
        return sample_indices(metadata.total_num_frames, metadata.fps, *limits)

    def _load(
        self, video: Any, metadata: Any, index: int, options: dict[str, Any], limits: tuple[int | None, float | None]
    ) -> tuple[torch.Tensor, VideoMetadata]:
        """The frames to show `(T, 3, height, width)` and their metadata."""
        sample = options["do_sample_frames"]
        if isinstance(video, str):
            shown = _Frames()
            moments = (lambda found: shown.expect(sample_times(found.duration, *limits))) if sample else None
            places, found = decode_video(
                _source(video),
                moments,
                lambda frame: shown.add(self._resized(frame, options)),
                options["video_decoder"],
            )
            return shown.in_order(places), found
        if isinstance(video, list | tuple):  # paths or URLs of images
            pictures = [load_image(picture).convert("RGB") for picture in video]
            _check_sizes({(picture.height, picture.width) for picture in pictures})
            video = np.stack([np.asarray(picture) for picture in pictures])
            frames = _frames_tensor(video, index, ChannelDimension.LAST)
        else:
            frames = _frames_tensor(video, index, options["input_data_format"])
        metadata = _checked_metadata(metadata, len(frames), index, bool(sample))
        if sample:
            chosen = self._sample_array(metadata, limits)
            frames = frames[torch.from_numpy(chosen)]
            metadata.frames_indices = chosen.tolist()
            if metadata.frame_times is not None:
                metadata.frame_times = [metadata.frame_times[position] for position in chosen]
        return frames, metadata

    def _resized(self, frame: np.ndarray, options: dict[str, Any]) -> torch.Tensor:
        """One decoded frame as `(3, height, width)` in the model's size, so that memory does not grow with resolution.

        The same steps as native preprocessing, which then finds nothing left to resize.
        """
        size = options["size"]
        if not isinstance(size, SizeDict):
            size = SizeDict(**get_size_dict(size=size, default_to_square=options["default_to_square"]))
        image = torch.from_numpy(frame).permute(2, 0, 1)
        if options["device"] is not None:
            image = image.to(options["device"])
        # One colour at a time: a 4K frame takes 100 MB in float32.
        colours = [
            self.resize(colour.float(), size=size, resample=options["resample"], antialias=False)
            for colour in image.split(1)
        ]
        return torch.cat(colours).round().clamp(0, 255).to(torch.uint8)


class _Frames:
    """
    Frames of one video, each copied into its place as it comes. One tensor from the beginning: small ones would lie
    among what the decoder frees, and keep all of that from going back to the system.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._frames: Any = None
        self._expected, self._count = 64, 0

    def expect(self, moments: Any) -> Any:
        """Makes room for one frame per moment; returns the moments."""
        self._expected = max(1, len(moments))
        return moments

    def add(self, frame: torch.Tensor) -> int:
        """Copies a frame `(3, height, width)`; several threads may at once. Returns its place."""
        with self._lock:
            if self._frames is None:
                self._frames = frame.new_empty(self._expected, *frame.shape)
            elif self._count == len(self._frames):
                self._frames = torch.cat([self._frames, torch.empty_like(self._frames)])
            self._frames[self._count] = frame
            self._count += 1
            return self._count - 1

    def in_order(self, places: list[int]) -> torch.Tensor:
        """The frames at these places, `(T, 3, height, width)`."""
        return self._frames[: len(places)] if places == list(range(len(places))) else self._frames[places]


def from_molmo2(video_processor: Molmo2VideoProcessor) -> STTSVideoProcessor:
    """A video processor with the settings of a stock one, and the paper's sampling: the last frame is always shown."""
    settings = video_processor.to_dict()
    for name in ("video_processor_type", "processor_class", "auto_map"):
        settings.pop(name, None)
    return STTSVideoProcessor(**settings)


def normalize_videos(videos: Any) -> Any:
    """The same videos in the forms transformers knows: path objects and files in memory as strings, images as RGB.

    Raises:
        ValueError: the images of one video differ in size.
    """
    if isinstance(videos, os.PathLike):
        return os.fspath(videos)
    if isinstance(videos, bytes | bytearray | memoryview):
        return _VideoBytes(videos)
    if isinstance(videos, Image.Image):
        return videos.convert("RGB")
    if not isinstance(videos, list | tuple):
        return videos
    _check_sizes({(image.height, image.width) for image in videos if isinstance(image, Image.Image)})
    return [normalize_videos(video) for video in videos]


class _VideoBytes(str):
    """A video file in memory that passes for a path, the only form in which transformers lets a file through."""

    data: bytes | bytearray | memoryview

    def __new__(cls, data: bytes | bytearray | memoryview) -> "_VideoBytes":
        instance = super().__new__(cls, "<bytes of a video>")
        instance.data = data
        return instance


def _source(video: str) -> Any:
    """What to decode: a path, or the bytes of a file."""
    if isinstance(video, _VideoBytes):
        return video.data
    return _download(video) if video.startswith(("http://", "https://")) else video


def _check_sizes(sizes: set[tuple[int, ...]]) -> None:
    if len(sizes) > 1:
        raise ValueError(
            f"The frames of one video must have one size, got (height, width) {sorted(sizes)}. Resize them first."
        )


def _one_each(metadata: Any, num_videos: int) -> list[Any]:
    if metadata is None:
        return [None] * num_videos
    if isinstance(metadata, dict | VideoMetadata):
        metadata = [metadata]
    flat = [entry for item in metadata for entry in (item if isinstance(item, list) else [item])]
    if len(flat) != num_videos:
        raise ValueError(f"video_metadata has {len(flat)} entries for {num_videos} videos. Pass one entry per video.")
    return flat


def _frames_tensor(video: Any, index: int, layout: Any) -> torch.Tensor:
    """Decoded frames as a tensor `(T, channels, height, width)`, checked."""
    frames: Any = torch.from_numpy(np.ascontiguousarray(video)) if isinstance(video, np.ndarray) else video
    if frames.ndim != 4 or 0 in frames.shape:
        raise ValueError(f"videos[{index}] must hold frames (T, height, width, 3), got shape {tuple(frames.shape)}.")
    if frames.is_floating_point() and not torch.isfinite(frames).all():
        raise ValueError(f"videos[{index}] has NaN or infinite pixel values. Clean the frames before passing them.")
    layout = layout or infer_channel_dimension_format(frames, num_channels=(1, 3, 4))
    return frames.permute(0, 3, 1, 2).contiguous() if layout == ChannelDimension.LAST else frames


def _checked_metadata(metadata: Any, num_frames: int, index: int, sample: bool) -> STTSVideoMetadata:
    """A copy of the metadata of a decoded video that fits its `num_frames` frames."""
    metadata = {"total_num_frames": num_frames} | dict(metadata or {})
    metadata = STTSVideoMetadata(**metadata)
    total, indices = metadata.total_num_frames, metadata.frames_indices
    if metadata.fps is not None and not 0 < metadata.fps < math.inf:
        raise ValueError(f"video_metadata[{index}] has fps={metadata.fps}. Pass frames per second above 0, or None.")
    if sample and total != num_frames:
        raise ValueError(
            f"videos[{index}] has {num_frames} frames, its video_metadata total_num_frames={total}. If the frames were "
            "sampled before, pass do_sample_frames=False."
        )
    if not sample and indices is None and total != num_frames:
        raise ValueError(
            f"videos[{index}] has {num_frames} of total_num_frames={total} frames, but its video_metadata does not say "
            "which. Pass frames_indices."
        )
    if not sample and indices is not None and len(indices) != num_frames:
        raise ValueError(
            f"videos[{index}] has {num_frames} frames, its video_metadata {len(indices)} frames_indices. Pass one each."
        )
    if indices is None or sample:
        metadata.frames_indices = list(range(num_frames))
    return metadata


def _download(url: str) -> bytes:
    try:
        response = httpx.get(url, follow_redirects=True)
        response.raise_for_status()
    except httpx.HTTPError as error:
        raise ValueError(
            f"Cannot download the video {url!r}: {error}. Check the address, or pass a local file."
        ) from error
    return response.content


STTSVideoProcessor.register_for_auto_class("AutoVideoProcessor")
