"""Which frames of a video the model sees, and how files become the tensors native Molmo2 preprocesses."""

from transformers.utils.versions import require_version

# Before imports that fail without a reason in older versions.
require_version("transformers>=5.20", "Upgrade it with `pip install -U transformers`.")

import math
import os
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers.feature_extraction_utils import BatchFeature
from transformers.image_processing_utils import get_size_dict
from transformers.image_utils import (
    ChannelDimension,
    infer_channel_dimension_format,
    load_image,
    pil_torch_interpolation_mapping,
)
from transformers.models.molmo2.video_processing_molmo2 import Molmo2VideoProcessor, Molmo2VideoProcessorKwargs
from transformers.utils import logging
from transformers.video_utils import VideoMetadata, make_batched_videos

from .frame_times_stts import STTSVideoMetadata
from .settings_stts import check_pruning_ratio
from .video_reading_stts import VideoFile, resize

logger = logging.get_logger(__name__)

_PIXELS_AT_ONCE = 2**18  # a frame of 378 x 378: native preprocessing holds several float32 copies of what it gets
_MAX_SCALED_RATIO = 0.999  # test-time scaling then asks for 1000 times as many frames


class STTSVideoProcessorKwargs(Molmo2VideoProcessorKwargs, total=False):
    """
    max_fps (`int` or `float`, *optional*):
        Sampling rate in frames per second, as long as the video fits into `num_frames` at that rate. `None` always
        spreads `num_frames` over the whole video.
    test_time_scaling (`bool`, *optional*):
        Raise the frame budget to `ceil(num_frames / (1 - pruning_ratio))`, so that pruning leaves as many tokens as
        `num_frames` unpruned frames have.
    pruning_ratio (`float`, *optional*):
        Share of the video's tokens that the model will drop, which `test_time_scaling` makes up for. It prunes nothing
        here, so that a call may give it only with `test_time_scaling`.
    """

    max_fps: int | float | None  # type: ignore[misc]
    test_time_scaling: bool
    pruning_ratio: int | float


