"""Answers for several visitors at once: whose clips are held, what may be asked about, and how far an answer is."""

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Generator, Hashable, Mapping
from pathlib import Path
from typing import Any

from stts_hf.inference.assistant import VideoAssistant
from stts_hf.inference.clip import Clip
from stts_hf.inference.requests import Answer, check_question
from stts_hf.modeling.video_reading_stts import VideoFile
from stts_hf.video.processors import measure


@dataclasses.dataclass(frozen=True)
class Limits:
    """
    What a visitor may use. upload_mb: megabytes of a file. seconds: of a clip. pixels: of a frame. clips: held at once,
    of all visitors together; 0 holds none. answers: written at once, the others wait. new_tokens: of an answer.
    """

    upload_mb: int = 200
    seconds: float = 600.0
    pixels: int = 4096 * 2304
    clips: int = 4
    answers: int = 2
    new_tokens: int = 64
    question: int = 1000  # characters


@dataclasses.dataclass(frozen=True)
class Progress:
    """
    How far an answer is.

    Attributes:
        seen: what the model saw, `Clip.seen`.
        selector, pruning_ratio: what the clip was watched with.
        held: whether it was held since an earlier question.
        watching: seconds from question to watched clip: reading the file, encoding and prefill. 0 where it was held.
        first_word: seconds from question to first piece of the answer, None before that.
        text: the answer so far.
    """

    seen: Answer
    selector: str
    pruning_ratio: float
    held: bool
    watching: float
    first_word: float | None = None
    text: str = ""


class HeldClips:
    """At most `most` clips of all visitors: the one asked about longest ago goes first. For several threads."""

    def __init__(self, most: int):
        self.most = most
        self._clips: dict[tuple[str, Hashable], Clip] = {}  # the last one asked about at the end
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._clips)

    def find(self, owner: str, key: Hashable) -> Clip | None:
        """The clip, which is asked about now."""
        with self._lock:
            clip = self._clips.pop((owner, key), None)
            if clip is not None:
                self._clips[owner, key] = clip
            return clip

    def hold(self, owner: str, key: Hashable, clip: Clip) -> None:
        # A clip that leaves is not released here: an answer about it may be under way. It goes with its last user.
        with self._lock:
            self._clips[owner, key] = clip
            while len(self._clips) > self.most:
                del self._clips[next(iter(self._clips))]

    def let_go(self, owner: str | None = None) -> None:
        """Lets the clips of an owner go, or all."""
        with self._lock:
            self._clips = {key: clip for key, clip in self._clips.items() if owner not in (None, key[0])}


def check_video(path: str | Path, limits: Limits) -> None:
    """Raises `ValueError` for what is no video, and for a longer or larger one than may be asked about."""
    with VideoFile(str(path)) as file:
        if file.duration > limits.seconds:
            lasts = math.ceil(10 * file.duration) / 10  # rounded up, so that it is above the limit
            raise ValueError(
                f"The video lasts {lasts:,.1f} s, but at most {limits.seconds:,.1f} s are taken here. Cut it."
            )
        height, width = measure(file, [0])
    if height * width > limits.pixels:
        raise ValueError(
            f"The video has frames of {width} x {height}, but at most {limits.pixels:,} pixels are taken "
            "here. Make it smaller."
        )


class Answerer:
    """
    Answers questions of several visitors, each about clips of their own.

    assistants: for each selector that can be chosen. limits: what visitors may use. processing: which frames are looked
    at, as `VideoAssistant.watch` takes it.
    """

    def __init__(
        self, assistants: Mapping[str, VideoAssistant], limits: Limits, processing: Mapping[str, Any] | None = None
    ):
        self.assistants, self.limits, self.processing = dict(assistants), limits, processing
        self.clips = HeldClips(limits.clips)

    def check(self, owner: str, video: str, question: str, pruning_ratio: float, selector: str) -> None:
        """
        Checks what `answer` is to be given. Raises `TypeError` or `ValueError`: there is no such file, it is no video,
        or a longer one than may be; or the question is too long, empty or holds tokens of the model's own.
        """
        check_question(self.assistants[selector].processor, question)
        if len(question) > self.limits.question:
            raise ValueError(f"The question has {len(question)} letters, but at most {self.limits.question} are taken.")
        if self.clips.find(owner, (video, pruning_ratio, selector)) is None:
            check_video(video, self.limits)

    def answer(
        self, owner: str, video: str, question: str, pruning_ratio: float, selector: str
    ) -> Generator[Progress, None, None]:
        """
        Answers a question, piece by piece; closing the iterator ends the answer. The clip is watched unless it is held.

        Args:
            owner: whose clip it is.
            video: path of the file.
            question: text.
            pruning_ratio: share `k` of video tokens to drop.
            selector: one of those of `assistants`.
        """
        started = time.perf_counter()
        key = (video, pruning_ratio, selector)
        clip = self.clips.find(owner, key)
        held = clip is not None
        if clip is None:
            clip = self.assistants[selector].watch(video, pruning_ratio=pruning_ratio, processing=self.processing)
            self.clips.hold(owner, key, clip)
        watching = 0.0 if held else time.perf_counter() - started
        progress = Progress(clip.seen, selector, pruning_ratio, held, watching)
        yield progress
        with contextlib.closing(clip.stream(question, max_new_tokens=self.limits.new_tokens)) as pieces:
            for piece in pieces:
                first_word = progress.first_word or time.perf_counter() - started
                progress = dataclasses.replace(progress, text=progress.text + piece, first_word=first_word)
                yield progress
