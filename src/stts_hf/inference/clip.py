"""A video that the model reads once: the cache of a prompt's head (`engine.py`) serves any number of questions."""

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import torch
from transformers import TextIteratorStreamer

from stts_hf.data.encoding import Processor
from stts_hf.keeping import in_words, take_rule
from stts_hf.modeling.budget_stts import KEEP_ARGUMENTS
from stts_hf.modeling.settings_stts import check_vision_config
from stts_hf.modeling.video_processing_stts import check_count

from .generate import ReadHeads, answer_tails, fill_budget, generate_options, num_beams, read_heads
from .requests import Answer, Prepared, ask_about, prepare


class AnswerStream:
    """
    Iterates over pieces of an answer's text, of a character or more, as the model generates them.

    The model starts in a thread when the first piece is asked for; its errors are raised here too. Leaving early
    (`close()`, or simply dropping the stream) ends it at the next token.

    Attributes:
        answer: the whole `Answer` after the last piece; before that, and if the stream was left, None.
    """

    def __init__(self, processor: Processor, ask: Callable[..., Answer], *arguments: Any, **options: Any):
        """ask: called in the thread as `ask(*arguments, streamer=..., **options)`. turns: gets the answer too."""
        if "streamer" in options:
            raise TypeError("streamer is set by the stream itself. Leave it out, or call `ask` or `answer`.")
        self.answer: Answer | None = None
        self._turns: list[Answer] = options.pop("turns", [])
        # The generator must not reference `self`, or dropping the stream would not close it.
        self._pieces = _generate(processor, functools.partial(ask, *arguments, **options))

    def __iter__(self) -> "AnswerStream":
        return self

    def __next__(self) -> str:
        try:
            return next(self._pieces)
        except StopIteration as end:
            if end.value is not None:  # None once the stream has ended
                self.answer = end.value
                self._turns.append(end.value)
            raise

    def close(self) -> None:
        """Ends the answer where it is; returns when the model has stopped."""
        self._pieces.close()


class _Left(Exception):
    """The reader left the stream."""


class _Pieces(TextIteratorStreamer):
    """Queues text token by token, where transformers waits for spaces. Ends `generate` once the reader has left."""

    left = False

    def put(self, value: torch.Tensor) -> None:
        if self.left:
            raise _Left
        if self.next_tokens_are_prompt:
            self.next_tokens_are_prompt = False
            return
        self.token_cache.extend(value.flatten().tolist())
        text = str(self.tokenizer.decode(self.token_cache, **self.decode_kwargs))
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # half a character
            self.on_finalized_text(text[self.print_len :])
            self.print_len = len(text)


def _generate(processor: Processor, ask: Callable[..., Answer]) -> Generator[str, None, Answer]:
    """Yields the pieces, and returns the answer after the last one."""
    streamer = _Pieces(processor.tokenizer, skip_special_tokens=True)
    with ThreadPoolExecutor(1, "answer") as pool:
        future = pool.submit(ask, streamer=streamer)
        future.add_done_callback(lambda _: streamer.on_finalized_text("", stream_end=True))
        try:
            yield from (piece for piece in streamer if piece)
        finally:
            streamer.left = True
    return future.result()


