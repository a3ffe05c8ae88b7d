"""
Many requests about videos and images, answered in batches while the next ones are decoded. What several requests of a
batch ask about is decoded, and read by the model, once.

Chat templates put videos and images first. So a prompt is a head, which ends with its last video or image, and a tail
of text. Requests with the same head take copies of the cache after it, and their tails are answered together.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

from stts_hf.data.encoding import Processor
from stts_hf.data.isolated import CannotStart, Isolated, ProcessDied
from stts_hf.data.prefetch import prefetch
from stts_hf.errors import in_halves, is_out_of_memory, too_large
from stts_hf.keeping import take_rule
from stts_hf.modeling.settings_stts import check_vision_config
from stts_hf.modeling.video_processing_stts import check_amount, check_count

from .generate import (
    answer_prepared,
    answer_tails,
    check_one_answer,
    fill_budget,
    join_prompts,
    num_beams,
    read_heads,
    score_blocks,
    with_masks,
)
from .requests import Answer, Prepared, Request, ask_about, prepare, processing_options

DECODE_TIMEOUT = 600.0  # seconds
Batch = list[list[tuple[int, Request]]]  # by head: requests and their indices


def answer_videos(
    model: Any,
    processor: Processor,
    videos: Iterable[Any],
    question: str | Iterable[str],
    *,
    on_error: Literal["raise", "return"] = "raise",
    batch_size: int = 1,
    **options: Any,
) -> Generator[Answer, None, None]:
    """
    Answers a question about each video, in their order, each as soon as its batch is answered; a thread decodes ahead.

        for answer in answer_videos(model, processor, paths, "What happens?", max_new_tokens=64, on_error="return"):
            print(answer.video, answer.answer or answer.error)

    Args:
        model, processor: an STTS model of any backbone, or one wrapped by PEFT, and its processor.
        videos: paths, URLs, the bytes of files, or arrays of frames, as the processor takes them; need not end.
        question: one for all videos, or one for each.
        on_error: "raise" ends with the error at a video that cannot be read, or that does not fit into memory alone;
            "return" yields an `Answer` with that `error` in its place and continues.
        batch_size: number of videos that the model answers about at once, padded to the longest. By default one: its
            prompt of thousands of tokens fills a device.
        options: of `answer_requests`: `pruning_ratio` or `score_threshold`, `processing`, and those of
            `model.generate`, such as `max_new_tokens`.

    Yields:
        An `Answer` for each video. Leaving it early (`close()`, or simply dropping it) starts no more videos.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range; there are more or fewer questions than
            videos, which shows at the end of the shorter list. What the model itself raises comes through and ends the
            iteration.
    """
    if isinstance(videos, str | bytes | os.PathLike):
        raise TypeError(f"videos must be several, got one {type(videos).__name__}; pass a list, even of one video.")
    if on_error not in ("raise", "return"):
        raise ValueError(f"on_error must be 'raise' or 'return', got {on_error!r}.")
    nothing: Any = object()
    pairs: Iterable[tuple[Any, str]] = itertools.zip_longest(videos, question, fillvalue=nothing)
    if isinstance(question, str):
        pairs = ((video, question) for video in videos)

    def requests() -> Iterator[Request]:
        for video, asked in pairs:
            if video is nothing or asked is nothing:
                number = "fewer" if asked is nothing else "more"
                raise ValueError(f"question has {number} entries than videos. Pass one for each video, or one for all.")
            try:
                request = ask_about(processor, video, asked)
            except Exception as error:
                request = Request("", "", (video,), question=asked, error=error)
            yield request

    found = answer_requests(model, processor, requests(), batch_size=batch_size, share=False, **options)

    def answers() -> Generator[Answer, None, None]:
        with contextlib.closing(found):
            for _, answer in found:
                if answer.error is not None and on_error == "raise":
                    raise answer.error
                yield answer

    return answers()


def answer_requests(
    model: Any,
    processor: Processor,
    requests: Iterable[Request],
    *,
    processing: Mapping[str, Any] | None = None,
    batch_size: int = 8,
    num_workers: int = 0,
    decode_timeout: float | None = DECODE_TIMEOUT,
    share: bool = True,
    scores_only: bool = False,
    **generate_options: Any,
) -> Generator[tuple[int, Answer], None, None]:
    """
    Answers requests in batches, while the next batch is decoded.

    Args:
        requests: of `make_request`.
        processing: options of the processor for videos, such as `{"num_frames": 32, "test_time_scaling": True}`.
        batch_size: maximum number of prompts that the model answers at once. As many videos wait decoded: 64 frames at
            378 pixels take 110 MB.
        num_workers: number of decoding processes, whose crashes do not end this one; with 0 a thread of this one
            decodes.
        decode_timeout: seconds that a process may take to read the videos and images of a request, downloads included;
            None sets no limit. A thread cannot be stopped.
        share: whether requests with one head are answered together, wherever they stand; takes all requests before the
            first answer. Otherwise answers come in the order of the requests, which need not end.
        scores_only: whether to end where the tower has scored; answers are without text then, and keep everything.
        generate_options: of `model.generate`; `pruning_ratio`, or `score_threshold` with `min_pruning_ratio` and
            `max_pruning_ratio`, and `video_token_budget`, of a request, say how many blocks stay, by default the model.

    Yields:
        A request's index and its answer. Its `error` is what kept a video or image from being read: `ProcessDied` if
        that ended its process, `MemoryError` if the machine or the device has too little memory for it alone. What
        else the model raises comes through and ends the iteration.
    """
    check_vision_config(model.config.vision_config)
    rule = take_rule(model.config, generate_options)
    check_count("batch_size", batch_size)
    check_count("num_workers", num_workers, least=0)
    if decode_timeout is not None:
        check_amount("decode_timeout", decode_timeout)
    check_one_answer(generate_options)
    processing_options(processor, processing, rule)  # raises for what no request could have
    requests = (one if one.rule is not None else dataclasses.replace(one, rule=rule) for one in requests)
    share = share and num_beams(model, generate_options) == 1
    batches = make_batches(requests, batch_size) if share else in_turn(requests, batch_size)
    answer = functools.partial(_answer_batch, model, processor, processing, batch_size=batch_size, **generate_options)
    answer = functools.partial(_score_batch, model, processor) if scores_only else answer
    decode = functools.partial(
        _decode_ahead,
        functools.partial(prepare, processor, processing),
        num_workers=num_workers,
        ahead=max(2, batch_size, num_workers),
        timeout=decode_timeout,
    )
    return _answer_batches(batches, decode, answer)


def make_batches(requests: Iterable[Request], batch_size: int) -> Iterator[Batch]:
    """Batches by head, with as many heads of one kind (video, image, neither) and rule as `batch_size` has room for."""
    heads: dict[Any, list[tuple[int, Request]]] = {}
    for index, request in enumerate(requests):
        heads.setdefault(request.key, []).append((index, request))
    batches: dict[Any, Batch] = {}
    for head in heads.values():
        kind = bool(head[0][1].videos), bool(head[0][1].images), head[0][1].rule
        batch = batches.setdefault(kind, [])
        if batch and sum(map(len, batch)) + len(head) > batch_size:
            yield batch
            batch = batches[kind] = []
        batch.append(head)
    yield from batches.values()


def in_turn(requests: Iterable[Request], batch_size: int) -> Iterator[Batch]:
    """Batches of requests in their order, of one rule each, and each request with its own head."""
    for _, numbered in itertools.groupby(enumerate(requests), key=lambda one: one[1].rule):
        while some := list(itertools.islice(numbered, batch_size)):
            yield [[one] for one in some]


def _answer_batches(
    batches: Iterable[Batch],
    decode: Callable[[Iterable[Request]], contextlib.AbstractContextManager[Iterator[Prepared]]],
    answer: Callable[[Sequence[tuple[Request, Prepared]]], list[Answer]],
) -> Generator[tuple[int, Answer], None, None]:
    """Each request's index and answer. decode: prepares requests ahead. answer: of prepared requests."""
    waiting: deque[Batch] = deque()

    def to_decode() -> Iterator[Request]:
        for batch in batches:
            waiting.append(batch)
            share = any(len(head) > 1 for head in batch)
            yield from (dataclasses.replace(head[0][1], tail="") if share else head[0][1] for head in batch)

    with decode(to_decode()) as decoded:
        for first in decoded:
            batch = waiting.popleft()
            prepared = [first, *itertools.islice(decoded, len(batch) - 1)]
            rows = [(*row, one) for head, one in zip(batch, prepared, strict=True) for row in head]
            read = [(request, one) for _, request, one in rows if one.begun.error is None]
            answers = iter(in_halves(answer, read))
            for index, request, one in rows:
                found = one.begun.error or next(answers)
                yield index, request.failed(found) if isinstance(found, Exception) else found