class STTSVideoProcessor(Molmo2VideoProcessor):
    """Molmo2's video processor with the paper's frame sampling and a reader that skips what is not shown.

    Samples at `max_fps` (2 per second) as long as `num_frames` (64) suffice, else `num_frames` evenly over the whole
    video; the last frame is always among them and no frame comes twice. `fps=` in a call samples the whole video at
    that rate, however many frames that gives. Further settings: `STTSVideoProcessorKwargs`; each works per call too.

    A video is a path, an `http(s)` URL, the bytes of a file, an open binary file, a row `{"bytes": ..., "path": ...}`
    of `datasets` (`Video(decode=False)`), a torchcodec `VideoDecoder`, a list of PIL images or of image files, or an
    array of decoded frames; a batch may mix them. Frames that come without `video_metadata` are taken for `max_fps`
    per second.

    Raises:
        ValueError: a setting is out of range.
    """

    do_convert_rgb = True
    do_resize = True
    do_rescale = True
    do_normalize = True
    test_time_scaling = False
    pruning_ratio = 0.5
    valid_kwargs = STTSVideoProcessorKwargs  # type: ignore[assignment]

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self._options({})

    def preprocess(self, videos: Any, **kwargs: Any) -> BatchFeature:
        """Reads, samples and preprocesses videos.

        Returns:
            `pixel_values_videos` `(F, N, pixels)`, F frames of all videos, `video_token_pooling` `(F * n, w^2)`,
            `video_grids` `(V, 3)` = `(T, rows, columns)`, and `video_metadata` if `return_metadata=True`.

        Raises:
            ValueError: a file cannot be read (see `VideoFile`), frames are missing, not finite or contradict their
                metadata, or a setting is out of range.
        """
        options = self._options(kwargs)
        videos = normalize_videos(videos)
        if isinstance(videos, list) and not videos:
            raise ValueError("videos is empty. Pass at least one video, or leave videos out.")
        videos = make_batched_videos(videos)
        metadata = one_each(options["video_metadata"], len(videos))
        reader = _Molmo2Reader(self, options)
        loaded = [
            reader.read(video, metadata[index], index, options["input_data_format"])
            for index, video in enumerate(videos)
        ]
        kwargs |= {"do_sample_frames": False, "input_data_format": ChannelDimension.FIRST}
        kwargs["video_metadata"] = [found for _, found in loaded]
        return super().preprocess([frames for frames, _ in loaded], **kwargs)

    def _preprocess(self, videos: list[torch.Tensor], return_tensors: Any = None, **kwargs: Any) -> BatchFeature:  # type: ignore[override]
        """Native preprocessing of a few frames at a time, so that only the result is as large as all frames."""
        pixel_values: Any = None
        pooling, grids, done = [], [], 0  # done: frames
        for video in videos:
            for frames in video.split(max(1, _PIXELS_AT_ONCE // (video.shape[-2] * video.shape[-1]))):
                part = super()._preprocess([frames], **kwargs)
                patches = part["pixel_values_videos"]  # (t, N, pixels)
                indices = part["video_token_pooling"]  # (t * n, w^2)
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
        """Which frames of a video file `preprocess` would show, without decoding any.

        Returns metadata with `frames_indices` and `frame_times`; where frames turn out to be damaged, fewer are shown.
        `kwargs` and errors as in `preprocess`.
        """
        reader = _Molmo2Reader(self, self._options(kwargs))
        with VideoFile(video) as file:
            return file.describe(reader.choose(file.describe(), file) if reader.samples else None)

    @property
    def block_grid(self) -> tuple[int, int]:
        """Rows and columns of blocks in a frame; a window over the border counts in full."""
        sides = zip((self.size["height"], self.size["width"]), self.pooling_size, strict=True)
        rows, columns = (math.ceil(side // self.patch_size / window) for side, window in sides)
        return rows, columns

    def sample_frames(self, metadata: VideoMetadata, **call: Any) -> np.ndarray:  # type: ignore[override]
        """Indices of the frames to show of an array with this metadata; what is not given comes from the settings."""
        call = {name: value for name, value in call.items() if value is not None}
        return self.sample_array(metadata, self._options(call)["limits"])

    def _options(self, call: dict[str, Any]) -> dict[str, Any]:
        """All settings, those of a call first, validated; `limits` is the frame budget and the rate they amount to."""
        given = {name for name, value in call.items() if value is not None}
        options = {name: call.get(name, getattr(self, name, None)) for name in self.valid_kwargs.__annotations__}
        num_frames, fps, max_fps = options["num_frames"], options["fps"], options["max_fps"]
        if {"fps", "num_frames"} <= given:
            raise ValueError(
                f"num_frames={num_frames} and fps={fps} exclude each other. Pass num_frames and max_fps for a rate "
                "with a budget."
            )
        if num_frames is not None:
            check_count("num_frames", num_frames)
        for name in ("max_fps", "fps"):
            if options[name] is not None:
                check_amount(name, options[name])
        ratio = check_pruning_ratio(options["pruning_ratio"])
        if "pruning_ratio" in given and not options["test_time_scaling"]:
            raise ValueError(
                f"pruning_ratio={ratio:g} has no effect on a processor without test_time_scaling. Pass it to the "
                "model's call or generate, which prune, or pass test_time_scaling=True too, for more frames."
            )
        if options["test_time_scaling"] and num_frames is not None:
            num_frames = frame_budget(num_frames, ratio)
        by_rate = fps is not None and "num_frames" not in given
        return options | {"limits": (None, fps) if by_rate else (num_frames, max_fps)}

    def sample_array(self, metadata: VideoMetadata, limits: tuple[int | None, float | None]) -> np.ndarray:
        if metadata.fps is None:
            metadata.fps = float(limits[1] or self.max_fps or 1)
            logger.warning_once(
                f"Frames came without `fps` and are taken for {metadata.fps:g} per second. Pass `video_metadata` for "
                "true timestamps."
            )
        return sample_indices(metadata.total_num_frames, metadata.fps, *limits)


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Raises `ValueError` unless `value` is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}.")


def check_amount(name: str, value: Any) -> None:
    """Raises `ValueError` for a rate, or an amount of bytes or seconds, that is none."""
    if isinstance(value, bool) or not (isinstance(value, int | float) and 0 < value < math.inf):
        raise ValueError(f"{name} must be a number above 0, got {value!r}.")


def frame_budget(num_frames: int, pruning_ratio: float) -> int:
    """Frames that cost as many tokens after pruning as `num_frames` cost without (paper, test-time scaling).

    Returns `ceil(num_frames / (1 - pruning_ratio))`: 92, 107, 128 for 64 frames at 30, 40, 50 %. Exact where floating
    point is not: 7 frames at 0.3 give 10.

    Raises:
        ValueError: `pruning_ratio` is outside `[0, 0.999]`; at 1 nothing is left to fill up.
    """
    ratio = check_pruning_ratio(pruning_ratio)
    if ratio > _MAX_SCALED_RATIO:
        raise ValueError(
            f"test_time_scaling=True needs pruning_ratio of at most {_MAX_SCALED_RATIO}, got {ratio!r}: so few video "
            "tokens are kept that no sensible number of frames makes up for it. Lower pruning_ratio or set "
            "test_time_scaling=False."
        )
    return math.ceil(num_frames / (1 - Fraction(ratio).limit_denominator(1_000_000)))


def sample_indices(total: int, fps: float, num_frames: int | None, rate: float | None) -> np.ndarray:
    """`sample_times` for `total` frames that are decoded already, `fps` of them per second: indices, none twice.

    As the reference does for arrays, the end is the last frame itself rather than the moment it leaves the screen.
    """
    if num_frames == 1:
        return np.array([total - 1])
    if total <= 2:
        return np.arange(total)
    if num_frames is not None and (rate is None or (num_frames - 1) / rate < total / fps):
        return np.linspace(0, total - 1, num=min(num_frames, total)).astype(int)
    if rate is None:
        raise ValueError("Sampling needs num_frames, max_fps or fps, all of them are None. Set num_frames.")
    step = max(1.0, fps / rate)  # smaller ones would only ask for frames again
    return np.unique(np.append(np.round(np.arange(0.0, total - 1, step)), total - 1).astype(int))


def from_molmo2(video_processor: Molmo2VideoProcessor) -> STTSVideoProcessor:
    """A video processor with the settings of a stock one, and the paper's sampling: the last frame is always shown."""
    settings = video_processor.to_dict()
    for name in ("video_processor_type", "processor_class", "auto_map"):
        settings.pop(name, None)
    return STTSVideoProcessor(**settings)


class FrameReader:
    """
    The frames to show of a video in any form, as a processor wants them: one way for files, torchcodec decoders,
    pictures and arrays of frames.

    samples: whether frames are chosen, or all are shown.
    """

    samples = True

    def choose(self, metadata: STTSVideoMetadata, file: VideoFile | None = None) -> list[int]:
        """Indices of the frames to show, of a `file` or of frames that are decoded already."""
        raise NotImplementedError

    def size(self, num_frames: int, measure: Callable[[], tuple[int, int]]) -> tuple[int, int]:
        """Height and width of so many frames; `measure` gives those that they have, for one decoded frame."""
        raise NotImplementedError

    def resize(self, picture: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        """A picture, uint8 (3, height, width), in another size."""
        raise NotImplementedError

    def read(self, video: Any, metadata: Any, index: int, layout: Any = None) -> tuple[torch.Tensor, STTSVideoMetadata]:
        """
        Frames `(T, 3, height, width)` and what is shown. Those of files are resized as each is decoded, so that memory
        does not grow with a video's resolution. `index` of the video, for messages. layout: of an array.
        """
        source = getattr(video, "source", video)
        if hasattr(source, "get_frame_at"):
            return self._read_decoder(source)
        if isinstance(video, str):
            with VideoFile(source) as file:
                shown = file.describe()
                chosen = self.choose(shown, file) if self.samples else shown.frames_indices or []
                return file.read(chosen, self.size(len(chosen), lambda: file.measure(chosen)), self.resize)
        if isinstance(video, Image.Image):
            video = [video]
        if isinstance(video, list | tuple) and video and all(hasattr(frame, "shape") for frame in video):
            _check_sizes({tuple(frame.shape) for frame in video})
            video = np.stack(video) if isinstance(video[0], np.ndarray) else torch.stack(list(video))
        elif isinstance(video, list | tuple):
            if not video:
                raise ValueError(f"videos[{index}] has no frames. Pass at least one.")
            video, layout = load_pictures(video), ChannelDimension.LAST
        frames = frames_tensor(video, index, layout)
        shown = checked_metadata(metadata, len(frames), index, self.samples)
        if self.samples:
            chosen = self.choose(shown)
            frames = frames[chosen]
            shown.choose(chosen)
        return frames, shown

    def _read_decoder(self, decoder: Any) -> tuple[torch.Tensor, STTSVideoMetadata]:
        """The same of a torchcodec `VideoDecoder`, which counts frames."""
        about, times = decoder.metadata, []
        shown = STTSVideoMetadata(len(decoder), about.average_fps, duration=about.duration_seconds)
        shown.video_backend = "torchcodec"
        shown.frames_indices = self.choose(shown) if self.samples else list(range(len(decoder)))
        pictures: Any = []
        for index in shown.frames_indices:
            frame = decoder.get_frame_at(index)
            picture = (frame.data if frame.data.shape[0] == 3 else frame.data.permute(2, 0, 1)).cpu()
            shown.height, shown.width = measured = picture.shape[1:]
            pictures.append(self.resize(picture, self.size(len(shown.frames_indices), lambda: measured)))  # noqa: B023
            times.append(frame.pts_seconds - about.begin_stream_seconds)
        shown.frame_times = times
        return torch.stack(pictures), shown


class _Molmo2Reader(FrameReader):
    """Frames in the model's size; those that are decoded already keep theirs, which native preprocessing changes."""

    def __init__(self, processor: STTSVideoProcessor, options: dict[str, Any]):
        self.processor, self.options, self.samples = processor, options, bool(options["do_sample_frames"])

    def choose(self, metadata: STTSVideoMetadata, file: VideoFile | None = None) -> list[int]:
        limits = self.options["limits"]
        return file.sample(*limits) if file else self.processor.sample_array(metadata, limits).tolist()

    def size(self, num_frames: int, measure: Callable[[], tuple[int, int]]) -> tuple[int, int]:
        size = self.options["size"]
        if not hasattr(size, "get"):  # a number or a pair
            size = get_size_dict(size, default_to_square=self.options["default_to_square"])
        if size.get("height") is None or size.get("width") is None:
            raise ValueError(f"size must have 'height' and 'width', got {size!r}.")
        return size["height"], size["width"]

    def resize(self, picture: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        resample = self.options["resample"]
        return resize(picture, size, pil_torch_interpolation_mapping.get(resample, resample))


class SourceName(str):
    """Passes for a path, the only form in which transformers lets a file through; `source` is what to read."""

    source: Any = None


def normalize_videos(videos: Any, name: str = "videos") -> Any:
    """The same videos in the forms transformers knows: whatever holds a file as a string, images as RGB.

    Raises:
        ValueError: the images of one video differ in size, or something is no video.
    """
    if isinstance(videos, os.PathLike):
        return os.fspath(videos)
    if isinstance(videos, Image.Image):
        return videos.convert("RGB")
    is_held = isinstance(videos, bytes | bytearray | memoryview | Mapping) or hasattr(videos, "read")
    if is_held or hasattr(videos, "get_frame_at"):  # a torchcodec decoder, known by what it can do
        held = SourceName(f"<{type(videos).__name__}>")
        held.source = videos
        return held
    if isinstance(videos, list | tuple):
        _check_sizes({(image.height, image.width) for image in videos if isinstance(image, Image.Image)})
        return [normalize_videos(video, f"{name}[{index}]") for index, video in enumerate(videos)]
    if not isinstance(videos, str) and not hasattr(videos, "shape"):
        raise ValueError(f"{name} is {videos!r:.80}. Pass a path, a URL, bytes, an open file or the frames of a video.")
    if not isinstance(videos, str) and len(videos.shape) < 3:
        raise ValueError(f"{name} must hold frames (T, height, width, 3), got shape {tuple(videos.shape)}.")
    return videos


def open_picture(source: Any) -> Image.Image:
    """The picture in a file, a path or an open one; not decoded. Raises `ValueError` for an EPS drawing."""
    picture = Image.open(source)
    if picture.format == "EPS":
        raise ValueError(
            "A picture is an EPS file, which PIL would have another program (Ghostscript) draw. Convert it to PNG."
        )
    return picture


def load_pictures(sources: Sequence[Any]) -> np.ndarray:
    """The frames (T, height, width, 3) of a video of pictures: PIL images, paths, URLs or open files."""
    pictures = []
    for source in sources:
        source = getattr(source, "source", source)
        is_file = hasattr(source, "read") or (isinstance(source, str) and os.path.exists(source))
        pictures.append(load_image(open_picture(source) if is_file else source).convert("RGB"))
    _check_sizes({(picture.height, picture.width) for picture in pictures})
    return np.stack([np.asarray(picture) for picture in pictures])


def _check_sizes(sizes: set[tuple[int, ...]]) -> None:
    if len(sizes) > 1:
        raise ValueError(f"The frames of one video must have one size, got {sorted(sizes)}. Resize them first.")


def one_each(metadata: Any, num_videos: int) -> list[Any]:
    if metadata is None:
        return [None] * num_videos
    if isinstance(metadata, dict | VideoMetadata):
        metadata = [metadata]
    flat = [entry for item in metadata for entry in (item if isinstance(item, list) else [item])]
    if len(flat) != num_videos:
        raise ValueError(f"video_metadata has {len(flat)} entries for {num_videos} videos. Pass one entry per video.")
    return flat


def frames_tensor(video: Any, index: int, layout: Any) -> torch.Tensor:
    """Decoded frames as a tensor `(T, channels, height, width)`, checked."""
    frames: Any = torch.from_numpy(np.ascontiguousarray(video)) if isinstance(video, np.ndarray) else video
    if frames.ndim != 4 or 0 in frames.shape:
        raise ValueError(f"videos[{index}] must hold frames (T, height, width, 3), got shape {tuple(frames.shape)}.")
    if frames.is_floating_point() and not torch.isfinite(frames).all():
        raise ValueError(f"videos[{index}] has NaN or infinite pixel values. Clean the frames before passing them.")
    layout = layout or infer_channel_dimension_format(frames, num_channels=(1, 3, 4))
    return frames.permute(0, 3, 1, 2).contiguous() if layout == ChannelDimension.LAST else frames


def checked_metadata(metadata: Any, num_frames: int, index: int, sample: bool) -> STTSVideoMetadata:
    """A copy of the metadata of a decoded video that fits its `num_frames` frames."""
    given: dict[str, Any] = {"total_num_frames": num_frames, **dict(metadata or {})}
    metadata = STTSVideoMetadata(**given)
    if metadata.fps is not None and not 0 < metadata.fps < math.inf:
        raise ValueError(f"video_metadata[{index}] has fps={metadata.fps}. Pass frames per second above 0, or None.")
    by_indices = not sample and metadata.frames_indices is not None
    counted = len(metadata.frames_indices) if by_indices else metadata.total_num_frames
    if counted != num_frames:
        name = "frames_indices" if by_indices else "total_num_frames"
        raise ValueError(
            f"videos[{index}] has {num_frames} frames, its video_metadata {counted} by {name}. If frames were sampled "
            "before, pass do_sample_frames=False and frames_indices, one for each frame."
        )
    if metadata.frame_times is not None and len(metadata.frame_times) != num_frames:
        raise ValueError(
            f"videos[{index}] has {num_frames} frames, its video_metadata {len(metadata.frame_times)} frame_times. "
            "Pass one for each frame, in seconds, or none."
        )
    if not by_indices:
        metadata.frames_indices = list(range(num_frames))
    return metadata


STTSVideoProcessor.register_for_auto_class("AutoVideoProcessor")
