"""
Many prompts about videos and images, answered in batches: what several of them ask about is decoded, and read by the
model, once.

Chat templates put videos and images first. So a prompt is a head, which ends with its last video or image, and a tail
of text. Prompts with the same head take copies of what the cache holds after it, and their tails are answered together.
"""

import functools
import itertools
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stts_hf.modeling.generation_stts import resolve_setting
from stts_hf.shortages import in_halves, is_out_of_memory, too_large

from .answering import check_batch_size, decode_answers, inputs_for, join_prompts, processing_options
from .heads import read_heads, tokenize_tails
from .requests import PreparedHead, Request, decode_ahead

DECODE_TIMEOUT = 600.0  # seconds


@dataclass(frozen=True)
class PromptAnswer:
    """
    written: without special tokens and space around it. new_tokens: with the one that ends it. prompt_tokens: dropped
    video tokens included. seconds: of the model, for the whole batch, divided by its prompts. frames: shown, of all
    videos. damaged_frames: how many that should have been shown are damaged; the whole frame before each is shown.
    """

    written: str
    new_tokens: int
    prompt_tokens: int
    video_tokens: int
    video_tokens_kept: int
    seconds: float
    frames: int = 0
    damaged_frames: int = 0


@dataclass
class _Batch:
    """Places of prompts, by head."""

    heads: list[list[int]] = field(default_factory=list)

    @property
    def places(self) -> list[int]:
        return [place for head in self.heads for place in head]

    @property
    def shares(self) -> bool:
        """Whether heads are read apart from what follows them."""
        return any(len(head) > 1 for head in self.heads)


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
) -> Generator[tuple[int, PromptAnswer | Exception], None, None]:
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

    def answer(rows: Sequence[tuple[int, PreparedHead]], shares: bool) -> list[PromptAnswer]:
        """Answers to prompts, by their places, those of a head together."""
        heads = [list(rows) for _, rows in itertools.groupby(rows, key=lambda row: id(row[1]))]
        return answer_batch(
            *(model, processor, [[prompts[place] for place, _ in head] for head in heads]),
            *([head[0][1] for head in heads], batch_size),
            shares=shares,
            pruning_ratio=pruning_ratio,
            **generate_options,
        )

    def answers() -> Generator[tuple[int, PromptAnswer | Exception], None, None]:
        batches = list(make_batches(prompts, batch_size, share=not beams))
        tasks = ((prompts[head[0]], batch.shares) for batch in batches for head in batch.heads)
        ahead = max(batch_size, num_workers)
        with decode_ahead(processor, tasks, options, num_workers, ahead, decode_timeout) as decoded:
            for batch in batches:
                readable: list[tuple[int, PreparedHead]] = []
                for head, found in zip(batch.heads, decoded, strict=False):
                    if isinstance(found, Exception):
                        error = too_large(found) if is_out_of_memory(found) else found
                        yield from ((place, error) for place in head)
                    else:
                        readable.extend((place, found) for place in head)
                answered = in_halves(functools.partial(answer, shares=batch.shares), readable)
                yield from zip((place for place, _ in readable), answered, strict=True)

    return answers()


def make_batches(prompts: Sequence[Request], batch_size: int, share: bool = True) -> Iterator[_Batch]:
    """
    All prompts of a head in one batch, and as many heads of one kind (video, image, neither: they differ in length) as
    `batch_size` has room for, in the order of the heads. share: whether heads may be read once; else each prompt has
    its own.
    """
    heads: dict[Any, list[int]] = {}
    for place, prompt in enumerate(prompts):
        heads.setdefault(prompt.key if share else place, []).append(place)
    batches: dict[tuple[bool, bool], _Batch] = {}
    for head in heads.values():
        kind = bool(prompts[head[0]].videos), bool(prompts[head[0]].images)
        batch = batches.setdefault(kind, _Batch())
        if batch.heads and len(batch.places) + len(head) > batch_size:
            yield batch
            batch = batches[kind] = _Batch()
        batch.heads.append(head)
    yield from batches.values()


@torch.no_grad()
def answer_batch(
    model: Any,
    processor: Any,
    heads: Sequence[Sequence[Request]],
    prepared: Sequence[PreparedHead],
    batch_size: int,
    *,
    shares: bool,
    pruning_ratio: float,
    **generate_options: Any,
) -> list[PromptAnswer]:
    """
    Answers prompts, given by head, in this order. prepared: of each head. shares: whether that is of the heads alone;
    then they are read together, and at most `batch_size` prompts at once are answered behind them.
    """
    started = time.perf_counter()
    options = {"pruning_ratio": pruning_ratio, "return_dict_in_generate": True} | generate_options
    rows = [number for number, head in enumerate(heads) for _ in head]
    joined = join_prompts(processor, [head.inputs for head in prepared], "right" if shares else "left")
    if not shares:
        inputs = inputs_for(model, joined)
        output = model.generate(**inputs, **options)
        new = list(output.sequences[:, inputs["input_ids"].shape[1] :])
        mask, keep_mask = inputs["attention_mask"], output.get("keep_mask")
    else:
        read = read_heads(model, joined, pruning_ratio)
        tails = tokenize_tails(processor, [prompt.tail for head in heads for prompt in head])
        new, masks, keep_mask = [], [], read.keep_mask
        for start in range(0, len(rows), batch_size):
            some = torch.tensor(rows[start : start + batch_size])
            cache = read.take(some, keep=start + batch_size < len(rows))
            own = {name: tensor[start : start + batch_size] for name, tensor in tails.items()}
            found, asked = read.answer(model, cache, some, own, **options)
            new.extend(found)
            masks.append(asked["attention_mask"])
        mask = torch.cat(masks)
    kept = _count_video_tokens(keep_mask, [head.num_videos for head in prepared])
    lengths = mask.sum(-1).tolist()
    written = decode_answers(processor, new)
    seconds = (time.perf_counter() - started) / len(rows)
    ends = _end_tokens(model)
    return [
        PromptAnswer(
            words,
            _length(tokens, ends),
            length,
            *kept[row],
            seconds,
            prepared[row].frames,
            prepared[row].damaged_frames,
        )
        for words, tokens, length, row in zip(written, new, lengths, rows, strict=True)
    ]


def _count_video_tokens(keep_masks: Any, num_videos: Sequence[int]) -> list[tuple[int, int]]:
    """Video tokens before and after dropping, for each entry of `num_videos`; keep_masks: per video (T, n), or None."""
    masks = iter(keep_masks or [])
    found = [[next(masks) for _ in range(count)] if keep_masks else [] for count in num_videos]
    return [(sum(mask.numel() for mask in own), sum(int(mask.sum()) for mask in own)) for own in found]


def _end_tokens(model: Any) -> list[int]:
    ends = model.generation_config.eos_token_id
    return ends if isinstance(ends, list) else [ends]


def _length(tokens: torch.Tensor, ends: Sequence[int]) -> int:
    """Tokens up to the first that ends an answer, that one included."""
    return next((place for place, token in enumerate(tokens.tolist(), 1) if token in ends), len(tokens))
