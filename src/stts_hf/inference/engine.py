"""
Many prompts about videos and images, answered in batches: what several of them ask about is decoded, and read by the
model, once.

Chat templates put videos and images first. So a prompt is a head, which ends with its last video or image, and a tail
of text. Prompts with the same head take copies of what the cache holds after it, and their tails are answered together.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch

from stts_hf.modeling.generation_stts import resolve_setting
from stts_hf.modeling.settings_stts import check_pruning_ratio, check_vision_config
from stts_hf.shortages import in_halves, is_out_of_memory, too_large

from .answering import (
    Answer,
    answer_prepared,
    check_batch_size,
    check_question,
    complete,
    conversation,
    join_prompts,
    processing_options,
    with_masks,
)
from .heads import read_heads, tokenize_tails
from .requests import PreparedHead, Request, Task, decode_ahead, make_request

Item = TypeVar("Item")
_Row = tuple[int, Request, PreparedHead]  # with its place, and what its head became
DECODE_TIMEOUT = 600.0  # seconds


@dataclass
class _Batch:
    """Requests and their places, by head."""

    heads: list[list[tuple[int, Request | Exception]]] = field(default_factory=list)

    @property
    def num_requests(self) -> int:
        return sum(map(len, self.heads))

    @property
    def shares(self) -> bool:
        """Whether heads are read apart from what follows them."""
        return any(len(head) > 1 for head in self.heads)


def answer_videos(
    model: Any,
    processor: Any,
    videos: Iterable[Any],
    question: str | Iterable[str],
    *,
    pruning_ratio: float | None = None,
    batch_size: int = 1,
    processing: Mapping[str, Any] | None = None,
    on_error: Literal["raise", "return"] = "raise",
    **generate_options: Any,
) -> Generator[Answer, None, None]:
    """Answers a question about each video, one after the other; a thread decodes the next ones meanwhile.

        for answer in answer_videos(model, processor, paths, "What happens?", max_new_tokens=64, on_error="return"):
            print(answer.video, answer.answer or answer.error)

    Answers come in the order of the videos, each as soon as it, and others of its batch, are there.

    Args:
        model: an STTS model of any backbone, or one wrapped by PEFT.
        processor: its processor.
        videos: paths, URLs, the bytes of files, or arrays of frames, as the processor takes them; need not end.
        question: one for all videos, or one for each.
        pruning_ratio: share `k` of video tokens to drop; the checkpoint's by default.
        batch_size: videos that the model answers about at once, padded to the longest. By default one: its prompt of
            thousands of tokens fills a device. 64 frames at 378 pixels take 110 MB, and as many wait as are in a batch.
        processing: options of the processor's call, such as `{"num_frames": 32, "test_time_scaling": True}`.
        on_error: "raise" ends with the error at a video that cannot be read, or that does not fit into memory alone;
            "return" yields an `Answer` with that `error` in its place and continues.
        generate_options: of `model.generate`, such as `max_new_tokens`; its first sequence is the answer.

    Yields:
        An `Answer` for each video. Leaving it early (`close()`, or simply dropping it) starts no more videos.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range; there are more or fewer questions than
            videos, which shows at the end of the shorter list. What the model itself raises comes through and ends the
            iteration.
    """
    check_vision_config(model.config.vision_config)
    ratio = check_pruning_ratio(model.config.vision_config.pruning_ratio if pruning_ratio is None else pruning_ratio)
    _check_batch(videos, batch_size, on_error, generate_options)
    if isinstance(question, str):
        pairs: Iterator[tuple[Any, str]] = ((video, question) for video in videos)
    else:
        pairs = zip(videos, question, strict=True)
    asked: deque[tuple[Any, str]] = deque()

    def requests() -> Iterator[Request | Exception]:
        for pair in pairs:
            asked.append(pair)
            yield _request_about(processor, *pair)

    def answers() -> Generator[Answer, None, None]:
        options = processing_options(processor, processing, ratio)
        batches = _in_turn(requests(), batch_size)
        found: dict[int, Answer | Exception] = {}
        answered = _answer_batches(
            model, processor, batches, options, batch_size=batch_size, pruning_ratio=ratio, **generate_options
        )
        with contextlib.closing(answered):
            turn = 0
            for place, answer in answered:
                found[place] = answer
                while turn in found:
                    yield _named(found.pop(turn), *asked.popleft(), on_error)
                    turn += 1

    return answers()


def _request_about(processor: Any, video: Any, question: str) -> Request | Exception:
    try:
        check_question(processor, question)
        return make_request(processor, conversation(question), [video])
    except Exception as error:
        return error


def _named(answer: Answer | Exception, video: Any, question: str, on_error: str) -> Answer:
    """The answer with what was asked. Raises the error where there is none, unless it is to be returned."""
    if not isinstance(answer, Exception):
        return dataclasses.replace(answer, video=video, question=question)
    if on_error == "raise":
        raise answer
    return Answer(video, question, error=answer)


def _check_batch(videos: Any, batch_size: Any, on_error: Any, generate_options: Mapping[str, Any]) -> None:
    if isinstance(videos, str | bytes | os.PathLike):
        raise TypeError(f"videos must be several, got one {type(videos).__name__}; pass a list, even of one video.")
    check_batch_size(batch_size)
    if (asked := generate_options.get("num_return_sequences")) not in (None, 1):
        raise ValueError(f"num_return_sequences is {asked}, but a video gets one answer; leave it out.")
    if on_error not in ("raise", "return"):
        raise ValueError(f"on_error must be 'raise' or 'return', got {on_error!r}.")


def answer_requests(
    model: Any,
    processor: Any,
    prompts: Sequence[Request],
    *,
    pruning_ratio: float,
    batch_size: int = 8,
    num_workers: int = 0,
    decode_timeout: float | None = DECODE_TIMEOUT,
    processing: Mapping[str, Any] | None = None,
    **generate_options: Any,
) -> Generator[tuple[int, Answer | Exception], None, None]:
    """
    Answers prompts in batches, while the next batch is decoded.

    Args:
        prompts: what `make_request` gives; those with one head are answered together, wherever they stand.
        pruning_ratio: share `k` of video tokens to drop.
        batch_size: most prompts that the model answers at once. As many videos wait decoded: 64 frames at 378 pixels
            take 110 MB.
        num_workers: processes that decode, which crash in place of this one; with 0 a thread of this one does.
        decode_timeout: seconds that a process may take to read the videos and images of a prompt, downloads included;
            None sets no limit. A thread cannot be stopped.
        processing: options of the processor for videos, such as `{"num_frames": 32, "test_time_scaling": True}`.
        generate_options: of `model.generate`.

    Yields:
        A prompt's place and its answer, or the error that kept a video or image of it from being read:
        `ProcessDied` where that ended its process, `MemoryError` where the machine or the device has too little memory
        for it alone. What else the model raises comes through and ends the iteration.
    """
    check_batch_size(batch_size)
    if not isinstance(num_workers, int) or num_workers < 0:
        raise ValueError(f"num_workers must be a whole number of at least 0, got {num_workers!r}.")
    options = processing_options(processor, processing, pruning_ratio)
    configs = generate_options.get("generation_config"), model.generation_config
    # Native beam search makes its own copies of a cache.
    beams = (resolve_setting("num_beams", generate_options, *configs) or 1) > 1

    return _answer_batches(
        model,
        processor,
        make_batches(prompts, batch_size, share=not beams),
        options,
        batch_size=batch_size,
        num_workers=num_workers,
        decode_timeout=decode_timeout,
        pruning_ratio=pruning_ratio,
        **generate_options,
    )


def _answer_batches(
    model: Any,
    processor: Any,
    batches: Iterable[_Batch],
    options: Mapping[str, Any],
    *,
    batch_size: int,
    num_workers: int = 0,
    decode_timeout: float | None = None,
    **generate_options: Any,
) -> Generator[tuple[int, Answer | Exception], None, None]:
    """Each place and its answer, or what is wrong; while a batch is answered the next is decoded, with `options`."""
    waiting: deque[_Batch] = deque()

    def tasks() -> Iterator[Task]:
        for batch in batches:
            waiting.append(batch)
            yield from ((head[0][1], batch.shares) for head in batch.heads)

    def answer(rows: Sequence[_Row], shares: bool) -> list[Answer]:
        """Answers to requests, those of a head together."""
        heads = [list(rows) for _, rows in itertools.groupby(rows, key=lambda row: id(row[2]))]
        tails = [[request.tail for _, request, _ in head] for head in heads]
        prepared = [head[0][2] for head in heads]
        return answer_batch(model, processor, tails, prepared, batch_size, shares=shares, **generate_options)

    ahead = max(2, batch_size, num_workers)
    with decode_ahead(processor, tasks(), options, num_workers, ahead, decode_timeout) as decoded:
        heads: deque[list[tuple[int, Any]]] = deque()
        for found, waited in _timed(decoded):
            if not heads:
                batch, rows = waiting.popleft(), list[_Row]()
                heads.extend(batch.heads)
            head = heads.popleft()
            if isinstance(found, Exception):
                error = too_large(found) if is_out_of_memory(found) else found
                yield from ((place, error) for place, _ in head)
            else:
                found.begun = dataclasses.replace(found.begun, seconds_waited=waited)
                rows.extend((place, request, found) for place, request in head)
            if not heads:
                answered = in_halves(functools.partial(answer, shares=batch.shares), rows)
                yield from zip((place for place, *_ in rows), answered, strict=True)


def _timed(items: Iterator[Item]) -> Iterator[tuple[Item, float]]:
    """Each item, and the seconds that it was waited for."""
    while True:
        started = time.perf_counter()
        try:
            item = next(items)
        except StopIteration:
            return
        yield item, time.perf_counter() - started


def _in_turn(requests: Iterator[Request | Exception], batch_size: int) -> Iterator[_Batch]:
    """Batches of requests in their order, none of which share a head."""
    places = itertools.count()
    while some := list(itertools.islice(requests, batch_size)):
        yield _Batch([[(next(places), request)] for request in some])


def make_batches(prompts: Sequence[Request], batch_size: int, share: bool = True) -> Iterator[_Batch]:
    """
    All prompts of a head in one batch, and as many heads of one kind (video, image, neither: they differ in length) as
    `batch_size` has room for, in the order of the heads. share: whether heads may be read once; else each prompt has
    its own.
    """
    heads: dict[Any, list[tuple[int, Request]]] = {}
    for place, prompt in enumerate(prompts):
        heads.setdefault(prompt.key if share else place, []).append((place, prompt))
    batches: dict[tuple[bool, bool], _Batch] = {}
    for head in heads.values():
        kind = bool(head[0][1].videos), bool(head[0][1].images)
        batch = batches.setdefault(kind, _Batch())
        if batch.heads and batch.num_requests + len(head) > batch_size:
            yield batch
            batch = batches[kind] = _Batch()
        batch.heads.append([*head])
    yield from batches.values()


@torch.no_grad()
def answer_batch(
    model: Any,
    processor: Any,
    tails: Sequence[Sequence[str]],
    prepared: Sequence[PreparedHead],
    batch_size: int,
    *,
    shares: bool,
    pruning_ratio: float,
    **generate_options: Any,
) -> list[Answer]:
    """
    Answers prompts, given by head, in this order. tails: behind each head. prepared: of each head. shares: whether that
    is of the heads alone; then they are read together, and at most `batch_size` prompts at once are answered behind
    them.
    """
    options = {"pruning_ratio": pruning_ratio} | generate_options
    if not shares:
        return answer_prepared(model, processor, [(head.begun, head.inputs) for head in prepared], **options)
    started = time.perf_counter()
    rows = [number for number, head in enumerate(tails) for _ in head]
    read = read_heads(model, join_prompts(processor, [head.inputs for head in prepared], "right"), pruning_ratio)
    tokens = tokenize_tails(processor, [tail for head in tails for tail in head])
    new: list[torch.Tensor] = []
    lengths: list[int] = []
    for start in range(0, len(rows), batch_size):
        some = torch.tensor(rows[start : start + batch_size])
        cache = read.take(some, keep=start + batch_size < len(rows))
        own = {name: tensor[start : start + batch_size] for name, tensor in tokens.items()}
        found, asked = read.answer(model, cache, some, own, **options)
        new.extend(found)
        lengths.extend(asked["attention_mask"].sum(-1).tolist())
    begun = with_masks([head.begun for head in prepared], read.keep_mask, read.token_scores)
    return complete(model, processor, [begun[row] for row in rows], new, lengths, started)
