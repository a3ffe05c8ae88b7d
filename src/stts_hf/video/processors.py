"""
Videos for the processor of any backbone: which frames, read by seeking, and what they become, before and after.

`STTSProcessor` reads videos itself. For a native processor `NativeReader` reads them: it chooses the frames by the
processor's own rule and resizes each as soon as it is decoded. The result equals the native processor's on a fully
decoded file.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import BatchFeature
from transformers.image_processing_backends import TorchvisionBackend
from transformers.image_utils import SizeDict
from transformers.video_utils import VideoMetadata, make_batched_videos

from stts_hf.modeling.video_processing_stts import (
    as_sources,
    check_amount,
    check_count,
    decoded_frames,
    frame_budget,
    one_each,
    open_video,
    sample_times,
)
from stts_hf.modeling.video_reading_stts import STTSVideoMetadata, VideoFile

from .sources import LIMITS, download_limits, opened

# What a call may say of its videos beside `videos_kwargs`.
OF_VIDEOS = {
    *("num_frames", "max_fps", "fps", "min_frames", "max_frames", "size", "do_resize", "cap_pixels_per_frame"),
    *("max_video_tokens", "test_time_scaling", "pruning_ratio", "do_sample_frames", "video_metadata"),
    *("return_metadata", *LIMITS),
}
COUNTS, RATES = ("num_frames", "min_frames", "max_frames"), ("max_fps", "fps")
_ROUNDING = 0.05  # frames: how far a time may be from its place at a constant rate
Grid = tuple[int, int, int]


def process(
    processor: Any, *, text: Sequence[str], videos: Sequence[Any] | None = None, images: Any = None, **options: Any
) -> BatchFeature:
    """
    What `processor` makes of texts, videos and images.

    videos: in the forms that `STTSVideoProcessor` takes. options: of the processor's call; also `num_frames` and
    `max_fps`, the most frames and frames per second, and `test_time_scaling` with `pruning_ratio`, which raise what
    caps a video's tokens until pruning leaves as many as there were without. `max_download_bytes` and
    `max_download_seconds` limit downloads. Options of videos may stand in `videos_kwargs`. Raises `ValueError` where a
    video cannot be read or a setting is out of range or given twice.
    """
    if videos is None or (isinstance(videos, list | tuple) and not videos):
        return processor(text=text, videos=None, images=images, **options)
    call = pop_video_kwargs(options)
    limits = download_limits(processor, **{name: call.pop(name) for name in LIMITS.keys() & call.keys()})
    wants_metadata = call.pop("return_metadata", False)
    with opened(videos, *limits) as videos:
        if reads_files(processor):
            options |= {"return_metadata": True} if wants_metadata else {}
            return processor(text=text, videos=videos, images=images, videos_kwargs=call, **options)
        metadata = one_each(call.pop("video_metadata", None), len(videos))
        samples = call.pop("do_sample_frames", None)
        processor = copy.copy(processor)
        processor.video_processor = with_settings(processor.video_processor, call)
        reader = NativeReader(processor.video_processor, samples)
        read = [reader.read(video, metadata[i], f"videos[{i}]") for i, video in enumerate(as_sources(videos))]
    frames, shown = zip(*read, strict=True)
    call |= {
        "video_metadata": [to_native_metadata(of_video) for of_video in shown],
        "do_sample_frames": False,
        "do_resize": False,  # they have their size
        "return_metadata": True,  # the prompt says when frames are shown
    }
    outputs = processor(text=text, videos=list(frames), images=images, videos_kwargs=call, **options)
    outputs.pop("video_metadata", None)
    if wants_metadata:
        outputs["video_metadata"] = list(shown)
    return outputs


def reads_files(processor: Any) -> bool:
    """Whether the processor reads files by seeking itself."""
    return hasattr(processor.video_processor, "test_time_scaling")


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
    """
    A copy of a native processor with the settings among `options`, which are taken out: native processors take few of
    them in a call.
    """
    video_processor = copy.copy(video_processor)
    scales, ratio = options.pop("test_time_scaling", False), options.pop("pruning_ratio", None)
    if ratio is not None and not scales:
        raise ValueError(
            f"pruning_ratio={ratio!r} has no effect on a processor without test_time_scaling. Pass it to the model's "
            "call or generate, which prune, or pass test_time_scaling=True too, for more frames."
        )
    known = {"num_frames", "max_fps"} | video_processor.valid_kwargs.__annotations__.keys()
    set_frames(video_processor, **{name: options.pop(name) for name in known & options.keys()})
    if scales:
        if ratio is None:
            raise ValueError("test_time_scaling=True needs the pruning_ratio that it makes up for.")
        scale_budget(video_processor, ratio)
    return video_processor


def native_name(video_processor: Any, name: str) -> str:
    """What the processor calls the setting `name` of a call: native ones have "max_frames" and "fps"."""
    if hasattr(video_processor, "test_time_scaling"):
        return name
    return {"num_frames": "max_frames", "max_fps": "fps"}.get(name, name)


def set_frames(video_processor: Any, **settings: Any) -> None:
    """
    Sets `num_frames`, `max_fps` and others under the names that the processor has for them; None leaves it be. Raises
    `ValueError` for values out of range.
    """
    for name, value in settings.items():
        if value is None:
            continue
        if name in COUNTS:
            check_count(name, value)
        if name in RATES:
            check_amount(name, value)
        setattr(video_processor, native_name(video_processor, name), value)


def get_frames(video_processor: Any) -> dict[str, Any]:
    """The settings `num_frames` and `max_fps`, as `set_frames` sets them."""
    return {name: getattr(video_processor, native_name(video_processor, name)) for name in ("num_frames", "max_fps")}


def scale_budget(video_processor: Any, pruning_ratio: float) -> None:
    """Raises frames and, where all frames share them, pixels to `1 / (1 - pruning_ratio)` of what they are."""
    video_processor.max_frames = frame_budget(video_processor.max_frames, pruning_ratio)
    few, more = (_native_grid(video_processor, frames, 4096, 4096).prod() for frames in (64, 128))
    if more < 2 * few:
        size = dict(video_processor.size)
        video_processor.size = size | {"longest_edge": frame_budget(size["longest_edge"], pruning_ratio)}


class NativeReader:
    """
    Frames as a native video processor wants them, in the size it would give them. samples: whether it chooses them, or
    takes all there are; by default as its checkpoint says.
    """

    def __init__(self, video_processor: Any, samples: bool | None = None):
        if samples is None:
            # Qwen2.5-VL's class has this off, since its callers chose frames before: no checkpoint means it.
            samples = video_processor.do_sample_frames or not type(video_processor).do_sample_frames
        self.settings, self.samples = video_processor, samples

    def choose(self, metadata: STTSVideoMetadata) -> list[int]:
        """By the processor's own rule; all where it takes all, or there are too few for one tubelet."""
        self._set_rate(metadata)
        if not self.samples or metadata.total_num_frames < self.settings.temporal_patch_size:
            return metadata.frames_indices or []
        names = [name for name in self.settings.valid_kwargs.__annotations__ if name != "video_metadata"]
        call = {name: getattr(self.settings, name, None) for name in names}
        return np.asarray(self.settings.sample_frames(metadata=metadata, **call)).tolist()

    def _set_rate(self, metadata: STTSVideoMetadata) -> None:
        if metadata.fps is None:
            metadata.fps = float(self.settings.fps or 1)  # so that all are shown

    def size(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        """Height and width that the processor gives frames of this size."""
        if not self.settings.do_resize:
            return height, width
        _, rows, columns = _native_grid(self.settings, num_frames, height, width).tolist()
        return rows * self.settings.patch_size, columns * self.settings.patch_size

    def resize(self, picture: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        """By the very steps of native preprocessing."""
        wanted = SizeDict(height=size[0], width=size[1])
        return TorchvisionBackend.resize(self.settings, image=picture, size=wanted, resample=self.settings.resample)

    def read(self, video: Any, given: Any, name: str) -> tuple[torch.Tensor, STTSVideoMetadata]:
        """Frames `(T, 3, height, width)` and which they are. given: metadata of decoded frames. name: for messages."""
        if isinstance(video, str):
            with open_video(video) as file:
                chosen = self.choose(file.describe())
                frames, shown = file.read(chosen, self.size(len(chosen), *measure(file, chosen)), self.resize)
        else:
            video = make_batched_videos(video)[0] if isinstance(video, list) else video
            frames, shown = decoded_frames(video, given, name, choose=self.choose if self.samples else None)
            self._set_rate(shown)
            size = self.size(len(frames), *frames.shape[-2:])
            frames = torch.stack([self.resize(frame, size) for frame in frames])
        return pad_to_tubelet(frames, self.settings.temporal_patch_size), shown


def measure(file: VideoFile, indices: Sequence[int]) -> tuple[int, int]:
    """Height and width of frames as they are shown, which headers do not say for sure; decodes one of them."""
    try:
        _, shown = file.read(indices[:1], (1, 1))
    except ValueError:  # it is damaged
        _, shown = file.read(indices, (1, 1))
    return int(shown.height or 0), int(shown.width or 0)


def pad_to_tubelet(frames: torch.Tensor, tubelet: int) -> torch.Tensor:
    """Frames (T, 3, height, width), at least `tubelet`: the last one stays on."""
    lacking = tubelet - len(frames)
    return frames if lacking <= 0 else torch.cat([frames, frames[-1:].expand(lacking, -1, -1, -1)])


def _native_grid(video_processor: Any, num_frames: int, height: int, width: int) -> torch.Tensor:
    """The grid (3,) in patches that the processor makes of such frames, which have no pixels here."""
    num_frames = max(num_frames, video_processor.temporal_patch_size)
    frames = torch.empty(num_frames, 3, height, width, dtype=torch.uint8, device="meta")
    made = video_processor([frames], do_sample_frames=False, video_metadata=[{"total_num_frames": num_frames}])
    return torch.as_tensor(made["video_grid_thw"])[0]


def to_native_metadata(shown: STTSVideoMetadata) -> VideoMetadata:
    """
    The same for a native processor, which takes a frame's index over `fps` for its time: where the rate varies, indices
    are replaced by what gives the true time.
    """
    indices: list[Any] = list(shown.frames_indices or [])
    fps = shown.fps or 1.0
    places = [time * fps for time in shown.timestamps]
    if any(abs(place - index) > _ROUNDING for place, index in zip(places, indices, strict=True)):
        indices = places
    return VideoMetadata(shown.total_num_frames, fps, duration=shown.duration, frames_indices=indices)


def probe(processor: Any, video: Any) -> tuple[torch.Tensor, STTSVideoMetadata]:
    """
    The entry of a video file in the processor's grids, (3,), and which frames it shows; at most one frame is decoded.
    Where frames turn out to be damaged, fewer are shown.
    """
    settings = processor.video_processor
    with opened([video], *download_limits(processor)) as [source], open_video(*as_sources([source])) as file:
        if not reads_files(processor):
            chosen = NativeReader(settings).choose(file.describe())
            return _native_grid(settings, len(chosen), *measure(file, chosen)), file.describe(chosen)
        samples, limits = settings.do_sample_frames, settings.frame_limits()
        shown = file.describe(sample_times(file.times, file.duration, *limits) if samples else None)
        return torch.tensor([len(shown.frames_indices or []), *molmo2_block_grid(settings)]), shown


def molmo2_block_grid(video_processor: Any) -> tuple[int, int]:
    """Rows and columns of blocks in a frame; a window over the border counts in full."""
    size, windows = video_processor.size, video_processor.pooling_size
    patches = (size[side] // video_processor.patch_size for side in ("height", "width"))
    rows, columns = (math.ceil(count / window) for count, window in zip(patches, windows, strict=True))
    return rows, columns


def grid_name(processor: Any) -> str:
    """What the processor calls the grids of videos; it gives them last."""
    return processor.video_processor.model_input_names[-1]


def grids_of(inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The grids of videos (V, 3) in a call's inputs, by their name; none where there are no videos."""
    return {name: inputs[name] for name in inputs if name.startswith("video_grid")}


def block_grids(processor: Any, inputs: Mapping[str, Any]) -> list[Grid]:
    """`(T, rows, columns)` in blocks of each video in a processor's output."""
    side = getattr(processor.video_processor, "merge_size", 1)  # of those that count patches
    grids = inputs[grid_name(processor)].tolist() if grid_name(processor) in inputs else []
    return [(frames, rows // side, columns // side) for frames, rows, columns in grids]
