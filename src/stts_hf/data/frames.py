"""
Videos for the processor of any backbone: which frames, read by seeking, and what they become, before and after.

`STTSProcessor` reads videos itself. For a native processor they are read here: it chooses the frames by its own rule,
they come in its size as soon as each is decoded, and it gets them with their times, so that all it makes of them is
what it makes of a file that was decoded whole.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import BatchFeature
from transformers.image_processing_backends import TorchvisionBackend
from transformers.image_utils import SizeDict
from transformers.video_utils import VideoMetadata

from stts_hf.modeling.frame_times_stts import STTSVideoMetadata
from stts_hf.modeling.video_processing_stts import (
    check_amount,
    check_count,
    checked_metadata,
    frame_budget,
    frames_tensor,
    load_pictures,
    normalize_videos,
    one_each,
)
from stts_hf.modeling.video_reading_stts import VideoFile

# A call's settings, each under the names that video processors have for it; the first that one has is meant.
SETTINGS = {"num_frames": ("max_frames", "num_frames"), "max_fps": ("max_fps", "fps")}
# Limits of a download, which native processors do not have.
LIMITS = {"max_download_bytes": 2**31, "max_download_seconds": 600.0}
# What a call may say of its videos beside `videos_kwargs`.
OF_VIDEOS = {
    *SETTINGS,
    *LIMITS,
    *("fps", "min_frames", "max_frames", "size", "do_resize", "cap_pixels_per_frame", "max_video_tokens"),
    *("test_time_scaling", "pruning_ratio", "do_sample_frames", "video_metadata", "return_metadata"),
}
_COUNTED = 0.05  # frames: how far a time may be from its place at a constant rate
Grid = tuple[int, int, int]


def process(
    processor: Any, *, text: Sequence[str], videos: Sequence[Any] | None = None, images: Any = None, **options: Any
) -> BatchFeature:
    """
    What `processor` makes of texts, videos and images.

    videos: in the forms that `STTSVideoProcessor` takes; of native processors, no torchcodec decoders. options: of the
    processor's call; also `num_frames` and `max_fps`, the most frames and frames per second, and `test_time_scaling`
    with `pruning_ratio`, which raise what caps a video's tokens until pruning leaves as many as there were without.
    `max_download_bytes` and `max_download_seconds` limit downloads. Those of videos may stand in `videos_kwargs`.
    Raises `ValueError` where a video cannot be read or a setting is out of range or given twice.
    """
    if isinstance(videos, list | tuple) and not videos:
        videos = None
    if videos is None or reads_files(processor):
        return processor(text=text, videos=videos, images=images, **options)
    given = of_videos(options)
    metadata = one_each(given.pop("video_metadata", None), len(videos))
    samples, wants_metadata = given.pop("do_sample_frames", None), given.pop("return_metadata", False)
    processor = copy.copy(processor)
    processor.video_processor = changed(processor.video_processor, given)
    reader = FrameReader(processor.video_processor, samples)
    read = [reader.read(video, metadata[index], index) for index, video in enumerate(normalize_videos(list(videos)))]
    videos_kwargs = given | {
        "video_metadata": [counted(shown) for _, shown in read],
        "do_sample_frames": False,
        "do_resize": False,  # they have their size
        "return_metadata": True,  # the prompt says when frames are shown
    }
    outputs = processor(
        text=text, videos=[frames for frames, _ in read], images=images, videos_kwargs=videos_kwargs, **options
    )
    outputs.pop("video_metadata", None)
    if wants_metadata:
        outputs["video_metadata"] = [shown for _, shown in read]
    return outputs


def reads_files(processor: Any) -> bool:
    """Whether the processor reads files by seeking itself."""
    return hasattr(processor.video_processor, "probe")


def of_videos(options: dict[str, Any]) -> dict[str, Any]:
    """What a call's `options` say of videos, in `videos_kwargs` or beside them, taken out."""
    given = dict(options.pop("videos_kwargs", None) or {})
    if "do_resize" in options:  # beside `videos_kwargs` it is meant for images too
        options["images_kwargs"] = {"do_resize": options["do_resize"]} | dict(options.get("images_kwargs") or {})
    for name in OF_VIDEOS & options.keys():
        if name in given:
            raise ValueError(f"{name} is given twice, in videos_kwargs and beside it. Leave one of them out.")
        given[name] = options.pop(name)
    return given


