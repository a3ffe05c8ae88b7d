"""
Videos for the processor of any backbone: which frames, read by seeking, and the tensors they become.

A reader stands between videos and a processor: it chooses frames by the processor's own rule and resizes those of files
as soon as they are decoded. The result equals the processor's on a fully decoded file.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import BatchFeature
from transformers.image_processing_backends import TorchvisionBackend
from transformers.image_utils import ChannelDimension, SizeDict
from transformers.video_utils import VideoMetadata

from stts_hf.modeling.video_processing_stts import check_amount, check_count, frame_budget, sample_times
from stts_hf.modeling.video_reading_stts import STTSVideoMetadata, VideoFile

from .sources import LIMITS, decoded_frames, download_limits, one_each, open_source

# What a call may say of its videos beside `videos_kwargs`.
OF_VIDEOS = {
    *("num_frames", "max_fps", "fps", "min_frames", "max_frames", "size", "do_resize", "cap_pixels_per_frame"),
    *("max_video_tokens", "test_time_scaling", "pruning_ratio", "do_sample_frames", "video_metadata"),
    *("return_metadata", *LIMITS),
}
CHECKS = {
    **dict.fromkeys(("num_frames", "min_frames", "max_frames"), check_count),
    **dict.fromkeys(("max_fps", "fps"), check_amount),
}
_ROUNDING = 0.05  # frames: how far a time may be from its place at a constant rate
Grid = tuple[int, int, int]


def process(
    processor: Any, *, text: Sequence[str], videos: Sequence[Any] | None = None, images: Any = None, **options: Any
) -> BatchFeature:
    """
    What `processor` makes of texts, videos and images.

    videos: each in any form of `open_source`. options: of the processor's call; also `num_frames` and `max_fps`, the
    most frames and frames per second, and `test_time_scaling` with `pruning_ratio`, which raise what caps a video's
    tokens until pruning leaves as many as there were without. `max_download_bytes` and `max_download_seconds` limit
    downloads. Options of videos may stand in `videos_kwargs`. Raises `ValueError` where a video cannot be read or a
    setting is out of range or given twice.
    """
    if videos is None or (isinstance(videos, list | tuple) and not videos):
        return processor(text=text, videos=None, images=images, **options)
    call = pop_video_kwargs(options)
    limits = download_limits(processor, **{name: call.pop(name) for name in LIMITS.keys() & call.keys()})
    metadata = one_each(call.pop("video_metadata", None), len(videos))
    wants_metadata = call.pop("return_metadata", False)
    reader = make_reader(processor.video_processor, call)
    frames, shown = [], []
    for index, video in enumerate(videos):
        with ExitStack() as files:
            name = f"videos[{index}]"
            read = read_source(reader, open_source(video, name, limits, files), metadata[index], name)
        frames.append(read[0])
        shown.append(read[1])
    processor = copy.copy(processor)
    processor.video_processor = reader.settings
    call |= reader.call(shown) | {"do_sample_frames": False, "return_metadata": True}  # the prompt says when frames are
    outputs = processor(text=text, videos=frames, images=images, videos_kwargs=call, **options)
    outputs.pop("video_metadata", None)
    if wants_metadata:
        outputs["video_metadata"] = shown
    return outputs


def is_molmo2(video_processor: Any) -> bool:
    """Whether it is an `STTSVideoProcessor`, of the package or of a checkpoint's code."""
    return hasattr(video_processor, "test_time_scaling")


def is_raster(video_processor: Any) -> bool:
    """Whether it shows every frame as one image of `image_seq_len` tokens, by native settings."""
    return hasattr(video_processor, "image_seq_len")


def pop_video_kwargs(options: dict[str, Any]) -> dict[str, Any]:
    """What a call's `options` say of videos, in `videos_kwargs` or beside them, taken out."""
    given = dict(options.pop("videos_kwargs", None) or {})
    if "do_resize" in options:  # beside `videos_kwargs` it is meant for images too
        options["images_kwargs"] = {"do_resize": options["do_resize"]} | dict(options.get("images_kwargs") or {})
    for name in OF_VIDEOS & options.keys():
        if name in given:
            raise ValueError(f"{name} is given twice, in videos_kwargs and beside it. Leave one of them out.")
        given[name] = options.pop(name)
    return given


