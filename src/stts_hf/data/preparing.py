"""
Every row looked at once before the first step: read, its files opened, its prompt rendered, its tokens counted; and
which rows then share a row of the batch, planned from these counts, so that nothing is decoded to find out.
"""

import contextlib
import json
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

import datasets
import numpy as np
from PIL import ExifTags, Image
from torch.utils.data import Dataset
from tqdm import tqdm
from transformers.utils import logging

from stts_hf.modeling.processing_stts import STTSProcessor
from stts_hf.modeling.video_reading_stts import VideoFile, is_url

from .collator import check_on_error, resolve_ratio
from .encoding import check_length, count_tokens, open_image, prompt_of
from .prefetch import prefetch
from .rows import PROMPT, RowError, Sample, check_files, read_row, row_errors, row_id

logger = logging.get_logger(__name__)

LENGTH = "length"
_MAX_LISTED = 20
_Headers = tuple[list[list[float]], list[tuple[int, int]]]  # seconds of each video's frames, (height, width) of images
_AHEAD = 4  # rows a thread may be ahead: a sample may hold the bytes of its video


def prepare_rows(
    rows: datasets.Dataset,
    processor: STTSProcessor,
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
    Rows for `STTSDataCollator`, ready but for decoding: each is read and its prompt rendered here, once.

    Args:
        rows: what `load_rows` gives.
        processor: the one that the collator uses, with the same settings.
        model_config, pruning_ratio: one of them, to count tokens after pruning.
        max_length: tokens that a row may have after pruning.
        on_error: "raise", or "skip" to leave out bad rows with a warning.
        headers: open every file, `num_threads` at a time, to see that it is a video or image. Counting does so anyway.
        allow_urls: whether videos and images may be fetched from http(s) URLs.

    Returns:
        The good rows with the column `stts_prompt`, which spares the collator the template, and, where tokens are
        counted, `length`: exactly what `STTSDataCollator` will make of it, unless frames of a video turn out to be
        damaged, which makes it shorter.

    Raises:
        RowError: with on_error="raise", naming the first 20 bad rows and what is wrong with each.
    """
    check_on_error(on_error)
    ratio = resolve_ratio(model_config, pruning_ratio)

    def look(index: int) -> tuple[Sample, _Headers] | RowError:
        try:
            sample = read_row(rows[index], index)
            check_files(sample, allow_urls)
            if ratio is not None:
                return sample, _read_headers(sample, processor)
            if headers:
                _open_files(sample)
            return sample, ([], [])
        except RowError as error:
            return error

    # A tokenizer is not safe to share between threads, so only the files are opened in them.
    threads = num_threads if ratio is not None or headers else 1
    results: list[tuple[str, int | None] | None] = []  # None for bad rows
    errors: list[RowError] = []
    with contextlib.closing(prefetch(look, range(len(rows)), num_workers=threads, ahead=_AHEAD * threads)) as looked_at:
        for found in tqdm(looked_at, total=len(rows), desc="Reading rows", disable=None if progress else True):
            try:
                results.append(_finish(found, processor, ratio, max_length))
            except RowError as error:
                results.append(None)
                errors.append(error)
    if errors:
        listed = "\n".join(f"  {error}" for error in errors[:_MAX_LISTED])
        more = f"\n  ... and {len(errors) - _MAX_LISTED} more" if len(errors) > _MAX_LISTED else ""
        message = f"{len(errors)} of {len(rows)} rows cannot be trained on:\n{listed}{more}"
        if on_error == "raise":
            raise RowError(message, errors[0].row_id)
        logger.warning(message)
    prepared = _with_column(rows, PROMPT, [row and row[0] for row in results], "string")
    if ratio is not None:
        prepared = _with_column(prepared, LENGTH, [row and row[1] for row in results], "int64")
    return prepared.select([index for index, row in enumerate(results) if row is not None]) if errors else prepared


def _finish(
    found: tuple[Sample, _Headers] | RowError, processor: STTSProcessor, ratio: float | None, max_length: int | None
) -> tuple[str, int | None]:
    """What `read_row` takes the row's prompt from, and the row's length where a ratio is known. Raises `RowError`."""
    if isinstance(found, RowError):
        raise found
    sample, headers = found
    with row_errors(sample.id):
        text, _ = prompt_of(processor, sample)
        length = None if ratio is None else count_tokens(processor, text, *headers, ratio)
    if length is not None and max_length is not None:
        check_length(sample.id, length, max_length)
    media = {"videos": sample.videos, "images": sample.images}
    # Files that lie in the row itself as bytes stay there, and are looked up again.
    in_row = not all(isinstance(source, str) for sources in media.values() for source in sources)
    return json.dumps({"prompt": sample.prompt} | ({} if in_row else media)), length


def _with_column(rows: datasets.Dataset, name: str, values: list[Any], kind: str) -> datasets.Dataset:
    if name in rows.column_names:
        rows = rows.remove_columns(name)
    return rows.add_column(name, values, feature=datasets.Value(kind))


class _Header(VideoFile):
    """A video file that is opened, but whose packets, which tell when its frames are shown, are not read."""

    def _index(self) -> None:
        pass


def _open_files(sample: Sample) -> None:
    """Raises `RowError` where a video or image does not open as one. What is at a URL is not looked at."""
    with row_errors(sample.id):
        for video in sample.videos:
            if not is_url(video):
                _Header(video).close()
        for image in sample.images:
            if not is_url(image):
                open_image(image)


def _read_headers(sample: Sample, processor: STTSProcessor) -> _Headers:
    """Raises `RowError` where a file does not open. Nothing is decoded."""
    probe: Any = processor.video_processor.probe
    with row_errors(sample.id):
        times = [probe(video).frame_times for video in sample.videos]
        return times, [_image_size(open_image(image, processor)) for image in sample.images]


def _image_size(image: Image.Image) -> tuple[int, int]:
    """Height and width as shown; a picture may be stored on its side."""
    width, height = image.size
    on_its_side = image.getexif().get(ExifTags.Base.Orientation, 1) >= 5
    return (width, height) if on_its_side else (height, width)


class PackedDataset(Dataset):
    """
    Rows of a data set in groups that fit a token budget; item `i` is a list of rows, for `STTSDataCollator`.

    The rows are shuffled and cut into windows; within a window the longest row goes first, each into the group where it
    leaves the least room (best fit, descending). So groups are well filled, and still of random rows. All is settled at
    construction by `seed`: the number of groups never changes, every process and worker sees the same ones, and a
    training that is resumed meets them in the same order. Their order in each epoch is the sampler's.

    Args:
        rows: map-style data set.
        lengths: tokens of each row after pruning, the column `length` of `prepare_rows`.
        budget: tokens that a group may have after pruning; the collator's `pad_to` or `max_length`.
        seed: settles which rows come together.
        window: rows that are grouped at a time; more fill the groups better, fewer keep them more random.
        max_samples: most rows in a group, None for no limit.

    Attributes:
        groups: indices into `rows`. fill_rate: share of all groups' tokens that are used.

    Raises:
        RowError: a row is longer than the budget.
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        rows: Any,
        lengths: Sequence[int],
        budget: int,
        *,
        seed: int = 0,
        window: int = 1024,
        max_samples: int | None = None,
    ) -> None:
        for name, value in (("budget", budget), ("window", window), ("max_samples", max_samples)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if len(lengths) != len(rows):
            raise ValueError(f"lengths has {len(lengths)} entries for {len(rows)} rows. Measure these rows.")
        if not len(rows):
            raise ValueError("rows is empty: there is nothing to pack.")
        self.rows, self.budget = rows, budget
        sizes = dict(enumerate(lengths))
        for index, length in sizes.items():
            if length > budget:
                check_length(row_id(rows[index], index), length, budget, argument="budget")
        generator = np.random.default_rng(seed)
        order = generator.permutation(len(rows)).tolist()
        self.groups: list[list[int]] = []
        for start in range(0, len(order), window):
            groups = best_fit(order[start : start + window], sizes, budget, max_samples)
            for place in generator.permutation(len(groups)):
                self.groups.append([groups[place][number] for number in generator.permutation(len(groups[place]))])
        self.lengths = [sum(sizes[index] for index in group) for group in self.groups]
        self.fill_rate = sum(self.lengths) / (budget * len(self.groups))

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, index: int) -> list[Any]:
        return [self.rows[row] for row in self.groups[index]]

    def __str__(self) -> str:
        return (
            f"{len(self.rows)} samples in {len(self)} rows of up to {self.budget} tokens after pruning "
            f"({len(self.rows) / len(self):.2f} a row, {self.fill_rate:.1%} filled)"
        )


def best_fit(
    items: Sequence[int], sizes: dict[int, int], budget: int, max_samples: int | None = None
) -> list[list[int]]:
    """Groups of `items` whose sizes add up to `budget` at most, by best fit in descending order of size."""
    groups: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (tokens free, number of the group), ascending, of groups that take more
    for item in sorted(items, key=lambda item: -sizes[item]):
        place = bisect_left(rooms, (sizes[item], 0))
        if place < len(rooms):
            room, number = rooms.pop(place)
            groups[number].append(item)
        else:
            room, number = budget, len(groups)
            groups.append([item])
        if max_samples is None or len(groups[number]) < max_samples:
            insort(rooms, (room - sizes[item], number))
    return groups
