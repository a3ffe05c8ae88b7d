"""Which frames of a video the model sees; native Molmo2 makes tensors of them."""

from .settings_stts import check_setting  # isort: split

import functools
import math
import os
import warnings
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from transformers.feature_extraction_utils import BatchFeature
from transformers.image_processing_utils import get_size_dict
from transformers.image_utils import ChannelDimension, is_valid_image, pil_torch_interpolation_mapping
from transformers.models.molmo2.video_processing_molmo2 import Molmo2VideoProcessor, Molmo2VideoProcessorKwargs
from transformers.video_utils import VideoMetadata, make_batched_metadata, make_batched_videos

from .video_reading_stts import VideoFile, resize

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
    test_time_scaling: bool | None
    pruning_ratio: int | float | None


class STTSVideoProcessor(Molmo2VideoProcessor):
    """Molmo2's video processor with the paper's frame sampling and a reader that decodes only sampled frames.

    Samples `max_fps` (2) frames per second, or `num_frames` (64) evenly spaced ones if the video is longer. The last
    frame is always included, none is repeated. `fps=` in a call samples the whole video at that rate, without a limit.
    Further settings: `STTSVideoProcessorKwargs`; each works per call too.

    A video is the path or `http(s)` address of a file, or decoded frames as in every video processor.
    """

    do_convert_rgb = do_resize = do_rescale = do_normalize = True
    test_time_scaling = False
    pruning_ratio = 0.5
    valid_kwargs = STTSVideoProcessorKwargs  # type: ignore[assignment]

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.frame_limits()

    def preprocess(self, videos: Any, **kwargs: Any) -> BatchFeature:
        """Reads, samples and preprocesses videos. Raises `ValueError` as `VideoFile` and `frame_limits` do.

        Returns `pixel_values_videos` `(F, N, pixels)`, F frames of all videos, `video_token_pooling` `(F * n, w^2)`,
        `video_grids` `(V, 3)` = `(T, rows, columns)`, and `video_metadata` if `return_metadata=True`.
        """
        num_frames, rate = self.frame_limits(**kwargs)
        size, resizing = self.resizing(**kwargs)
        videos = as_paths(videos)
        videos = [] if isinstance(videos, list) and not videos else make_batched_videos(videos)
        if not videos:
            raise ValueError("videos holds no video. Pass a path, an address or decoded frames, or leave videos out.")
        if any(isinstance(video, str) for video in videos):
            read = []
            for video in videos:
                with VideoFile(video) as file:
                    samples = kwargs.get("do_sample_frames", self.do_sample_frames)
                    shown = sample_times(file.times, file.duration, num_frames, rate) if samples else None
                    read.append(file.read(shown, size, resizing))
            videos = [frames for frames, _ in read]
            kwargs |= {"do_sample_frames": False, "input_data_format": ChannelDimension.FIRST}
            kwargs["video_metadata"] = [shown for _, shown in read]
        elif isinstance(videos[0], list):  # files of images; native code batches again, which would part them
            videos = [videos]
        elif kwargs.get("video_metadata") is not None and kwargs.get("do_sample_frames", self.do_sample_frames):
            kwargs["video_metadata"] = make_batched_metadata(videos, kwargs["video_metadata"])
            for video, metadata in zip(videos, kwargs["video_metadata"], strict=True):
                check_num_frames(len(video), metadata.total_num_frames)
        # What native code hands to `sample_frames` for decoded frames.
        kwargs |= {"num_frames": num_frames, "max_fps": rate, "fps": None}
        kwargs |= {"test_time_scaling": False, "pruning_ratio": None}
        return super().preprocess(videos, **kwargs)

    def _preprocess(self, videos: list[torch.Tensor], return_tensors: Any = None, **kwargs: Any) -> BatchFeature:  # type: ignore[override]
        """Native preprocessing of a few frames at a time, so that only the result is as large as all frames."""
        pixel_values: Any = None
        pooling, grids, done, total = [], [], 0, sum(map(len, videos))  # done and total: frames
        for video in videos:
            for frames in video.split(max(1, _PIXELS_AT_ONCE // (video.shape[-2] * video.shape[-1]))):
                part = super()._preprocess([frames], **kwargs)
                patches = part["pixel_values_videos"]  # (t, N, pixels)
                indices = part["video_token_pooling"]  # (t * n, w^2)
                pixel_values = patches.new_empty((total, *patches.shape[1:])) if pixel_values is None else pixel_values
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
        num_frames, rate = self.frame_limits(**call)
        if metadata.fps is None:
            metadata.fps = float(rate or self.max_fps or 1)
            warnings.warn(f"Frames came without fps: {metadata.fps:g} is taken. Pass video_metadata.", stacklevel=2)
        check_amount("fps of video_metadata", float(metadata.fps))
        return sample_indices(metadata.total_num_frames, metadata.fps, num_frames, rate)

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
            raise ValueError(f"pruning_ratio={ratio!r} has no effect without test_time_scaling. Pass it to the model.")
        if scales and num_frames is not None:
            num_frames = frame_budget(num_frames, ratio)
        if num_frames is None and max_fps is None and fps is None:
            raise ValueError("num_frames, max_fps and fps are all None. Set num_frames.")
        return (None, fps) if fps is not None and "num_frames" not in given else (num_frames, max_fps)

    def resizing(self, **call: Any) -> tuple[tuple[int, int], Callable[..., torch.Tensor]]:
        """Height and width of frames, by the settings, those of a call first, and what `VideoFile.read` resizes by."""
        given = {name: call.get(name, getattr(self, name)) for name in ("size", "default_to_square", "resample")}
        size: Any = get_size_dict(given["size"], default_to_square=given["default_to_square"])
        if not (size.get("height") and size.get("width")):
            raise ValueError(f"size must have 'height' and 'width', got {size!r}.")
        interpolation = pil_torch_interpolation_mapping.get(given["resample"], given["resample"])
        return (size["height"], size["width"]), functools.partial(resize, interpolation=interpolation)


def as_paths(videos: Any) -> Any:
    """Path objects as strings, as transformers takes them, without empty lists.

    Raises `ValueError` for what is neither a file nor decoded frames.
    """
    if isinstance(videos, list | tuple):
        found = [as_paths(video) for video in videos]
        return [video for video in found if not isinstance(video, list) or video]
    videos = os.fspath(videos) if isinstance(videos, os.PathLike) else videos
    if not (isinstance(videos, str) or is_valid_image(videos)) or 0 in getattr(videos, "shape", ()):
        raise ValueError(f"videos holds {videos!r:.80}. Pass a path, an address or decoded frames, or leave it out.")
    return videos


def check_num_frames(found: int, claimed: int) -> None:
    """Raises `ValueError` where metadata counts other frames than a video has."""
    if found != claimed:
        raise ValueError(
            f"video_metadata has total_num_frames={claimed} for a video of {found} frames. Pass {found}, or "
            "do_sample_frames=False for frames that were sampled before."
        )


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Raises `ValueError` unless `value` is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}.")


def check_amount(name: str, value: Any) -> None:
    """Raises `ValueError` unless `value` is a finite number above 0."""
    if isinstance(value, bool) or not (isinstance(value, int | float) and 0 < value < math.inf):
        raise ValueError(f"{name} must be a number above 0, got {value!r}.")


def frame_budget(num_frames: int, pruning_ratio: float) -> int:
    """`ceil(num_frames / (1 - pruning_ratio))`: they cost as many tokens after pruning as `num_frames` cost without.

    Exact where floating point is not. Raises `ValueError` outside `[0, 0.999]`.
    """
    check_setting("pruning_ratio", pruning_ratio)
    if pruning_ratio > 0.999:
        raise ValueError(
            f"test_time_scaling=True needs pruning_ratio of at most 0.999, got {pruning_ratio!r}. Lower it."
        )
    return math.ceil(num_frames / (1 - Fraction(float(pruning_ratio)).limit_denominator(1_000_000)))


def sample_times(times: np.ndarray, duration: float, num_frames: int | None, rate: float | None) -> list[int]:
    """Which frames to show, as the reference samples (Molmo2's `uniform_last_frame`): the last is always among them.

    Returns ascending indices, none twice, of the frames on screen at `0, 1/rate, 2/rate, ... (< duration), duration`
    where `num_frames` suffices, else at `num_frames` evenly spaced moments including both ends. One is the last frame.

    times: when each frame is shown, float64 `(T,)`, ascending seconds from 0; the last stays until `duration`.
    """
    budget, rate = num_frames or math.inf, rate or math.inf
    if budget == 1:
        return [len(times) - 1]
    step = duration / (budget - 1) if (budget - 1) / rate < duration else min(1 / rate, duration)
    # Worked out per frame, not per moment: fps=1e6 asks for billions of moments, and shows each frame once.
    moments = np.ceil((times - _TOLERANCE) / step) * step  # the first that each frame is there for
    shown = moments + _TOLERANCE < np.append(times[1:], np.inf)
    shown[-1] = True
    return np.flatnonzero(shown).tolist()


def sample_indices(total: int, fps: float, num_frames: int | None, rate: float | None) -> np.ndarray:
    """`sample_times` for `total` decoded frames, `fps` per second.

    As the reference does for arrays, the end is the last frame itself rather than the moment it leaves the screen.
    """
    budget, rate = num_frames or math.inf, rate or math.inf
    if budget == 1:
        return np.array([total - 1])
    if total <= 2:
        return np.arange(total)
    if (budget - 1) / rate < total / fps:
        return np.linspace(0, total - 1, num=int(min(budget, total))).astype(int)
    step = max(1.0, fps / rate)  # smaller ones would only ask for frames again
    return np.unique(np.append(np.round(np.arange(0.0, total - 1, step)), total - 1).astype(int))


STTSVideoProcessor.register_for_auto_class("AutoVideoProcessor")
