"""One sample as the model's inputs, and how many of its tokens pruning leaves: known before anything is decoded."""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image
from transformers.image_utils import load_image

from stts_hf.modeling.processing_stts import STTSProcessor
from stts_hf.modeling.scoring_stts import num_kept_blocks
from stts_hf.modeling.video_reading_stts import download, is_url

from .labels import IGNORED, make_labels, render
from .rows import RowError, Sample, row_errors

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


def check_length(name: str, length: int, max_length: int, used: int = 0) -> None:
    """Raises `RowError` where `length` tokens of the row `name` do not fit behind `used` tokens of other samples."""
    if used + length > max_length:
        before = f" and the samples before it in its row {used}" if used else ""
        raise RowError(
            f"Row {name!r} has {length} tokens after pruning{before}, but max_length is {max_length}. Raise max_length "
            "or pruning_ratio, or lower the video processor's num_frames.",
            name,
        )


def encode(processor: STTSProcessor, sample: Sample) -> Encoded:
    """
    Decodes and tokenizes a sample.

    Raises:
        RowError: a file cannot be decoded, the chat template refuses the conversation, or nothing of it is learned.
    """
    with row_errors(sample.id):
        text, spans = prompt_of(processor, sample)
        inputs = processor(
            text=[text],
            videos=sample.videos or None,
            images=[load_image(open_image(image, processor)) for image in sample.images] or None,
            return_tensors="pt",
            return_offsets_mapping=True,
            return_text_replacement_offsets=True,
            padding=False,
            truncation=False,
        )
        moved = _move_spans(processor, text, spans, inputs["text_replacement_offsets"][0])
        labels = make_labels(inputs["input_ids"][0], inputs["offset_mapping"][0], moved)
        if (labels == IGNORED).all():
            raise ValueError("messages: all labels are masked, so there is nothing to learn.")
    vision = {key: inputs[key] for key in (*VIDEO_KEYS, *IMAGE_KEYS) if key in inputs}
    return Encoded(sample.id, inputs["input_ids"][0], inputs["mm_token_type_ids"][0], labels, vision)


def prompt_of(processor: STTSProcessor, sample: Sample) -> tuple[str, list[tuple[int, int]]]:
    """
    The conversation in the chat template's words, and which of its characters `[start, end)` are learned. It is
    rendered on first use and kept in the sample. Raises `ValueError` where the template or `check_text` refuses it.
    """
    if sample.prompt is None:
        check_text(processor, sample)
        sample.prompt = render(processor, sample.messages)
    return sample.prompt


def find_control_token(processor: STTSProcessor, *texts: str) -> str | None:
    """A token in the texts that stands for images, videos or turns, which none may hold; None where there is none."""
    tokenizer = processor.tokenizer
    tokens = {processor.image_token, processor.video_token, tokenizer.bos_token, tokenizer.eos_token}
    tokens |= set(tokenizer.convert_ids_to_tokens(processor.image_token_ids))
    return next((token for token in sorted(filter(None, tokens)) if any(token in text for text in texts)), None)


def check_text(processor: STTSProcessor, sample: Sample) -> None:
    """Raises `ValueError` where a text holds tokens that stand for images, videos or turns."""
    for number, message in enumerate(sample.messages):
        content = message["content"]
        texts = [content] if isinstance(content, str) else [p["text"] for p in content if p["type"] == "text"]
        found = find_control_token(processor, *texts)
        if found is not None:
            raise ValueError(
                f"messages[{number}] holds {found!r}, a control token of the model. Take it out of the text."
            )


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
    [text], _ = processor.get_text_with_replacements([add_bos(processor, text)], images, videos)
    return len(processor.tokenizer(text)["input_ids"]) - count_dropped(grids, pruning_ratio)


def add_bos(processor: STTSProcessor, text: str) -> str:
    """The prompt as the processor tokenizes it."""
    bos = processor.tokenizer.bos_token or processor.tokenizer.eos_token
    return text if text.startswith(bos) else bos + text


def _move_spans(
    processor: STTSProcessor, text: str, spans: list[tuple[int, int]], replacements: list[dict[str, Any]]
) -> list[tuple[int, int]]:
    """Spans in `text` to where they lie after the bos token was added and placeholders were spelled out."""
    bos = len(add_bos(processor, text)) - len(text)

    def move(place: int) -> int:
        place += bos
        grown = sum(len(r["replacement"]) - len(r["text"]) for r in replacements if r["span"][1] <= place)
        return place + grown

    return [(move(start), move(end)) for start, end in spans]


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
