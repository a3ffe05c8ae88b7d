"""How long each sample will be after pruning, from its text and its files' headers: nothing is decoded."""

import contextlib
import io
import math
from typing import Any

import torch
from PIL import Image
from tqdm import tqdm
from transformers.image_utils import load_image
from transformers.utils import logging

from .collator import check_on_error, resolve_ratio
from .encoding import add_bos, check_length, check_text, count_dropped
from .headers import in_order
from .labels import render
from .rows import RowError, Sample, check_files, is_url, read_row, row_errors

logger = logging.get_logger(__name__)

_ORIENTATION = 0x0112  # EXIF: from 5 on, the picture is shown turned by a quarter


def measure_lengths(
    rows: Any,
    processor: Any,
    pruning_ratio: float | None = None,
    *,
    model_config: Any = None,
    max_length: int | None = None,
    on_error: str = "raise",
    num_threads: int = 8,
    progress: bool = True,
) -> list[int | None]:
    """
    Counts the tokens that each row has after pruning: exactly what `STTSDataCollator` will make of it, unless frames of
    a video turn out to be damaged, which makes it shorter.

    Args:
        rows: a data set of rows.
        processor: the one that the collator uses, with the same settings.
        pruning_ratio, model_config: as in `STTSDataCollator`; one of them is needed where there are videos.
        max_length: tokens that a row may have after pruning.
        on_error: "raise", or "skip" to give None for rows that cannot be read or are too long.
        num_threads: files whose packets are read at the same time.

    Returns:
        Tokens per row, in order.

    Raises:
        RowError: with on_error="raise", the first row that cannot be read or is too long.
    """
    check_on_error(on_error)
    ratio = resolve_ratio(model_config, pruning_ratio)

    def probe(index: int) -> tuple[Sample, list[list[float]], list[tuple[int, int]]] | RowError:
        try:
            sample = read_row(rows[index], index)
            check_files(sample)
            return sample, *_read_headers(processor, sample)
        except RowError as error:
            return error

    lengths: list[int | None] = []
    # A tokenizer is not safe to share between threads, so only the files are read in them.
    with contextlib.closing(in_order(probe, len(rows), num_threads)) as probed:
        for found in tqdm(probed, total=len(rows), desc="Measuring", disable=not progress):
            try:
                if isinstance(found, RowError):
                    raise found
                sample, frame_times, image_sizes = found
                length = _count(processor, sample, frame_times, image_sizes, ratio)
                if max_length is not None:
                    check_length(sample.id, length, max_length)
                lengths.append(length)
            except RowError as error:
                if on_error == "raise":
                    raise
                logger.warning(f"Skipped: {error}")
                lengths.append(None)
    return lengths


def _read_headers(processor: Any, sample: Sample) -> tuple[list[list[float]], list[tuple[int, int]]]:
    """Times (seconds) of the frames that each video will show, and height and width of each image."""
    with row_errors(sample.id):
        times = [processor.video_processor.probe(video).frame_times for video in sample.videos]
        return times, [_image_size(image) for image in sample.images]


def _image_size(source: Any) -> tuple[int, int]:
    if isinstance(source, str) and is_url(source):
        return _image_size(load_image(source))
    image = (
        source
        if isinstance(source, Image.Image)
        else Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
    )
    width, height = image.size
    turned = image.getexif().get(_ORIENTATION, 1) >= 5
    if image is not source:
        image.close()
    return (width, height) if turned else (height, width)


def _count(
    processor: Any,
    sample: Sample,
    frame_times: list[list[float]],
    image_sizes: list[tuple[int, int]],
    pruning_ratio: float | None,
) -> int:
    """Tokens of the prompt with its videos and images spelled out, less those that pruning takes."""
    with row_errors(sample.id):
        check_text(processor, sample)
        text, _ = render(processor, sample.messages)
        rows, columns = _blocks_of_frame(processor.video_processor)
        grids = [(len(times), rows, columns) for times in frame_times]
        videos = [
            processor.get_video_string(torch.tensor(grid), times)
            for grid, times in zip(grids, frame_times, strict=True)
        ]
        image_grids = [processor.image_processor.get_image_grid_and_crops(*size)[0] for size in image_sizes]
        images = [processor.replace_image_token({"image_grids": [grid]}, 0) for grid in image_grids]
        [text], _ = processor.get_text_with_replacements([add_bos(processor, text)], images, videos)
        return len(processor.tokenizer(text)["input_ids"]) - count_dropped(grids, pruning_ratio)


def _blocks_of_frame(video_processor: Any) -> tuple[int, int]:
    """Rows and columns of blocks in a frame."""
    size, patch, pooling = video_processor.size, video_processor.patch_size, video_processor.pooling_size
    return math.ceil(size["height"] // patch / pooling[0]), math.ceil(size["width"] // patch / pooling[1])