class Clip:
    """
    A video that a model has read. What `VideoAssistant.watch` returns:

        with assistant.watch("clip.mp4") as clip:
            print(clip.ask("What happens?").answer)
            answers = clip.ask_all(["Who is there?", "Where is it?"])

    Answers equal those of a call with the video, up to rounding. An interrupted answer leaves the clip unchanged.
    Threads that ask one clip wait for each other; threads that ask different clips do not.

    Args:
        model, processor: an STTS model of any backbone, or one wrapped by PEFT, and its processor. A clip stays as it
            was read when settings or weights change.
        video: as the processor takes it.
        processing: options of the processor's call, such as `{"num_frames": 32, "test_time_scaling": True}`.
        keep: `pruning_ratio`, or `score_threshold` and the like, as in `answer_requests`; the model's by default.

    Attributes:
        seen: an `Answer` without question and answer; its `prompt_tokens` and `seconds` are those of reading the video.
        timestamps, grid, keep_mask, token_scores: those of `seen`.
        rule, pruning_ratio: those that the video was read with; the ratio is None with a threshold or a budget.

    Raises:
        TypeError: an option is for `generate`, not for reading a video.
        ValueError: the video cannot be read, or an option is out of range.
    """

    def __init__(
        self, model: Any, processor: Processor, video: Any, *, processing: Mapping[str, Any] | None = None, **keep: Any
    ):
        check_vision_config(model.config.vision_config)
        for name in (generate_options(keep).keys() & keep.keys()) - {*KEEP_ARGUMENTS}:
            raise TypeError(f"{name} is {keep[name]!r}, but reading a video generates nothing. Pass it to `ask`.")
        self.model, self.processor, self.rule = model, processor, take_rule(model.config, keep)
        self.pruning_ratio = self.rule.ratio
        self._lock, self._in_use = threading.RLock(), False
        request = dataclasses.replace(ask_about(processor, video, "?"), tail="", rule=self.rule)
        self._head = request.head
        prepared = prepare(processor, processing, request)
        started = time.perf_counter()
        prepared = fill_budget(model, processor, processing, prepared)
        heads = read_heads(model, processor, [prepared], **Prepared.arguments([prepared]))
        if any(heads.cache.is_sliding):
            raise ValueError(
                "The model attends within a sliding window (`use_sliding_window`), whose cache cannot be cut back to "
                "the video. Call `answer`, which reads the video for each question."
            )
        self._heads: ReadHeads | None = heads
        seen = dataclasses.replace(heads.begun[0], question="", seconds=time.perf_counter() - started)
        assert seen.keep_mask is not None  # there is a video
        assert seen.token_scores is not None
        self.seen, self.timestamps, self.grid = seen, seen.timestamps, seen.grid
        self.keep_mask, self.token_scores = seen.keep_mask, seen.token_scores

    def __repr__(self) -> str:
        video = self.seen.video if isinstance(self.seen.video, str) else type(self.seen.video).__name__
        kept = f"{self.seen.video_tokens_kept} of {self.seen.video_tokens} tokens kept"
        return f"Clip({video}, {self.seen.num_frames} frames, {kept}{'' if self.num_bytes else ', released'})"

    @property
    def num_bytes(self) -> int:
        """Memory that the clip holds on the model's device; 0 when it is released."""
        heads = self._heads  # another thread may release it
        return 0 if heads is None else heads.num_bytes

    def ask(self, question: str, *, after: Sequence[Answer] = (), **options: Any) -> Answer:
        """
        Answers a question about the video.

        Args:
            question: text.
            after: answers about this clip that come before it in a conversation, the first one first.
            options: of `model.generate`; by default greedy decoding of at most 256 tokens.

        Raises:
            TypeError, ValueError: the question is not text, is empty or holds a control token; an option is unknown;
                the clip was released.
        """
        (answer,) = self._answer([question], after, 1, options)
        return answer

    def ask_all(self, questions: Sequence[str], *, batch_size: int = 8, **options: Any) -> list[Answer]:
        """As `ask`, for several independent questions in batches; each question of a batch has a copy of the cache."""
        if isinstance(questions, str):
            raise TypeError("questions must be several, got one str; pass a list, or call `ask`.")
        check_count("batch_size", batch_size)
        return self._answer(list(questions), (), batch_size, options)

    def stream(self, question: str, *, after: Sequence[Answer] = (), **options: Any) -> AnswerStream:
        """As `ask`, piece by piece: an iterator of text, whose `answer` is there at its end."""
        return AnswerStream(self.processor, self.ask, question, after=after, **options)

    def dialogue(self) -> "Dialogue":
        """A new conversation about the video."""
        return Dialogue(self)

    def release(self) -> None:
        """Frees the memory once the current answer is complete. `seen` stays; asking is then an error."""
        with self._exclusive():
            self._heads = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def _answer(
        self, questions: Sequence[str], after: Sequence[Answer], batch_size: int, options: Mapping[str, Any]
    ) -> list[Answer]:
        if name := next((name for name in KEEP_ARGUMENTS if name in options), None):
            read_with = in_words(self.rule) if self.pruning_ratio is None else f"{self.pruning_ratio:g}"
            raise ValueError(
                f"{name} is {options[name]!r}, but the video was read with {read_with}. Call `watch` again to "
                "change it."
            )
        options = generate_options(options)
        if (beams := num_beams(self.model, options)) > 1:
            raise ValueError(f"num_beams is {beams}, but a clip takes 1. Pass num_beams=1, or call `answer`.")
        if any(not isinstance(turn, Answer) for turn in after):
            raise TypeError(f"after must hold answers of this clip, Answer, got {after!r:.80}.")
        asked = []
        for question in questions:
            request = ask_about(self.processor, self.seen.video, question, after)
            if request.head != self._head:
                raise ValueError(
                    "chat_template writes text before the video that changes with the conversation. Call `answer`."
                )
            asked.append((0, dataclasses.replace(self.seen, question=question), request.tail))
        with self._exclusive():
            heads = self._heads
            if heads is None:
                raise ValueError("The clip was released. Watch the video again.")
            heads.rewind()  # an earlier call may have been interrupted while it did so
            options |= {"started": time.perf_counter(), "keep": True}
            try:
                found = answer_tails(self.model, self.processor, heads, asked, batch_size, **options)
            finally:
                heads.rewind()
            return [dataclasses.replace(answer, tokens_read_before=heads.columns) for answer in found]

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Keeps other threads out. Raises `ValueError` within a call of this thread, whose cache it would change."""
        with self._lock:
            if self._in_use:
                raise ValueError(
                    "The clip is already answering in this thread, inside a streamer. Ask after that answer."
                )
            self._in_use = True
            try:
                yield
            finally:
                self._in_use = False


class Dialogue:
    """
    A conversation about a clip: each question comes after the earlier ones and their answers. Each turn reads the text
    again, but not the video, so a clip can have any number of dialogues.

    Attributes:
        clip: the clip.
        turns: the answers so far; later questions do not see a turn that is removed.
    """

    def __init__(self, clip: Clip):
        self.clip = clip
        self.turns: list[Answer] = []

    def ask(self, question: str, **options: Any) -> Answer:
        """As `Clip.ask`, after the turns so far. A question whose answer is interrupted is no turn."""
        answer = self.clip.ask(question, after=self.turns, **options)
        self.turns.append(answer)
        return answer

    def stream(self, question: str, **options: Any) -> AnswerStream:
        """As `Clip.stream`, after the turns so far; it becomes a turn when its last piece is taken."""
        clip = self.clip
        return AnswerStream(clip.processor, clip.ask, question, after=self.turns, turns=self.turns, **options)
