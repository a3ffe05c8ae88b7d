"""Checks every row before the first step: reads it, opens its files, renders its prompt, counts its tokens."""

import contextlib
from typing import Any

import datasets
import torch
from PIL import ExifTags, Image
from tqdm import tqdm
from transformers.utils import logging

from stts_hf.modeling.video_reading_stts import STTSVideoMetadata, VideoFile
from stts_hf.video.processors import probe
from stts_hf.video.sources import is_url, open_picture

from .collator import check_on_error, resolve_ratio
from .encoding import Processor, check_length, count_tokens, prompt_of
from .prefetch import prefetch
from .rows import RowError, Sample, check_files, read_row, row_errors

logger = logging.get_logger(__name__)

LENGTH = "length"
_MAX_LISTED = 20
# What is shown of each video, and (height, width) of each image.
_Headers = tuple[list[tuple[torch.Tensor, STTSVideoMetadata]], list[tuple[int, int]]]
_AHEAD = 4  # rows a thread may be ahead: a sample may hold the bytes of its video


def prepare_rows(
    rows: datasets.Dataset,
    processor: Processor,
    *,
    model_config: Any = None,
    pruning_ratio: float | None = None,
    max_length: int | None = None,
    on_error: str = "raise",
    headers: bool = True,
    allow_urls: bool = False,
    num_threads: int = 8,
    progress: bool = True,
) -> datasets.Dataset:
    """
    Reads each row, opens its files and renders its prompt, so that training meets no bad row.

    Args:
        rows: what `load_rows` gives.
        processor: the one that the collator uses, with the same settings.
        model_config, pruning_ratio: one of them, to count tokens after pruning.
        max_length: tokens that a row may have after pruning.
        on_error: "raise", or "skip" to leave out bad rows with a warning.
        headers: open every file, `num_threads` at a time, to check its kind. Counting does it anyway.
        allow_urls: whether videos and images may be fetched from http(s) URLs.

    Returns:
        The good rows, where tokens are counted with the column `length`, that of the collator's sample. Damaged frames
        make a sample shorter; without an answer `length` is an upper bound.

    Raises:
        RowError: with on_error="raise"; it lists the first 20 bad rows.
    """
    check_on_error(on_error)
    ratio = resolve_ratio(model_config, pruning_ratio)

    def look(index: int) -> tuple[Sample, _Headers] | RowError:
        try:
            sample = read_row(rows[index], index)
            check_files(sample, allow_urls)
            if ratio is None and headers:
                _open_files(sample)
            return sample, ([], []) if ratio is None else _read_headers(sample, processor)
        except RowError as error:
            return error

    threads = num_threads if ratio is not None or headers else 1  # they open files: tokenizers are not thread-safe
    lengths: dict[int, int | None] = {}  # of good rows, by their number
    errors: list[RowError] = []
    with contextlib.closing(prefetch(look, range(len(rows)), num_workers=threads, ahead=_AHEAD * threads)) as looked_at:
        bar = tqdm(looked_at, total=len(rows), desc="Reading rows", disable=None if progress else True)
        for index, found in enumerate(bar):
            try:
                lengths[index] = _measure(found, processor, ratio, max_length)
            except RowError as error:
                errors.append(error)
    if errors:
        listed = "\n".join(f"  {error}" for error in errors[:_MAX_LISTED])
        more = f"\n  ... and {len(errors) - _MAX_LISTED} more" if len(errors) > _MAX_LISTED else ""
        message = f"{len(errors)} of {len(rows)} rows cannot be trained on:\n{listed}{more}"
        if on_error == "raise":
            raise RowError(message, errors[0].row_id)
        logger.warning(message)
    good = rows.select(list(lengths)) if errors else rows
    return good if ratio is None else with_column(good, LENGTH, list(lengths.values()), "int64")


def _measure(
    found: tuple[Sample, _Headers] | RowError, processor: Processor, ratio: float | None, max_length: int | None
) -> int | None:
    """Renders the row; its length where a ratio is known. Raises `RowError`."""
    if isinstance(found, RowError):
        raise found
    sample, headers = found
    with row_errors(sample.id):
        text, _ = prompt_of(processor, sample)
        length = None if ratio is None else count_tokens(processor, text, *headers, ratio) + sample.room
    if length is not None and max_length is not None:
        check_length(sample.id, length, max_length)
    return length


def with_column(rows: datasets.Dataset, name: str, values: list[Any], kind: str) -> datasets.Dataset:
    """The rows with a new column, in place of one of that name."""
    if name in rows.column_names:
        rows = rows.remove_columns(name)
    return rows.add_column(name, values, feature=datasets.Value(kind))


class _Header(VideoFile):
    """A video file that is opened without reading its packets, which hold the frames' times."""

    def _index(self) -> None:
        pass


def _open_files(sample: Sample) -> None:
    """Raises `RowError` where a video or image cannot be opened. URLs are not fetched."""
    with row_errors(sample.id):
        for video in sample.videos:
            if not is_url(video):
                _Header(video).close()
        for image in sample.images:
            if not is_url(image):
                open_picture(image)


def _read_headers(sample: Sample, processor: Processor) -> _Headers:
    """Decodes at most one frame of each video. Raises `RowError`."""
    with row_errors(sample.id):
        videos = [probe(processor, video) for video in sample.videos]
        return videos, [_image_size(open_picture(image, processor)) for image in sample.images]


def _image_size(image: Image.Image) -> tuple[int, int]:
    """Height and width after the rotation that its EXIF tag asks for."""
    width, height = image.size
    return (width, height) if image.getexif().get(ExifTags.Base.Orientation, 1) >= 5 else (height, width)
