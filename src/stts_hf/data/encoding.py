"""
One sample as the model's inputs: its prompt and what of it is learned, its tensors, and how many of its tokens pruning
leaves, which is known before anything is decoded.
"""

import io
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2
import torch
from PIL import Image
from transformers.image_utils import load_image

from stts_hf.modeling.processing_stts import STTSProcessor
from stts_hf.modeling.scoring_stts import num_kept_blocks
from stts_hf.modeling.sequence_stts import align_labels as align_labels
from stts_hf.modeling.video_reading_stts import download, is_url

from .rows import RowError, Sample, row_errors

IGNORED = -100  # the label of what is not learned
VIDEO_KEYS = ("pixel_values_videos", "video_token_pooling", "video_grids")
IMAGE_KEYS = ("pixel_values", "image_token_pooling", "image_grids", "image_num_crops")


@dataclass
class Encoded:
    """
    A sample as tensors.

    input_ids, mm_token_type_ids, labels: (L,). vision: what the processor gives for its videos and images, with the
    shapes of DESIGN.md. grids: `(T, rows, columns)` of each video.
    """

    id: str
    input_ids: torch.Tensor
    mm_token_type_ids: torch.Tensor
    labels: torch.Tensor
    vision: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def grids(self) -> list[tuple[int, int, int]]:
        return [tuple(grid) for grid in self.vision["video_grids"].tolist()] if "video_grids" in self.vision else []

    def __len__(self) -> int:
        return len(self.input_ids)

    def dropped(self, pruning_ratio: float | None) -> int:
        """How many of the tokens pruning takes away; `pruning_ratio` may be None where there is no video."""
        return count_dropped(self.grids, pruning_ratio)


def count_dropped(grids: Sequence[tuple[int, int, int]], pruning_ratio: float | None) -> int:
    """Video tokens that go of videos with these `(T, rows, columns)`."""
    if not grids:
        return 0
    if pruning_ratio is None:
        raise ValueError("pruning_ratio is not known, so tokens after pruning cannot be counted. Pass model_config.")
    blocks = [(frames, rows * columns) for frames, rows, columns in grids]
    return sum(t * n - num_kept_blocks(t, n, pruning_ratio) for t, n in blocks)


def check_length(name: str, length: int, limit: int, used: int = 0, *, argument: str = "max_length") -> None:
    """
    Raises `RowError` where `length` tokens of the row `name` do not fit behind `used` tokens of other samples. limit:
    what `argument` says.
    """
    if used + length > limit:
        before = f" and the samples before it in its row {used}" if used else ""
        raise RowError(
            f"Row {name!r} has {length} tokens after pruning{before}, but {argument} is {limit}. Raise {argument} or "
            "pruning_ratio, or lower the video processor's num_frames.",
            name,
        )


def encode(processor: STTSProcessor, sample: Sample) -> Encoded:
    """
    Decodes and tokenizes a sample.

    Raises:
        RowError: a file cannot be decoded, the chat template refuses the conversation, nothing of it is learned, or its
            answer is yet to be written.
    """
    with row_errors(sample.id):
        if sample.room:
            raise ValueError("its answer is yet to be written. Pass the rows through `answer_rows` first.")
        text, spans = prompt_of(processor, sample)
        inputs = process(processor, sample, text, return_offsets_mapping=True, return_text_replacement_offsets=True)
        moved = _move_spans(spans, inputs["text_replacement_offsets"][0])
        labels = make_labels(inputs["input_ids"][0], inputs["offset_mapping"][0], moved)
        if (labels == IGNORED).all():
            raise ValueError("messages: all labels are masked, so there is nothing to learn.")
    vision = {key: inputs[key] for key in (*VIDEO_KEYS, *IMAGE_KEYS) if key in inputs}
    return Encoded(sample.id, inputs["input_ids"][0], inputs["mm_token_type_ids"][0], labels, vision)


def process(processor: STTSProcessor, sample: Sample, text: str, **options: Any) -> Any:
    """The processor's output for `text` with the videos and images of `sample`, which are decoded here."""
    return processor(
        text=[text],
        videos=sample.videos or None,
        images=[load_image(open_image(image, processor)) for image in sample.images] or None,
        return_tensors="pt",
        padding=False,
        truncation=False,
        **options,
    )


