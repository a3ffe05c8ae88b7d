"""
A video that the model has read once, for as many questions as there are.

What pruning keeps does not depend on the text, and chat templates put the video first. So encoding the video and the
language model's pass over it are the same for every question, and what the cache holds after them is kept.
"""

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from tqdm import tqdm

from stts_hf.modeling.generation_stts import resolve_setting
from stts_hf.modeling.settings_stts import PruningSettings, check_pruning_ratio, check_vision_config

from .answering import Answer, check_batch_size, check_question, conversation, decode_answers, read_video
from .heads import ReadHeads, read_heads, tokenize_tails
from .options import generate_options
from .requests import make_request
from .streaming import AnswerStream


class Clip:
    """
    A video that a model has read. What `VideoAssistant.watch` returns:

        with assistant.watch("clip.mp4") as clip:
            print(clip.ask("What happens?").answer)
            answers = clip.ask_all(["Who is there?", "Where is it?"])

    Every answer is that of a call with the video, up to rounding. An answer that is interrupted leaves the clip as it
    was. Threads that ask one clip wait for each other; those that ask clips of their own do not.

    Args:
        model: an STTS model of any backbone, or one wrapped by PEFT. It must stay as it is: a clip does not notice
            other weights.
        processor: its processor.
        video: as the processor takes it.
        pruning_ratio: share `k` of video tokens to drop; the model's by default.
        processing: options of the processor's call, such as `{"num_frames": 32, "test_time_scaling": True}`.

    Attributes:
        seen: an `Answer` without question and answer. Its `timestamps`, `grid`, `keep_mask` (T, n) and
            `token_scores` (T, n) are also the clip's own; `prompt_tokens` and `seconds` are those of reading it.
        pruning_ratio: what it was read with.

    Raises:
        ValueError: the video cannot be read or an argument is out of range.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        video: Any,
        *,
        pruning_ratio: float | None = None,
        processing: Mapping[str, Any] | None = None,
    ):
        check_vision_config(model.config.vision_config)
        own = model.config.vision_config.pruning_ratio
        self.pruning_ratio = check_pruning_ratio(own if pruning_ratio is None else pruning_ratio)
        self.model, self.processor = model, processor
        self._settings = settings_of(model)
        if pruning_ratio is not None:
            del self._settings["pruning_ratio"]  # it does not come from the model
        self._lock = threading.Lock()
        self._asked_by: int | None = None  # the thread
        self._head = make_request(processor, conversation("?")).head
        begun, inputs = read_video(
            processor, video, self._head, pruning_ratio=self.pruning_ratio, processing=processing
        )
        started = time.perf_counter()
        heads = read_heads(model, inputs, self.pruning_ratio)
        if any(heads.cache.is_sliding):
            raise ValueError(
                "The model attends within a sliding window (`use_sliding_window`), whose cache cannot be cut back to "
                "the video. Call `answer`, which reads the video for each question."
            )
        assert heads.keep_mask is not None  # there is a video
        assert heads.token_scores is not None
        self._heads: ReadHeads | None = heads
        self.seen = dataclasses.replace(
            begun,
            keep_mask=heads.keep_mask[0].cpu(),
            token_scores=heads.token_scores[0].float().cpu(),
            seconds=time.perf_counter() - started,
        )

    @property
    def timestamps(self) -> tuple[float, ...]:
        return self.seen.timestamps

    @property
    def grid(self) -> tuple[int, int]:
        return self.seen.grid

    @property
    def keep_mask(self) -> torch.Tensor:
        assert self.seen.keep_mask is not None
        return self.seen.keep_mask

    @property
    def token_scores(self) -> torch.Tensor:
        assert self.seen.token_scores is not None
        return self.seen.token_scores

    @property
    def _name(self) -> str:
        video = self.seen.video  # bytes and frames would be spelled out
        return repr(os.fspath(video)) if isinstance(video, str | os.PathLike) else f"<{type(video).__name__}>"

    @property
    def num_bytes(self) -> int:
        """Memory that the clip holds on the model's device; 0 when it is released."""
        heads = self._heads  # another thread may let it go
        return 0 if heads is None else heads.num_bytes

    def ask(self, question: str, *, after: Sequence[Answer] = (), **options: Any) -> Answer:
        """
        Answers a question about the video.

        Args:
            question: text.
            after: answers about this clip that come before it in a conversation, the first one first.
            options: of `model.generate`; without any the likeliest answer, of at most 256 tokens.

        Raises:
            TypeError, ValueError: the question is no text, is empty or holds tokens of the model's own; an option is
                unknown; the clip was released, or the model has other settings than when it read the clip.
        """
        (answer,) = self._answer([question], after, options)
        return answer

    def ask_all(self, questions: Sequence[str], *, batch_size: int = 8, **options: Any) -> list[Answer]:
        """
        Answers questions about the video in batches, each on its own. `batch_size` copies of what the clip holds are
        made meanwhile. Otherwise as `ask`.
        """
        if isinstance(questions, str):
            raise TypeError("questions must be several, got one str; pass a list, or call `ask`.")
        check_batch_size(batch_size)
        asked = list(questions)
        batches = [asked[start : start + batch_size] for start in range(0, len(asked), batch_size)]
        return [answer for batch in batches for answer in self._answer(batch, (), options)]

    def stream(self, question: str, *, after: Sequence[Answer] = (), **options: Any) -> AnswerStream:
        """As `ask`, piece by piece: an iterator of text, whose `answer` is there at its end."""
        return AnswerStream(self.processor, self.ask, question, after=after, **options)

    def dialogue(self) -> "Dialogue":
        """A new conversation about the video."""
        return Dialogue(self)

    def release(self) -> None:
        """Lets the memory go, after the answer that is being written. What was seen stays; asking is an error then."""
        with self._alone():
            self._heads = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def __repr__(self) -> str:
        seen = self.seen
        held = tqdm.format_sizeof(self.num_bytes, "B") if self.num_bytes else "released"
        kept = f"{seen.video_tokens_kept} of {seen.video_tokens} video tokens"
        return f"<Clip of {self._name}: {seen.num_frames} frames, {kept}, {held}>"

    def _answer(self, questions: Sequence[str], after: Sequence[Answer], options: Mapping[str, Any]) -> list[Answer]:
        """Answers questions in one batch."""
        if "pruning_ratio" in options:
            raise ValueError(
                f"pruning_ratio is {options['pruning_ratio']!r}, but the video was read with {self.pruning_ratio:g} "
                "before there was a question. Watch it with the other ratio."
            )
        options = generate_options(self.processor, options)
        beams = resolve_setting("num_beams", options, options.get("generation_config"), self.model.generation_config)
        if (beams or 1) > 1:
            raise ValueError(
                f"num_beams is {beams!r}, but beam search cannot go on with a clip. Pass num_beams=1, or call `answer`."
            )
        if any(not isinstance(turn, Answer) for turn in after):
            raise TypeError(f"after must hold answers of this clip, Answer, got {after!r:.80}.")
        tails = []
        for question in questions:
            check_question(self.processor, question)
            prompt = make_request(self.processor, conversation(question, after))
            if prompt.head != self._head:
                raise ValueError(
                    "chat_template puts something before the video that changes with the conversation. Call `answer`."
                )
            tails.append(prompt.tail)
        tokens = tokenize_tails(self.processor, tails)
        rows = torch.zeros(len(tails), dtype=torch.long)
        with self._going_on() as heads:
            started = time.perf_counter()
            cache = heads.cache if len(tails) == 1 else heads.take(rows, keep=True)
            new, prompts = heads.answer(self.model, cache, rows, tokens, **options)
            seconds = (time.perf_counter() - started) / len(tails)
        written = decode_answers(self.processor, new)
        return [
            dataclasses.replace(
                self.seen,
                question=question,
                answer=words,
                prompt_tokens=length,
                tokens_read_before=heads.columns,
                seconds=seconds,
            )
            for question, words, length in zip(
                questions, written, prompts["attention_mask"].sum(-1).tolist(), strict=True
            )
        ]

    @contextlib.contextmanager
    def _going_on(self) -> Iterator[ReadHeads]:
        """What the clip holds, for one call, however that ends."""
        with self._alone():
            heads = self._heads
            if heads is None:
                raise ValueError(f"The clip of {self._name} was released. Watch the video again.")
            now = settings_of(self.model)
            for name, value in self._settings.items():
                if now[name] != value:
                    raise ValueError(
                        f"{name} of the model was {value!r} when it read the clip, and is {now[name]!r} now. Watch the "
                        "video again, or set it back."
                    )
            heads.rewind()  # also what an earlier call left that was interrupted while it ended
            try:
                yield heads
            finally:
                heads.rewind()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keeps other threads out. Raises `ValueError` within a call of this thread, which would wait for itself."""
        if self._lock.locked() and self._asked_by == threading.get_ident():
            raise ValueError("The clip is answering in this very thread, within a streamer. Ask it when that is done.")
        with self._lock:
            self._asked_by = threading.get_ident()
            try:
                yield
            finally:
                self._asked_by = None


class Dialogue:
    """
    A conversation about a clip: each question is asked with those before it and their answers. The text is read anew
    each time, the video is not, so any number of dialogues may go on about one clip.

    Attributes:
        clip: what it is about.
        turns: the answers so far. What is taken out of it was never said.
    """

    def __init__(self, clip: Clip):
        self.clip = clip
        self.turns: list[Answer] = []

    def ask(self, question: str, **options: Any) -> Answer:
        """As `Clip.ask`, after the turns so far. A question whose answer is interrupted was not asked."""
        answer = self.clip.ask(question, after=self.turns, **options)
        self.turns.append(answer)
        return answer

    def stream(self, question: str, **options: Any) -> AnswerStream:
        """As `Clip.stream`, after the turns so far; it becomes a turn when its last piece is taken."""
        clip = self.clip
        return AnswerStream(clip.processor, clip.ask, question, after=self.turns, turns=self.turns, **options)


def settings_of(model: Any) -> dict[str, Any]:
    """What a model goes by when it reads a video, and where it is."""
    vision = model.config.vision_config
    settings = {field.name: getattr(vision, field.name) for field in dataclasses.fields(PruningSettings)}
    settings["pruned_position_ids"] = model.config.pruned_position_ids
    return settings | {"device": str(model.device), "dtype": str(model.dtype)}