def changed(video_processor: Any, options: dict[str, Any]) -> Any:
    """A copy with the settings among `options`, which are taken out; native processors take few of them in a call."""
    video_processor = copy.copy(video_processor)
    scales, ratio = options.pop("test_time_scaling", False), options.pop("pruning_ratio", None)
    known = SETTINGS.keys() | LIMITS.keys() | video_processor.valid_kwargs.__annotations__.keys()
    if ratio is not None and not scales:
        raise ValueError(
            f"pruning_ratio={ratio!r} has no effect on a processor without test_time_scaling. Pass it to the model's "
            "call or generate, which prune, or pass test_time_scaling=True too, for more frames."
        )
    set_frames(video_processor, **{name: options.pop(name) for name in known & options.keys()})
    if scales:
        if ratio is None:
            raise ValueError("test_time_scaling=True needs the pruning_ratio that it makes up for.")
        scale_budget(video_processor, ratio)
    return video_processor


def set_frames(video_processor: Any, **settings: Any) -> None:
    """
    Sets `num_frames`, `max_fps` and others under the names that the processor has for them; None leaves it be. Raises
    `ValueError` for numbers of frames, or of frames per second, that are none.
    """
    for name, value in settings.items():
        if value is None:
            continue
        names = SETTINGS.get(name, (name,))
        known = [name for name in names if name in LIMITS or name in video_processor.valid_kwargs.__annotations__]
        if name in ("num_frames", "min_frames", "max_frames"):
            check_count(name, value)
        if name in ("max_fps", "fps", *LIMITS):
            check_amount(name, value)
        setattr(video_processor, known[0], value)


def get_frames(video_processor: Any) -> dict[str, Any]:
    """The settings that `set_frames` sets."""
    return {
        name: next(getattr(video_processor, known) for known in names if hasattr(video_processor, known))
        for name, names in SETTINGS.items()
    }


def scale_budget(video_processor: Any, pruning_ratio: float) -> None:
    """Raises frames and, where all frames share them, pixels to `1 / (1 - pruning_ratio)` of what they are."""
    video_processor.max_frames = frame_budget(video_processor.max_frames, pruning_ratio)
    few, more = (_native_grid(video_processor, frames, 4096, 4096).prod() for frames in (64, 128))
    if more < 2 * few:
        size = dict(video_processor.size)
        video_processor.size = size | {"longest_edge": frame_budget(size["longest_edge"], pruning_ratio)}