def prompt_of(processor: STTSProcessor, sample: Sample) -> tuple[str, list[tuple[int, int]]]:
    """
    What `render` makes of the sample, on first use: it is kept there. Raises `ValueError` where the template refuses
    it, and where a text holds tokens that stand for images, videos or turns.
    """
    if sample.prompt is None:
        for number, message in enumerate(sample.messages):
            content = message["content"]
            texts = [content] if isinstance(content, str) else [p["text"] for p in content if p["type"] == "text"]
            found = find_control_token(processor, *texts)
            if found is not None:
                raise ValueError(
                    f"messages[{number}] holds {found!r}, a control token of the model. Take it out of the text."
                )
        sample.prompt = render(processor, sample.messages)
    return sample.prompt


def render(processor: STTSProcessor, messages: list[dict[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
    """
    The conversation in the chat template's words, with the bos token that every prompt begins with, and which of its
    characters `[start, end)` are learned: what the assistant says, and the token that ends each of its turns.

    It is rendered with the prompt for another answer behind it, so it ends in the words that ask for one. Where the
    same words stand, an answer begins; it ends with the `eos_token` behind it, which no text may hold, and which is
    added where the template leaves the last turn open.

    Raises:
        ValueError: the template refuses the conversation, or it cannot be told which words are the assistant's.
    """
    eos = processor.tokenizer.eos_token
    text = _apply(processor, messages, add_generation_prompt=True)
    request = _find_request(text, messages[-1], eos)
    if request is None:
        whole = _apply(processor, messages)
        request = text[len(whole) :] if text.startswith(whole) else ""
    text = text.removesuffix(request)
    if messages[-1]["role"] == "assistant" and not text.rstrip().endswith(eos):
        text += eos
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    starts = [found.end() for found in re.finditer(re.escape(request), text)] if request else []
    if len(starts) != len(answers):
        raise ValueError(
            "chat_template: which tokens are the assistant's cannot be told: the prompt for an answer ends with "
            f"{request!r}, which stands at {len(starts)} places of a conversation with {len(answers)} answers. Use a "
            "template that begins every answer with the prompt for it, and take such words out of the texts."
        )
    spans = []
    for number, (start, following) in zip(answers, itertools.pairwise([*starts, len(text)]), strict=True):
        end = text.find(eos, start, following)
        words = r"\s*".join(["", *map(_shown, messages[number]["content"]), ""])
        if end < 0 or not re.fullmatch(words, text[start:end]):
            raise ValueError(
                f"chat_template: no eos_token {eos!r} ends the assistant's turn in messages[{number}], or it is not "
                f"shown as it was written: {text[start : start + 40]!r}. Set the tokenizer's eos_token to the token "
                "that ends a turn, and use a template that keeps the words."
            )
        spans.append((start, end + len(eos)))
    bos = processor.tokenizer.bos_token or eos
    if text.startswith(bos):
        return text, spans
    return bos + text, [(start + len(bos), end + len(bos)) for start, end in spans]


def _shown(part: dict[str, Any]) -> str:
    """A pattern for a part of an answer; a template may trim it, and may write its style in front."""
    style = rf"(?:{re.escape(str(part['style']))}\W*)?" if "style" in part else ""
    return style + re.escape(part["text"].strip())


def _find_request(text: str, last: dict[str, Any], eos: str) -> str | None:
    """
    The words at the end of `text` that ask for an answer: those that stand both before and behind the last answer. None
    where the last message is no answer of one text, or its words do not come back as they are.
    """
    content = last["content"]
    if last["role"] != "assistant" or len(content) != 1 or content[0].keys() != {"type", "text"}:
        return None
    answer = content[0]["text"]
    start = text.rfind(answer)
    while start >= 0:
        behind = text[start + len(answer) :]
        request = behind.removeprefix(eos).lstrip("\n") if behind.startswith(eos) else behind
        if request.strip() and text[:start].endswith(request):
            return request
        start = text.rfind(answer, 0, start + len(answer) - 1)
    return None


def _apply(processor: STTSProcessor, messages: list[dict[str, Any]], **options: Any) -> str:
    try:
        return processor.apply_chat_template(messages, tokenize=False, **options)
    except jinja2.TemplateError as error:
        if len(messages) > 1:
            _apply(processor, messages[:-1])  # so that it is the first message it refuses that is named
        number, role = len(messages) - 1, messages[-1]["role"]
        raise ValueError(f"chat_template refuses messages[{number}], of role {role!r}: {error}") from error


def find_control_token(processor: STTSProcessor, *texts: str) -> str | None:
    """A token in the texts that stands for images, videos or turns, which none may hold; None where there is none."""
    tokenizer = processor.tokenizer
    tokens = {processor.image_token, processor.video_token, tokenizer.bos_token, tokenizer.eos_token}
    tokens |= set(tokenizer.convert_ids_to_tokens(processor.image_token_ids))
    return next((token for token in sorted(filter(None, tokens)) if any(token in text for text in texts)), None)


def open_image(source: Any, processor: STTSProcessor | None = None) -> Image.Image:
    """A path, bytes, PIL image or, with `processor`, a URL; not decoded. Downloads keep to the limits of videos."""
    if processor is not None and is_url(source):
        limits: Any = processor.video_processor
        with download(source, limits.max_download_bytes, limits.max_download_seconds) as file:
            source = file.read()
    if isinstance(source, Image.Image):
        return source
    return Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)


def count_tokens(
    processor: STTSProcessor,
    text: str,
    frame_times: Sequence[Sequence[float]],
    image_sizes: Sequence[tuple[int, int]],
    pruning_ratio: float | None,
) -> int:
    """
    Tokens of a rendered prompt with its videos and images spelled out, less those that pruning takes. frame_times: of
    each video, in seconds. image_sizes: height and width of each image.
    """
    settings: Any = processor.video_processor
    size, patch, pooling = settings.size, settings.patch_size, settings.pooling_size
    rows = math.ceil(size["height"] // patch / pooling[0])
    columns = math.ceil(size["width"] // patch / pooling[1])
    grids = [(len(times), rows, columns) for times in frame_times]
    videos = [
        processor.get_video_string(torch.tensor(grid), times) for grid, times in zip(grids, frame_times, strict=True)
    ]
    image_grids = [processor.image_processor.get_image_grid_and_crops(*size)[0] for size in image_sizes]
    images = [processor.replace_image_token({"image_grids": [grid]}, 0) for grid in image_grids]
    [text], _ = processor.get_text_with_replacements([text], images, videos)
    return len(processor.tokenizer(text)["input_ids"]) - count_dropped(grids, pruning_ratio)


def _move_spans(spans: list[tuple[int, int]], replacements: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Spans of a prompt to where they lie once its placeholders are spelled out."""

    def move(place: int) -> int:
        return place + sum(len(r["replacement"]) - len(r["text"]) for r in replacements if r["span"][1] <= place)

    return [(move(start), move(end)) for start, end in spans]


def make_labels(input_ids: torch.Tensor, offsets: torch.Tensor, spans: list[tuple[int, int]]) -> torch.Tensor:
    """
    `input_ids` (L,) where a token lies within a span, -100 elsewhere. A token that a tokenizer merged across a span's
    border is half prompt, so it is not learned.

    offsets: (L, 2) characters of each token. spans: characters `[start, end)`.
    """
    learned = torch.zeros_like(input_ids, dtype=torch.bool)
    starts, ends = offsets[:, 0], offsets[:, 1]
    for start, end in spans:
        learned |= (starts >= start) & (ends <= end) & (ends > starts)
    learned[0] = False  # nothing predicts a sample's first token
    return input_ids.where(learned, IGNORED)


def empty_video(processor: STTSProcessor) -> Encoded:
    """A black video of one frame, of which nothing is learned. Its temporal loss is 0: it has no second frame."""
    size = processor.video_processor.size
    frame = torch.zeros(1, 3, size["height"], size["width"], dtype=torch.uint8)
    inputs = processor(
        text=[processor.video_token],
        videos=[frame],
        video_metadata=[{"total_num_frames": 1, "fps": 1.0}],
        return_tensors="pt",
    )
    ids = inputs["input_ids"][0]
    vision = {key: inputs[key] for key in VIDEO_KEYS}
    return Encoded("<empty video>", ids, inputs["mm_token_type_ids"][0], torch.full_like(ids, IGNORED), vision)
