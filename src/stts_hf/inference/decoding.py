"""Videos and images of prompts decoded ahead of the model, in a thread or in processes that may crash."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from PIL import Image
from transformers import BatchFeature
from transformers.image_utils import load_image

from stts_hf.data import frames
from stts_hf.data.encoding import open_image
from stts_hf.data.isolated import CannotStart, Isolated, ProcessDied
from stts_hf.data.prefetch import prefetch

from .inputs import StoredVideo

if TYPE_CHECKING:
    from .asking import Prompt

    Task = tuple[Prompt, bool]


@dataclass
class PreparedHead:
    """
    A head, or the one whole prompt that has it, decoded. inputs: of one row, as the processor gives them. frames,
    damaged_frames: of its videos.
    """

    inputs: BatchFeature
    num_videos: int
    frames: int
    damaged_frames: int


@contextlib.contextmanager
def decode_ahead(
    processor: Any,
    tasks: Iterable["Task"],
    options: Mapping[str, Any],
    num_workers: int,
    ahead: int,
    timeout: float | None = None,
) -> Iterator[Iterator[PreparedHead | Exception]]:
    """
    What `prepare_head` makes of tasks, prompts and whether their heads are prepared alone, or the error it raises.

    options: of the processor, for videos. num_workers: processes that decode; with 0 a thread of this one does. ahead:
    how many are decoded while the caller uses one. timeout: seconds that a process may take over one task.
    """
    prepare = functools.partial(_prepare, processor, options)

    def attempt(function: Callable[["Task"], PreparedHead], task: "Task") -> PreparedHead | Exception:
        try:
            return function(task)
        except CannotStart:
            raise
        except ProcessDied as error:
            sources = ", ".join(map(repr, task[0].sources))
            return ProcessDied(f"Decoding {sources:.200} failed: {error}")
        except Exception as error:  # decoders raise what they like
            return error

    with contextlib.ExitStack() as stack:
        isolated = Isolated(prepare, timeout) if num_workers else None
        call = functools.partial(attempt, isolated or prepare)
        results = prefetch(call, tasks, num_workers=max(num_workers, 1), ahead=ahead)
        decoded = stack.enter_context(contextlib.closing(results))
        if isolated is not None:
            stack.enter_context(isolated)  # left first: threads wait for the processes
        yield decoded


def _prepare(processor: Any, options: Mapping[str, Any], task: "Task") -> PreparedHead:
    prompt, alone = task
    return prepare_head(processor, prompt, options, alone=alone)


def prepare_head(processor: Any, prompt: "Prompt", options: Mapping[str, Any], *, alone: bool) -> PreparedHead:
    """Decodes the videos and images of a prompt. alone: whether its head is prepared without the tail."""

    def read_image(source: Any) -> Image.Image:
        return load_image(open_image(source, processor))

    videos = [video.load() if isinstance(video, StoredVideo) else video for video in prompt.videos]
    videos = [[read_image(picture) for picture in video] if isinstance(video, list) else video for video in videos]
    inputs = frames.process(
        processor,
        text=[prompt.head if alone else prompt.head + prompt.tail],
        videos=videos or None,
        images=[read_image(image) for image in prompt.images] or None,
        return_tensors="pt",
        **(options if videos else {}),
    )
    shown = inputs.pop("video_metadata", None) or []
    damaged = sum(getattr(metadata, "num_damaged", 0) for metadata in shown)
    return PreparedHead(inputs, len(videos), sum(len(metadata.timestamps) for metadata in shown), damaged)
