"""
What the engine is asked: prompts with their videos and images, decoded ahead of the model, in a thread or in processes
that may crash.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image
from transformers import BatchFeature
from transformers.image_utils import load_image

from stts_hf.data.encoding import check_texts, open_image
from stts_hf.data.isolated import CannotStart, Isolated, ProcessDied
from stts_hf.data.prefetch import prefetch

from .answering import Answer, read_media
from .inputs import StoredVideo


@dataclass(frozen=True)
class Request:
    """
    One conversation in the words of the chat template, up to where the answer begins.

    head: up to the end of the last video or image, "" where there is none. tail: the rest. videos, images: in the
    order of the placeholders: paths, URLs or bytes, images also PIL images; a video may be a list of images.
    """

    head: str
    tail: str
    videos: tuple[Any, ...] = ()
    images: tuple[Any, ...] = ()

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for prompts whose heads are the same; of media that are no texts, where they are the same objects."""
        media = (source if isinstance(source, str) else id(source) for source in self.sources)
        return (self.head, len(self.videos), *media) if self.head else (self.tail, id(self))

    @property
    def sources(self) -> tuple[Any, ...]:
        """Videos, then images."""
        return (*self.videos, *self.images)


Task = tuple[Request | Exception, bool]  # or what is wrong with it, and whether its head is prepared alone


def make_request(
    processor: Any, messages: Sequence[Mapping[str, Any]], videos: Sequence[Any] = (), images: Sequence[Any] = ()
) -> Request:
    """
    Renders a conversation; `messages` hold parts `{"type": "video"}` and `{"type": "image"}` where media stand.

    Raises:
        ValueError: a text holds a token that stands for images, videos or turns.
    """
    check_texts(processor, messages)
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ends = [text.rfind(token) + len(token) for token in (processor.video_token, processor.image_token) if token in text]
    end = max(ends, default=0)
    # With what closes it: only that token says where the text goes on behind a video whose last tokens may be dropped.
    closing = getattr(processor, "vision_end_token", "<|vision_end|>")
    end += len(closing) if end and text.startswith(closing, end) else 0
    return Request(text[:end], text[end:], tuple(videos), tuple(images))


@dataclass
class PreparedHead:
    """A head, or the one whole prompt that has it, decoded. inputs: of one row, as the processor gives them."""

    begun: Answer
    inputs: BatchFeature


@contextlib.contextmanager
def decode_ahead(
    processor: Any,
    tasks: Iterable[Task],
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

    def attempt(function: Callable[[Task], PreparedHead], task: Task) -> PreparedHead | Exception:
        if isinstance(task[0], Exception):
            return task[0]
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


def _prepare(processor: Any, options: Mapping[str, Any], task: Task) -> PreparedHead:
    prompt, alone = task
    assert isinstance(prompt, Request)
    return prepare_head(processor, prompt, options, alone=alone)


def prepare_head(processor: Any, prompt: Request, options: Mapping[str, Any], *, alone: bool) -> PreparedHead:
    """Decodes the videos and images of a prompt. alone: whether its head is prepared without the tail."""

    def read_image(source: Any) -> Image.Image:
        return load_image(open_image(source, processor))

    videos = [video.load() if isinstance(video, StoredVideo) else video for video in prompt.videos]
    videos = [
        [read_image(picture) for picture in video]
        if isinstance(video, list) and not any(hasattr(picture, "shape") for picture in video)
        else video
        for video in videos
    ]
    text = prompt.head if alone else prompt.head + prompt.tail
    images = [read_image(image) for image in prompt.images]
    return PreparedHead(*read_media(processor, text, videos, images, options=options))