def with_settings(video_processor: Any, options: dict[str, Any]) -> Any:
    """A copy of a native processor with the settings among `options`, which are taken out."""
    video_processor = copy.copy(video_processor)
    scales, ratio = options.pop("test_time_scaling", False), options.pop("pruning_ratio", None)
    if ratio is not None and not scales:
        raise ValueError(f"pruning_ratio={ratio!r} has no effect without test_time_scaling. Pass it to the model.")
    known = {"num_frames", "max_fps"} | video_processor.valid_kwargs.__annotations__.keys()
    set_frames(video_processor, **{name: options.pop(name) for name in known & options.keys()})
    if scales:
        if ratio is None:
            raise ValueError("test_time_scaling=True needs the pruning_ratio that more frames make up for. Pass it.")
        scale_budget(video_processor, ratio)
    return video_processor


def native_name(video_processor: Any, name: str) -> str:
    """What the processor calls the setting `name` of a call: native ones have "fps", those of tubelets "max_frames"."""
    if is_molmo2(video_processor):
        return name
    names = {"num_frames": "num_frames" if is_raster(video_processor) else "max_frames", "max_fps": "fps"}
    return names.get(name, name)


def set_frames(video_processor: Any, **settings: Any) -> None:
    """Sets `num_frames`, `max_fps` and others that are not None, by the processor's names. Raises `ValueError`."""
    for name, value in settings.items():
        if value is not None:
            if name in CHECKS:
                CHECKS[name](name, value)
            setattr(video_processor, native_name(video_processor, name), value)


def get_frames(video_processor: Any) -> dict[str, Any]:
    """The settings `num_frames` and `max_fps`, as `set_frames` sets them."""
    return {name: getattr(video_processor, native_name(video_processor, name)) for name in ("num_frames", "max_fps")}


def check_frames(video_processor: Any) -> None:
    """Raises `ValueError` for settings of frames that no call could have; None is one."""
    for name, check in CHECKS.items():
        if (value := getattr(video_processor, name, None)) is not None:
            check(name, value)


def scale_budget(video_processor: Any, pruning_ratio: float) -> None:
    """Raises frames and, where all frames share them, pixels to `1 / (1 - pruning_ratio)` of what they are."""
    name = native_name(video_processor, "num_frames")
    setattr(video_processor, name, frame_budget(getattr(video_processor, name), pruning_ratio))
    if is_raster(video_processor):  # pixels of a frame do not depend on how many there are
        return
    few, more = (_native_grid(video_processor, frames, 4096, 4096).prod() for frames in (64, 128))
    if more < 2 * few:
        size = dict(video_processor.size)
        video_processor.size = size | {"longest_edge": frame_budget(size["longest_edge"], pruning_ratio)}


class Molmo2Reader:
    """Frames by an `STTSVideoProcessor`'s settings. samples: whether frames are chosen, or all are shown."""

    def __init__(self, video_processor: Any, call: dict[str, Any]):
        self.settings, self.options = video_processor, call
        self.samples = call.pop("do_sample_frames", video_processor.do_sample_frames)
        self.limits, (self.size, self.resizing) = video_processor.frame_limits(**call), video_processor.resizing(**call)

    def choose(self, metadata: STTSVideoMetadata, file: VideoFile | None = None) -> list[int]:
        """Indices of the frames to show, of a `file` or of decoded frames."""
        if file is None:
            return self.settings.sample_frames(metadata, **self.options).tolist()
        return sample_times(file.times, file.duration, *self.limits)

    def decode(self, file: VideoFile, indices: list[int]) -> tuple[torch.Tensor, STTSVideoMetadata]:
        """These frames of a file."""
        return file.read(indices, self.size, self.resizing)

    def finish(self, frames: torch.Tensor, shown: STTSVideoMetadata) -> torch.Tensor:
        """Decoded frames as the processor takes them."""
        return frames

    def call(self, shown: list[STTSVideoMetadata]) -> dict[str, Any]:
        """Options of the processor's call that go with the frames."""
        return {"video_metadata": shown, "input_data_format": ChannelDimension.FIRST}

    def grid(self, file: VideoFile, indices: list[int]) -> torch.Tensor:
        """The entry in the processor's grids, (3,), of these frames of a file."""
        return torch.tensor([len(indices), *molmo2_block_grid(self.settings)])


