"""
Many prompts about videos and images, answered in batches: what several of them ask about is decoded, and read by the
model, once.

Chat templates put videos and images first. So a prompt is a head, which ends with its last video or image, and a tail
of text. Prompts with the same head take copies of what the cache holds after it, and their tails are answered together.
"""

import contextlib
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image
from transformers import BatchFeature
from transformers.image_utils import load_image

from stts_hf.data import frames
from stts_hf.data.encoding import find_control_token, open_image
from stts_hf.data.prefetch import prefetch

from .answering import check_batch_size, decode_answers, inputs_for, processing_options
from .heads import read_heads, tokenize_tails


@dataclass(frozen=True)
class Prompt:
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
        media = (source if isinstance(source, str) else id(source) for source in (*self.videos, *self.images))
        return (self.head, len(self.videos), *media) if self.head else (self.tail, id(self))


@dataclass(frozen=True)
class PromptAnswer:
    """
    written: without special tokens and space around it. new_tokens: with the one that ends it. prompt_tokens: dropped
    video tokens included. seconds: of the model, for the whole batch, divided by its prompts.
    """

    written: str
    new_tokens: int
    prompt_tokens: int
    video_tokens: int
    video_tokens_kept: int
    seconds: float


@dataclass
class PreparedPrompts:
    """
    A batch, decoded. inputs: of whole prompts, padded on the left, or, where `tails` are given, of the heads of `rows`,
    padded on the right. tails: `input_ids` and `attention_mask` (B, tokens), padded on the left. rows: (B,) the head of
    each prompt. num_videos: of each head.
    """

    inputs: BatchFeature
    rows: list[int]
    num_videos: list[int]
    tails: dict[str, torch.Tensor] | None = None


@dataclass
class _Batch:
    """Places of prompts, by head."""

    heads: list[list[int]] = field(default_factory=list)

    @property
    def places(self) -> list[int]:
        return [place for head in self.heads for place in head]


def make_prompt(
    processor: Any, messages: Sequence[Mapping[str, Any]], videos: Sequence[Any] = (), images: Sequence[Any] = ()
) -> Prompt:
    """
    Renders a conversation; `messages` hold parts `{"type": "video"}` and `{"type": "image"}` where media stand.

    Raises:
        ValueError: a text holds a token that stands for images, videos or turns.
    """
    for number, message in enumerate(messages):
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        found = find_control_token(processor, *(part["text"] for part in parts if part["type"] == "text"))
        if found is not None:
            raise ValueError(f"messages[{number}] holds {found!r}, a control token of the model. Take it out.")
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ends = [text.rfind(token) + len(token) for token in (processor.video_token, processor.image_token) if token in text]
    end = max(ends, default=0)
    # With what closes it: only that token says where the text goes on behind a video whose last tokens may be dropped.
    closing = getattr(processor, "vision_end_token", "<|vision_end|>")
    end += len(closing) if end and text.startswith(closing, end) else 0
    return Prompt(text[:end], text[end:], tuple(videos), tuple(images))


def answer_prompts(
    model: Any,
    processor: Any,
    prompts: Sequence[Prompt],
    *,
    pruning_ratio: float,
    batch_size: int = 8,
    processing: Mapping[str, Any] | None = None,
    **generate_options: Any,
) -> Generator[tuple[int, PromptAnswer | Exception], None, None]:
    """
    Answers prompts in batches; a thread decodes the next batch meanwhile.

    Args:
        prompts: what `make_prompt` gives; those with one head are answered together, wherever they stand.
        pruning_ratio: share `k` of video tokens to drop.
        batch_size: most prompts that the model answers at once.
        processing: options of the processor for videos, such as `{"num_frames": 32, "test_time_scaling": True}`.
        generate_options: of `model.generate`.

    Returns:
        An iterator of a prompt's place and its answer, or the error that kept a video or image of it from being read.
        What the model raises comes through and ends the iteration.
    """
    check_batch_size(batch_size)
    options = processing_options(processor, processing, pruning_ratio)
    beams = (generate_options.get("num_beams") or 1) > 1  # native beam search makes its own copies of a cache

    def prepare(batch: _Batch) -> list[tuple[list[int], PreparedPrompts | Exception]]:
        try:
            chosen = [[prompts[place] for place in head] for head in batch.heads]
            return [(batch.places, prepare_prompts(processor, chosen, options))]
        except Exception as error:
            if len(batch.heads) == 1:
                return [(batch.places, error)]
            return [found for head in batch.heads for found in prepare(_Batch([head]))]

    def answers() -> Generator[tuple[int, PromptAnswer | Exception], None, None]:
        batches = make_batches(prompts, batch_size, share=not beams)
        with contextlib.closing(prefetch(prepare, batches, ahead=1)) as prepared_batches:
            for parts in prepared_batches:
                for places, prepared in parts:
                    if isinstance(prepared, Exception):
                        yield from ((place, prepared) for place in places)
                        continue
                    found = answer_batch(
                        model, processor, prepared, batch_size, pruning_ratio=pruning_ratio, **generate_options
                    )
                    yield from zip(places, found, strict=True)

    return answers()