@contextlib.contextmanager
def _decode_ahead(
    prepare: Callable[[Request], Prepared],
    requests: Iterable[Request],
    num_workers: int,
    ahead: int,
    timeout: float | None,
) -> Iterator[Iterator[Prepared]]:
    """`prepare` of each request, or its error as an answer; `ahead` of them while the caller uses one."""
    isolated = Isolated(prepare, timeout) if num_workers else None

    def attempt(request: Request) -> Prepared:
        try:
            return (isolated or prepare)(request)
        except CannotStart:
            raise
        except ProcessDied as error:
            sources = ", ".join(map(repr, (*request.videos, *request.images)))
            return Prepared(request, request.failed(ProcessDied(f"Decoding {sources:.200} failed: {error}")))
        except Exception as error:  # decoders raise any type
            return Prepared(request, request.failed(too_large(error) if is_out_of_memory(error) else error))

    with contextlib.ExitStack() as stack:
        results = prefetch(attempt, requests, num_workers=max(num_workers, 1), ahead=ahead)
        decoded = stack.enter_context(contextlib.closing(results))
        if isolated is not None:
            stack.enter_context(isolated)  # left first: threads wait for the processes
        yield decoded


def _score_batch(model: Any, processor: Processor, rows: Sequence[tuple[Request, Prepared]]) -> list[Answer]:
    """Answers without text, whose videos keep all."""
    several = [prepared for _, prepared in rows]
    scores = score_blocks(model, join_prompts(processor, [one.inputs for one in several]))
    masks = [torch.ones_like(of_video, dtype=torch.bool) for of_video in scores]
    return with_masks(several, {"keep_mask": masks, "token_scores": scores})


@torch.no_grad()
def _answer_batch(
    model: Any,
    processor: Processor,
    processing: Mapping[str, Any] | None,
    rows: Sequence[tuple[Request, Prepared]],
    *,
    batch_size: int,
    **options: Any,
) -> list[Answer]:
    """Answers prepared requests of one rule; heads that were prepared alone are read once for all their tails."""
    started = time.perf_counter()
    places = {prepared: number for number, prepared in enumerate(dict.fromkeys(prepared for _, prepared in rows))}
    heads = [fill_budget(model, processor, processing, prepared) for prepared in places]
    keep = Prepared.arguments(heads)
    if heads[0].request.tail:
        return answer_prepared(model, processor, heads, started=started, **keep, **options)
    read = read_heads(model, processor, heads, **keep)
    asked = []
    for request, head in rows:
        number = places[head]
        asked.append((number, dataclasses.replace(read.begun[number], question=request.question), request.tail))
    return answer_tails(model, processor, read, asked, batch_size, started=started, **options)