class NativeReader:
    """The same for a native video processor: it gets what a call sets as settings, since it takes little in a call."""

    def __init__(self, video_processor: Any, call: dict[str, Any]):
        samples = call.pop("do_sample_frames", None)
        if samples is None:
            # Qwen2.5-VL's class has this off, since its callers chose frames before: no checkpoint means it.
            samples = video_processor.do_sample_frames or not type(video_processor).do_sample_frames
        self.settings, self.samples = with_settings(video_processor, call), samples

    def choose(self, metadata: STTSVideoMetadata, file: VideoFile | None = None) -> list[int]:
        """By the processor's own rule; all where there are too few for one tubelet."""
        self._set_rate(metadata)
        if metadata.total_num_frames < self.settings.temporal_patch_size:
            return list(range(int(metadata.total_num_frames)))
        names = [name for name in self.settings.valid_kwargs.__annotations__ if name != "video_metadata"]
        call = {name: getattr(self.settings, name, None) for name in names}
        try:
            return np.asarray(self.settings.sample_frames(metadata=metadata, **call)).tolist()
        except ZeroDivisionError:
            raise ValueError("num_frames or fps allow less than the 2 frames of a tubelet. Raise them.") from None

    def _set_rate(self, metadata: STTSVideoMetadata) -> None:
        if metadata.fps is None:
            metadata.fps = float(self.settings.fps or 1)  # so that all are shown

    def _size(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        if not self.settings.do_resize:
            return height, width
        _, rows, columns = _native_grid(self.settings, num_frames, height, width).tolist()
        return rows * self.settings.patch_size, columns * self.settings.patch_size

    def _resize(self, picture: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        wanted = SizeDict(height=size[0], width=size[1])
        return TorchvisionBackend.resize(self.settings, image=picture, size=wanted, resample=self.settings.resample)

    def _pad(self, frames: torch.Tensor) -> torch.Tensor:
        """At least a tubelet: the last frame stays on."""
        lacking = max(0, getattr(self.settings, "temporal_patch_size", 1) - len(frames))
        return torch.cat([frames, frames[-1:].expand(lacking, -1, -1, -1)]) if lacking else frames

    def decode(self, file: VideoFile, indices: list[int]) -> tuple[torch.Tensor, STTSVideoMetadata]:
        frames, shown = file.read(indices, self._size(len(indices), *measure(file, indices)), self._resize)
        return self._pad(frames), shown

    def finish(self, frames: torch.Tensor, shown: STTSVideoMetadata) -> torch.Tensor:
        self._set_rate(shown)
        size = self._size(len(frames), frames.shape[-2], frames.shape[-1])
        return self._pad(torch.stack([self._resize(frame, size) for frame in frames]))

    def call(self, shown: list[STTSVideoMetadata]) -> dict[str, Any]:
        return {"video_metadata": [to_native_metadata(metadata) for metadata in shown], "do_resize": False}

    def grid(self, file: VideoFile, indices: list[int]) -> torch.Tensor:
        return _native_grid(self.settings, len(indices), *measure(file, indices))


class RasterReader(NativeReader):
    """The same for a native video processor that makes one square image of each frame."""

    def choose(self, metadata: STTSVideoMetadata, file: VideoFile | None = None) -> list[int]:
        self._set_rate(metadata)
        if metadata.duration is None:  # of decoded frames
            metadata = replace(metadata, duration=metadata.total_num_frames / (metadata.fps or 1))
        rule = {"num_frames": self.settings.num_frames, "fps": self.settings.fps}
        return np.asarray(self.settings.sample_frames(metadata=metadata, **rule)).tolist()

    def _size(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        if not self.settings.do_resize:
            return height, width
        size = dict(getattr(self.settings, "max_image_size", None) or self.settings.size)
        return size.get("height") or size["longest_edge"], size.get("width") or size["longest_edge"]

    def _resize(self, picture: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        if not self.settings.do_resize:
            return picture
        # Native code resizes twice, which is not the same as once.
        wanted = SizeDict(**dict(self.settings.size))
        return self.settings.resize(picture[None], size=wanted, resample=self.settings.resample)[0]

    def decode(self, file: VideoFile, indices: list[int]) -> tuple[torch.Tensor, STTSVideoMetadata]:
        frames, shown = super().decode(file, indices)
        size = tuple(frames.shape[-2:])
        if (shown.height, shown.width) == size:  # `read` resizes no frame of the wanted size
            frames = torch.stack([self._resize(frame, size) for frame in frames])
        return frames, shown

    def grid(self, file: VideoFile, indices: list[int]) -> torch.Tensor:
        side = math.isqrt(self.settings.image_seq_len)
        return torch.tensor([len(indices), side, side])


Reader = Molmo2Reader | NativeReader


def make_reader(video_processor: Any, call: dict[str, Any]) -> Reader:
    native = RasterReader if is_raster(video_processor) else NativeReader
    return (Molmo2Reader if is_molmo2(video_processor) else native)(video_processor, call)


def read_source(reader: Reader, source: Any, given: Any, name: str) -> tuple[torch.Tensor, STTSVideoMetadata]:
    """Frames (T, 3, height, width) and which they are. given: metadata of decoded frames. name: for messages."""
    if isinstance(source, VideoFile):
        return reader.decode(source, pick(reader, source))
    frames, shown = decoded_frames(source, given, name, reader.samples)
    if reader.samples:
        shown.frames_indices = chosen = reader.choose(shown)
        frames, times = frames[chosen], shown.frame_times
        shown.frame_times = times and [times[index] for index in chosen]
    return reader.finish(frames, shown), shown


def pick(reader: Reader, file: VideoFile) -> list[int]:
    """Indices of the frames of a file that are shown."""
    shown = file.describe()
    return reader.choose(shown, file) if reader.samples else shown.frames_indices or []


def measure(file: VideoFile, indices: Sequence[int]) -> tuple[int, int]:
    """Height and width of frames as they are shown, which headers do not say for sure; decodes one of them."""
    try:
        _, shown = file.read(indices[:1], (1, 1))
    except ValueError:  # it is damaged
        _, shown = file.read(indices, (1, 1))
    return int(shown.height or 0), int(shown.width or 0)


def _native_grid(video_processor: Any, num_frames: int, height: int, width: int) -> torch.Tensor:
    """The grid (3,) in patches that the processor makes of such frames, which have no pixels here."""
    num_frames = max(num_frames, video_processor.temporal_patch_size)
    frames = torch.empty(num_frames, 3, height, width, dtype=torch.uint8, device="meta")
    made = video_processor([frames], do_sample_frames=False, video_metadata=[{"total_num_frames": num_frames}])
    return torch.as_tensor(made["video_grid_thw"])[0]


def to_native_metadata(shown: STTSVideoMetadata) -> VideoMetadata:
    """The same for a native processor, whose times are indices over `fps`: where the rate varies, `times * fps`."""
    indices: list[Any] = list(shown.frames_indices or [])
    fps = shown.fps or 1.0
    places = [time * fps for time in shown.timestamps]
    if any(abs(place - index) > _ROUNDING for place, index in zip(places, indices, strict=True)):
        indices = places
    return VideoMetadata(shown.total_num_frames, fps, duration=shown.duration, frames_indices=indices)


def probe(processor: Any, video: Any) -> tuple[torch.Tensor, STTSVideoMetadata]:
    """A video file's entry in the processor's grids, (3,), and the frames it shows; decodes at most one of them."""
    reader = make_reader(processor.video_processor, {})
    with ExitStack() as files:
        file = open_source(video, "video", download_limits(processor), files)
        chosen = pick(reader, file)
        return reader.grid(file, chosen), file.describe(chosen)


def molmo2_block_grid(video_processor: Any) -> tuple[int, int]:
    """Rows and columns of blocks in a frame; a window over the border counts in full."""
    size, (high, wide) = video_processor.size, video_processor.pooling_size
    rows, columns = (size[side] // video_processor.patch_size for side in ("height", "width"))
    return math.ceil(rows / high), math.ceil(columns / wide)


def grid_name(processor: Any) -> str:
    """What the processor calls the grids of videos; it gives them last."""
    return processor.video_processor.model_input_names[-1]


def block_grids(processor: Any, inputs: Mapping[str, Any]) -> list[Grid]:
    """`(T, rows, columns)` in blocks of each video in a processor's output."""
    side = getattr(processor.video_processor, "merge_size", 1)  # of those that count patches
    grids = inputs[grid_name(processor)].tolist() if grid_name(processor) in inputs else []
    return [(frames, rows // side, columns // side) for frames, rows, columns in grids]