def make_batches(prompts: Sequence[Prompt], batch_size: int, share: bool = True) -> Iterator[_Batch]:
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


def prepare_prompts(processor: Any, heads: Sequence[Sequence[Prompt]], options: Mapping[str, Any]) -> PreparedPrompts:
    """Decodes the videos and images of prompts, given by head, each once."""

    def read_image(source: Any) -> Image.Image:
        return load_image(open_image(source, processor))

    prompts = [prompt for head in heads for prompt in head]
    rows = [number for number, head in enumerate(heads) for _ in head]
    shared = len(heads) < len(prompts)
    read = [head[0] for head in heads] if shared else prompts
    videos = [
        [read_image(picture) for picture in video] if isinstance(video, list) else video
        for prompt in read
        for video in prompt.videos
    ]
    images = [read_image(image) for prompt in read for image in prompt.images]
    inputs = frames.process(
        processor,
        text=[prompt.head if shared else prompt.head + prompt.tail for prompt in read],
        videos=videos or None,
        images=images or None,
        padding=True,
        padding_side="right" if shared else "left",
        return_tensors="pt",
        **(options if videos else {}),
    )
    inputs.pop("video_metadata", None)
    num_videos = [len(prompt.videos) for prompt in read]
    if not shared:
        return PreparedPrompts(inputs, list(range(len(prompts))), num_videos)
    return PreparedPrompts(inputs, rows, num_videos, tokenize_tails(processor, [prompt.tail for prompt in prompts]))


@torch.no_grad()
def answer_batch(
    model: Any,
    processor: Any,
    prepared: PreparedPrompts,
    batch_size: int,
    *,
    pruning_ratio: float,
    **generate_options: Any,
) -> list[PromptAnswer]:
    """Answers prepared prompts, at most `batch_size` at once behind heads that were read together."""
    started = time.perf_counter()
    options = {"pruning_ratio": pruning_ratio, "return_dict_in_generate": True} | generate_options
    if prepared.tails is None:
        inputs = inputs_for(model, prepared.inputs)
        output = model.generate(**inputs, **options)
        new = list(output.sequences[:, inputs["input_ids"].shape[1] :])
        mask, keep_mask = inputs["attention_mask"], output.get("keep_mask")
    else:
        heads = read_heads(model, prepared.inputs, pruning_ratio)
        new, masks, keep_mask = [], [], heads.keep_mask
        rows = torch.tensor(prepared.rows)
        for start in range(0, len(rows), batch_size):
            some = slice(start, start + batch_size)
            tails = {name: tensor[some] for name, tensor in prepared.tails.items()}
            cache = heads.take(rows[some], keep=start + batch_size < len(rows))
            found, prompts = heads.answer(model, cache, rows[some], tails, **options)
            new.extend(found)
            masks.append(prompts["attention_mask"])
        mask = torch.cat(masks)
    kept = _count_video_tokens(keep_mask, prepared.num_videos)
    lengths = mask.sum(-1).tolist()
    written = decode_answers(processor, new)
    seconds = (time.perf_counter() - started) / len(prepared.rows)
    ends = _end_tokens(model)
    return [
        PromptAnswer(words, _length(tokens, ends), length, *kept[row], seconds)
        for words, tokens, length, row in zip(written, new, lengths, prepared.rows, strict=True)
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
