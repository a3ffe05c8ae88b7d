"""Answers for several visitors at once: clips that are kept between questions, limits, and progress."""

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
from stts_hf.modeling.budget_stts import KeepRule
from stts_hf.modeling.video_reading_stts import VideoFile
from stts_hf.video.processors import measure


@dataclasses.dataclass(frozen=True)
class Limits:
    """
    Maximum values. upload_mb: megabytes of a file. seconds: of a video. pixels: of a frame. clips: held at once for all
    visitors; 0 holds none. answers: generated at once; others wait. new_tokens: of an answer. question: characters.
    """

    upload_mb: int = 200
    seconds: float = 600.0
    pixels: int = 4096 * 2304
    clips: int = 4
    answers: int = 2
    new_tokens: int = 64
    question: int = 1000


@dataclasses.dataclass(frozen=True)
class Progress:
    """
    An answer so far.

    Attributes:
        seen: `Clip.seen`.
        selector, rule: that the video was read with; what the visitor leaves open, the model says.
        held: whether the clip was held since an earlier question.
        watching: seconds from the question to the read video (decoding, encoding, prefill); 0 if it was held.
        first_word: seconds from the question to the first piece of the answer; None before that.
        text: the answer so far.
    """

    seen: Answer
    selector: str
    rule: KeepRule
    held: bool
    watching: float
    first_word: float | None = None
    text: str = ""


class HeldClips:
    """At most `most` clips of all visitors; the least recently used goes first. Thread-safe."""

    def __init__(self, most: int):
        self.most = most
        self._clips: dict[tuple[str, Hashable], Clip] = {}  # the most recently used last
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._clips)

    def find(self, owner: str, key: Hashable) -> Clip | None:
        """The clip, which becomes the most recently used."""
        with self._lock:
            clip = self._clips.pop((owner, key), None)
            if clip is not None:
                self._clips[owner, key] = clip
            return clip

    def hold(self, owner: str, key: Hashable, clip: Clip) -> None:
        # The oldest clip is not released, as an answer about it may be running. The last reference frees it.
        with self._lock:
            self._clips[owner, key] = clip
            while len(self._clips) > self.most:
                del self._clips[next(iter(self._clips))]

    def let_go(self, owner: str) -> None:
        """Forgets the clips of an owner."""
        with self._lock:
            self._clips = {key: clip for key, clip in self._clips.items() if key[0] != owner}


def check_video(path: str | Path, limits: Limits) -> None:
    """Raises `ValueError` for a file that is no video or exceeds the limits."""
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
    """Answers questions of several visitors. assistants: by selector. processing: as in `VideoAssistant.watch`."""

    def __init__(
        self, assistants: Mapping[str, VideoAssistant], limits: Limits, processing: Mapping[str, Any] | None = None
    ):
        self.assistants, self.limits, self.processing = dict(assistants), limits, processing
        self.clips = HeldClips(limits.clips)

    def check(self, owner: str, video: str, question: str, rule: KeepRule, selector: str) -> None:
        """Raises `TypeError` or `ValueError` for arguments of `answer` that are refused."""
        check_question(self.assistants[selector].processor, question)
        if len(question) > self.limits.question:
            raise ValueError(f"The question has {len(question)} letters, but at most {self.limits.question} are taken.")
        if self.clips.find(owner, (video, rule, selector)) is None:
            check_video(video, self.limits)

    def answer(
        self, owner: str, video: str, question: str, rule: KeepRule, selector: str
    ) -> Generator[Progress, None, None]:
        """Answers a question, piece by piece; closing the iterator ends the answer. A held clip is not read again."""
        started = time.perf_counter()
        key = (video, rule, selector)
        clip = self.clips.find(owner, key)
        held = clip is not None
        if clip is None:
            keep: dict[str, Any] = {"pruning_ratio": rule.ratio, "score_threshold": rule.threshold}
            clip = self.assistants[selector].watch(video, processing=self.processing, **keep)
            self.clips.hold(owner, key, clip)
        watching = 0.0 if held else time.perf_counter() - started
        progress = Progress(clip.seen, selector, clip.rule, held, watching)
        yield progress
        with contextlib.closing(clip.stream(question, max_new_tokens=self.limits.new_tokens)) as pieces:
            for piece in pieces:
                first_word = progress.first_word or time.perf_counter() - started
                progress = dataclasses.replace(progress, text=progress.text + piece, first_word=first_word)
                yield progress