class FrameReader:
    """
    Frames as a native video processor wants them. samples: whether it chooses them, or takes all there are; by default
    as its checkpoint says.
    """

    def __init__(self, video_processor: Any, samples: bool | None = None):
        if samples is None:
            # Qwen2.5-VL's class has this off, since its callers chose frames before: no checkpoint means it.
            samples = video_processor.do_sample_frames or not type(video_processor).do_sample_frames
        self.video_processor, self.samples = video_processor, samples
        self.limits: Any = [getattr(video_processor, name, default) for name, default in LIMITS.items()]

    def choose(self, metadata: VideoMetadata) -> list[int]:
        """Indices of the frames to show, by the processor's own rule; all where there are too few for one tubelet."""
        settings = self.video_processor
        if not self.samples or metadata.total_num_frames < settings.temporal_patch_size:
            return list(range(int(metadata.total_num_frames)))
        names = [name for name in settings.valid_kwargs.__annotations__ if name != "video_metadata"]
        call = {name: getattr(settings, name, None) for name in names}
        return np.asarray(settings.sample_frames(metadata=metadata, **call)).tolist()

    def read(self, video: Any, metadata: Any, index: int) -> tuple[torch.Tensor, STTSVideoMetadata]:
        """The frames to show `(T, 3, height, width)`, in their final size, and what is shown."""
        if isinstance(video, str):
            with VideoFile(getattr(video, "source", video), *self.limits) as file:
                chosen = self.choose(file.describe())
                size = self.size(len(chosen), *picture_size(file, chosen))
                frames, shown = file.read(chosen, size, self.resize)
            return self.fill(frames, shown)
        if isinstance(video, Image.Image):
            video = [video]
        if isinstance(video, list | tuple):  # of frames, pictures or paths of pictures
            if all(hasattr(frame, "shape") for frame in video):
                video = stacked(video, index)
            else:
                video = load_pictures(video, *self.limits)
        frames = frames_tensor(video, index, None)
        shown = checked_metadata(metadata, len(frames), index, self.samples)
        if shown.fps is None:
            shown.fps = float(self.video_processor.fps or 1)  # so that all are shown
        if self.samples:
            chosen = self.choose(shown)
            frames = frames[chosen]
            shown.choose(chosen)
        size = self.size(len(frames), *frames.shape[-2:])
        return self.fill(torch.stack([self.resize(frame, size) for frame in frames]), shown)

    def size(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        """Height and width that the processor gives so many frames of this size."""
        if not self.video_processor.do_resize:
            return height, width
        _, rows, columns = _native_grid(self.video_processor, num_frames, height, width).tolist()
        return rows * self.video_processor.patch_size, columns * self.video_processor.patch_size

    def resize(self, picture: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        """A picture (3, height, width) in another size, by the very steps of native preprocessing."""
        settings, wanted = self.video_processor, SizeDict(height=size[0], width=size[1])
        return TorchvisionBackend.resize(settings, image=picture, size=wanted, resample=settings.resample)

    def fill(self, frames: torch.Tensor, shown: STTSVideoMetadata) -> tuple[torch.Tensor, STTSVideoMetadata]:
        """The same for a video that has too few frames for one tubelet: the last one stays on."""
        lacking = self.video_processor.temporal_patch_size - len(frames)
        if lacking > 0:
            frames = torch.cat([frames, frames[-1:].expand(lacking, -1, -1, -1)])
        return frames, shown


def stacked(frames: Sequence[Any], index: int) -> Any:
    """The array or tensor of a video that is a list of its frames."""
    if len({tuple(frame.shape) for frame in frames}) != 1:
        shapes = sorted({tuple(frame.shape) for frame in frames})
        raise ValueError(f"videos[{index}] has frames of the shapes {shapes}. Pass at least one, and all of one shape.")
    return np.stack(frames) if isinstance(frames[0], np.ndarray) else torch.stack(list(frames))


def picture_size(file: VideoFile, indices: Sequence[int]) -> tuple[int, int]:
    """Height and width of the frames as they are shown, which no header says for sure; decodes one of them."""
    try:
        frames, _ = file.read(indices[:1])
    except ValueError:  # it is damaged
        frames, _ = file.read(indices)
    return frames.shape[-2], frames.shape[-1]


def _native_grid(video_processor: Any, num_frames: int, height: int, width: int) -> torch.Tensor:
    """The grid (3,) in patches that the processor makes of such frames, which have no pixels here."""
    num_frames = max(num_frames, video_processor.temporal_patch_size)
    frames = torch.empty(num_frames, 3, height, width, dtype=torch.uint8, device="meta")
    made = video_processor([frames], do_sample_frames=False, video_metadata=[{"total_num_frames": num_frames}])
    return torch.as_tensor(made["video_grid_thw"])[0]


def counted(shown: STTSVideoMetadata) -> VideoMetadata:
    """
    The same for a native processor, which takes a frame's index over `fps` for its time: where that is not so, since
    the rate varies, in place of the index what gives the true time.
    """
    indices: list[Any] = list(shown.frames_indices or [])
    fps = shown.fps or 1.0
    places = [time * fps for time in shown.timestamps]
    if any(abs(place - index) > _COUNTED for place, index in zip(places, indices, strict=True)):
        indices = places
    return VideoMetadata(shown.total_num_frames, fps, duration=shown.duration, frames_indices=indices)


def probe(processor: Any, video: Any) -> tuple[torch.Tensor, STTSVideoMetadata]:
    """
    The entry of a video file in what the processor calls grids, (3,), and which frames it shows; at most one frame is
    decoded. Where frames turn out to be damaged, fewer are shown.
    """
    settings = processor.video_processor
    if reads_files(processor):
        shown = settings.probe(video)
        return torch.tensor([len(shown.frames_indices), *settings.block_grid]), shown
    reader = FrameReader(settings)
    with VideoFile(video, *reader.limits) as file:
        chosen = reader.choose(file.describe())
        grid = _native_grid(settings, len(chosen), *picture_size(file, chosen))
        return grid, file.describe(chosen)


def download_limits(processor: Any) -> tuple[int, float]:
    """Most bytes and seconds of a download."""
    max_bytes, max_seconds = (getattr(processor.video_processor, name, default) for name, default in LIMITS.items())
    return int(max_bytes), max_seconds


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
