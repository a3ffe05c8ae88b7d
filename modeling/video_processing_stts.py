"""Which frames of a video the model sees, and how files become the tensors native Molmo2 preprocesses."""

from transformers.utils.versions import require_version

# Before imports that fail without a reason in older versions.
require_version("transformers>=5.20", "Upgrade it with `pip install -U transformers`.")

import functools
import math
from collections.abc import Callable
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
from transformers.video_utils import VideoMetadata, is_valid_video_frame, make_batched_videos

from .settings_stts import check_pruning_ratio
from .video_reading_stts import STTSVideoMetadata, VideoFile, resize

logger = logging.get_logger(__name__)

_PIXELS_AT_ONCE = 2**18  # a frame of 378 x 378: native preprocessing holds several float32 copies of its input
_TOLERANCE = 1e-6  # seconds: a moment that rounding put just before a frame's time still means that frame


class STTSVideoProcessorKwargs(Molmo2VideoProcessorKwargs, total=False):
    """
    max_fps (`int` or `float`, *optional*):
        Frames per second, as long as the video fits into `num_frames` at that rate. `None` spreads `num_frames` evenly.
    test_time_scaling (`bool`, *optional*):
        Raise `num_frames` so that pruning leaves as many tokens as `num_frames` unpruned frames have.
    pruning_ratio (`float`, *optional*):
        Share of tokens that the model will drop, which `test_time_scaling` makes up for. It prunes nothing here.
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
    of `datasets` (`Video(decode=False)`), a list of PIL images or of image files, or an array of decoded frames; a
    batch may mix them. Frames that come without `video_metadata` are taken for `max_fps` per second.

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
        self.frame_limits()

    def preprocess(self, videos: Any, **kwargs: Any) -> BatchFeature:
        """Reads, samples and preprocesses videos.

        Returns:
            `pixel_values_videos` `(F, N, pixels)`, F frames of all videos, `video_token_pooling` `(F * n, w^2)`,
            `video_grids` `(V, 3)` = `(T, rows, columns)`, and `video_metadata` if `return_metadata=True`.

        Raises:
            ValueError: a file cannot be read (see `VideoFile`), frames are missing, not finite or contradict their
                metadata, or a setting is out of range.
        """
        options: dict[str, Any] = {
            name: kwargs.get(name, getattr(self, name, None)) for name in self.valid_kwargs.__annotations__
        }
        limits = self.frame_limits(**kwargs)
        size: Any = get_size_dict(options["size"], default_to_square=options["default_to_square"])
        if not (size.get("height") and size.get("width")):
            raise ValueError(f"size must have 'height' and 'width', got {size!r}.")
        resample = pil_torch_interpolation_mapping.get(options["resample"], options["resample"])
        videos = as_sources(videos)
        if isinstance(videos, list) and not videos:
            raise ValueError("videos is empty. Pass at least one video, or leave videos out.")
        videos = make_batched_videos(videos)
        read = []
        for index, given in enumerate(one_each(options["video_metadata"], len(videos))):
            video, layout = videos[index], options["input_data_format"]
            if isinstance(video, str):
                with open_video(video) as file:
                    shown = sample_times(file.times, file.duration, *limits) if options["do_sample_frames"] else None
                    resizing = functools.partial(resize, interpolation=resample)
                    read.append(file.read(shown, (size["height"], size["width"]), resizing))
                continue
            if isinstance(video, list):
                video, layout = np.stack([np.asarray(load_image(picture)) for picture in video]), ChannelDimension.LAST
            choose = functools.partial(self._sample, limits=limits) if options["do_sample_frames"] else None
            read.append(decoded_frames(video, given, f"videos[{index}]", layout, choose))
        kwargs |= {"do_sample_frames": False, "input_data_format": ChannelDimension.FIRST}
        kwargs["video_metadata"] = [shown for _, shown in read]
        return super().preprocess([frames for frames, _ in read], **kwargs)

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

    def sample_frames(self, metadata: VideoMetadata, **call: Any) -> np.ndarray:  # type: ignore[override]
        """Indices of the frames to show of decoded frames with this metadata; settings as in `frame_limits`."""
        given = {name: value for name, value in call.items() if value is not None}
        return np.array(self._sample(metadata, self.frame_limits(**given)))

    def _sample(self, metadata: VideoMetadata, limits: tuple[int | None, float | None]) -> list[int]:
        if metadata.fps is None:
            metadata.fps = float(limits[1] or self.max_fps or 1)
            logger.warning_once(f"Frames came without `fps`: {metadata.fps:g} is used. Pass `video_metadata` with it.")
        return sample_indices(metadata.total_num_frames, metadata.fps, *limits).tolist()

    def frame_limits(self, **call: Any) -> tuple[int | None, float | None]:
        """The most frames to show of a video and its frames per second, by the settings, those of a call first."""
        names = ("num_frames", "fps", "max_fps", "test_time_scaling", "pruning_ratio")
        settings: list[Any] = [call.get(name, getattr(self, name, None)) for name in names]
        num_frames, fps, max_fps, scales, ratio = settings
        given = {name for name, value in call.items() if value is not None}
        if {"fps", "num_frames"} <= given:
            raise ValueError(f"num_frames={num_frames} and fps={fps} exclude each other. Pass num_frames and max_fps.")
        if num_frames is not None:
            check_count("num_frames", num_frames)
        for name, value in (("max_fps", max_fps), ("fps", fps)):
            if value is not None:
                check_amount(name, value)
        if "pruning_ratio" in given and not scales:
            raise ValueError(
                f"pruning_ratio={ratio!r} has no effect on a processor without test_time_scaling. Pass it to the "
                "model's call or generate, which prune, or pass test_time_scaling=True too, for more frames."
            )
        if scales and num_frames is not None:
            num_frames = frame_budget(num_frames, ratio)
        return (None, fps) if fps is not None and "num_frames" not in given else (num_frames, max_fps)


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Raises `ValueError` unless `value` is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}.")


def check_amount(name: str, value: Any) -> None:
    """Raises `ValueError` unless `value` is a finite number above 0."""
    if isinstance(value, bool) or not (isinstance(value, int | float) and 0 < value < math.inf):
        raise ValueError(f"{name} must be a number above 0, got {value!r}.")


def frame_budget(num_frames: int, pruning_ratio: float) -> int:
    """Frames that cost as many tokens after pruning as `num_frames` cost without: `ceil(num_frames / (1 - ratio))`.

    92, 107, 128 for 64 frames at 30, 40, 50 %; exact where floating point is not. Raises `ValueError` outside
    `[0, 0.999]`, which asks for 1000 times as many frames.
    """
    ratio = check_pruning_ratio(pruning_ratio)
    if ratio > 0.999:
        raise ValueError(
            f"test_time_scaling=True needs pruning_ratio of at most 0.999, got {ratio!r}. Lower it, or set "
            "test_time_scaling=False."
        )
    return math.ceil(num_frames / (1 - Fraction(ratio).limit_denominator(1_000_000)))


def sample_times(times: np.ndarray, duration: float, num_frames: int | None, rate: float | None) -> list[int]:
    """Which frames to show, as the reference samples (Molmo2's `uniform_last_frame`): the last is always among them.

    Returns ascending indices, none twice, of the frames on screen at `0, 1/rate, 2/rate, ... (< duration), duration`
    where `num_frames` suffices, else at `num_frames` evenly spaced moments including both ends. One is the last frame.

    times: when each frame is shown, float64 `(T,)`, ascending seconds from 0; the last stays until `duration`.
    """
    if num_frames == 1:
        return [len(times) - 1]
    if num_frames is not None and (rate is None or (num_frames - 1) / rate < duration):
        step = duration / (num_frames - 1)
    elif rate is not None:
        step = min(1 / rate, duration)
    else:
        raise ValueError("Sampling needs num_frames, max_fps or fps, all of them are None. Set num_frames.")
    # Worked out per frame, not per moment: fps=1e6 asks for billions of moments, and shows each frame once.
    moments = np.ceil((times - _TOLERANCE) / step) * step  # the first that each frame is there for
    shown = moments + _TOLERANCE < np.append(times[1:], np.inf)
    shown[-1] = True
    return np.flatnonzero(shown).tolist()


def sample_indices(total: int, fps: float, num_frames: int | None, rate: float | None) -> np.ndarray:
    """`sample_times` for `total` decoded frames, `fps` per second.

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


class Source(str):
    """Passes for a path, the only form in which transformers lets a file through; `held` is what to read."""

    held: Any = None


def as_sources(videos: Any) -> Any:
    """The same videos in forms that transformers knows: anything that may hold a file as a `Source`, images as RGB."""
    if isinstance(videos, list | tuple):
        sizes = {getattr(frame, "shape", None) or frame.size for frame in videos if is_valid_video_frame(frame)}
        if len(sizes) > 1:
            raise ValueError(f"The frames of one video must have one size, got {sorted(sizes)}. Resize them first.")
        return [as_sources(video) for video in videos]
    if isinstance(videos, Image.Image):
        return videos.convert("RGB")
    if isinstance(videos, str) or getattr(videos, "ndim", 0) > 2:
        return videos
    source = Source(f"<{type(videos).__name__}>")
    source.held = videos
    return source


def open_video(source: str) -> Any:
    """The file at a path, or that a `Source` holds. A `Source` may also hold what does all that a `VideoFile` does."""
    held = getattr(source, "held", source)
    return held if hasattr(held, "describe") else VideoFile(held)


def one_each(metadata: Any, num_videos: int) -> list[Any]:
    """The metadata of each video, `None` where there is none."""
    if metadata is None:
        return [None] * num_videos
    listed = metadata if isinstance(metadata, list) else [metadata]
    flat = [entry for item in listed for entry in (item if isinstance(item, list) else [item])]
    if len(flat) != num_videos:
        raise ValueError(f"video_metadata has {len(flat)} entries for {num_videos} videos. Pass one entry per video.")
    return flat


def decoded_frames(
    video: Any, given: Any, name: str, layout: Any = None, choose: Callable[..., Any] | None = None
) -> tuple[torch.Tensor, STTSVideoMetadata]:
    """The frames `choose(metadata)`, or all, of decoded ones: `(T, channels, height, width)` and checked metadata."""
    frames: Any = torch.from_numpy(np.ascontiguousarray(video)) if isinstance(video, np.ndarray) else video
    if frames.ndim != 4 or not frames.numel():
        raise ValueError(f"{name} must hold frames (T, height, width, 3), got shape {tuple(frames.shape)}.")
    if frames.is_floating_point() and not torch.isfinite(frames).all():
        raise ValueError(f"{name} has NaN or infinite pixel values. Clean the frames before passing them.")
    metadata = STTSVideoMetadata(**{"total_num_frames": len(frames), **dict(given or {})})
    if metadata.fps is not None and not 0 < metadata.fps < math.inf:
        raise ValueError(f"The video_metadata of {name} has fps={metadata.fps}. Pass a number above 0, or None.")
    if choose or metadata.frames_indices is None:
        metadata.frames_indices = list(range(metadata.total_num_frames))
    counts = {"frames_indices": metadata.frames_indices, "frame_times": metadata.frame_times}
    wrong = {
        field: len(values) for field, values in counts.items() if values is not None and len(values) != len(frames)
    }
    if wrong:
        raise ValueError(
            f"{name} has {len(frames)} frames, but its video_metadata speaks of {wrong}. Pass one for each frame, and "
            "do_sample_frames=False if frames were sampled before."
        )
    if choose:
        metadata.frames_indices = chosen = list(choose(metadata))
        frames, times = frames[chosen], metadata.frame_times
        metadata.frame_times = times and [times[index] for index in chosen]
    layout = layout or infer_channel_dimension_format(frames, num_channels=(1, 3, 4))
    return (frames.permute(0, 3, 1, 2).contiguous() if layout == ChannelDimension.LAST else frames), metadata


STTSVideoProcessor.register_for_auto_class("AutoVideoProcessor")
