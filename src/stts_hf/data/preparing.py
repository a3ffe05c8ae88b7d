"""Every row looked at once before the first step: read, its files opened, its prompt rendered, its tokens counted."""

import contextlib
import json
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import datasets
from tqdm import tqdm
from transformers.utils import logging

from stts_hf.modeling.processing_stts import STTSProcessor

from .collator import check_on_error, resolve_ratio
from .encoding import check_length, count_tokens, prompt_of
from .headers import check_headers, in_order, read_headers
from .rows import PROMPT, RowError, Sample, check_files, check_urls, read_row, row_errors

logger = logging.get_logger(__name__)

LENGTH = "length"
_MAX_LISTED = 20


@dataclass
class Examined:
    """What is known of a row: its sample, or what is wrong with it. length: tokens after pruning, where counted."""

    sample: Sample | None = None
    error: RowError | None = None
    frame_times: list[list[float]] = field(default_factory=list)
    image_sizes: list[tuple[int, int]] = field(default_factory=list)
    length: int | None = None


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
        model_config, pruning_ratio: one of them, to count tokens after pruning, as in `measure_lengths`.
        max_length: tokens that a row may have after pruning.
        on_error: "raise", or "skip" to leave out bad rows with a warning.
        headers: open every file, `num_threads` at a time, to see that it is a video or image. Counting does so anyway.
        allow_urls: whether videos and images may be fetched from http(s) URLs.

    Returns:
        The good rows with the column `stts_prompt`, which spares the collator the template, and, where tokens are
        counted, `length`.

    Raises:
        RowError: with on_error="raise", naming the first 20 bad rows and what is wrong with each.
    """
    check_on_error(on_error)
    ratio = resolve_ratio(model_config, pruning_ratio)
    measured = model_config is not None or pruning_ratio is not None
    prompts: list[str | None] = []
    lengths: list[int | None] = []
    errors: list[RowError] = []
    options: dict[str, Any] = {"headers": headers, "allow_urls": allow_urls, "num_threads": num_threads}
    found = examine(rows, processor, measure=measured, ratio=ratio, max_length=max_length, **options)
    for row in tqdm(found, total=len(rows), desc="Preparing rows", disable=not progress):
        prompts.append(None if row.sample is None or row.error is not None else _dump_prompt(row.sample))
        lengths.append(row.length)
        if row.error is not None:
            errors.append(row.error)
    _report(errors, len(rows), on_error)
    columns: dict[str, list[Any]] = {PROMPT: prompts} | ({LENGTH: lengths} if measured else {})
    kinds = {PROMPT: datasets.Value("string"), LENGTH: datasets.Value("int64")}
    for name, values in columns.items():
        if name in rows.column_names:
            rows = rows.remove_columns(name)
        rows = rows.add_column(name, values, feature=kinds[name])
    return rows.select([index for index, prompt in enumerate(prompts) if prompt is not None]) if errors else rows


def check_rows(
    rows: Any,
    processor: STTSProcessor | None = None,
    *,
    on_error: str = "raise",
    headers: bool = False,
    allow_urls: bool = False,
    num_threads: int = 8,
    progress: bool = True,
) -> list[int]:
    """
    Looks at every row before training, without reading a video or image: columns, kinds, placeholders, subtitles, that
    files exist, and, with a `processor`, that the chat template takes the conversation. `headers` also opens every
    file, `num_threads` at a time, to see that it is a video or image; what is at a URL stays there.

    Returns:
        Which rows are good. `rows.select(check_rows(rows, on_error="skip"))` leaves out the others.

    Raises:
        RowError: with on_error="raise", naming the first 20 bad rows and what is wrong with each.
    """
    check_on_error(on_error)
    good, errors = [], []
    found = examine(rows, processor, headers=headers, allow_urls=allow_urls, num_threads=num_threads)
    for index, row in enumerate(tqdm(found, total=len(rows), desc="Checking rows", disable=not progress)):
        if row.error is None:
            good.append(index)
        else:
            errors.append(row.error)
    _report(errors, len(rows), on_error)
    return good


def measure_lengths(
    rows: Any,
    processor: STTSProcessor,
    pruning_ratio: float | None = None,
    *,
    model_config: Any = None,
    max_length: int | None = None,
    on_error: str = "raise",
    allow_urls: bool = False,
    num_threads: int = 8,
    progress: bool = True,
) -> list[int | None]:
    """
    Counts the tokens that each row has after pruning, from text and headers: exactly what `STTSDataCollator` will make
    of it, unless frames of a video turn out to be damaged, which makes it shorter.

    Args:
        rows: a data set of rows.
        processor: the one that the collator uses, with the same settings.
        pruning_ratio, model_config: as in `STTSDataCollator`; one of them is needed where there are videos.
        max_length: tokens that a row may have after pruning.
        on_error: "raise", or "skip" to give None for rows that cannot be read or are too long.
        allow_urls: whether videos and images may be fetched from http(s) URLs.
        num_threads: files whose packets are read at the same time.

    Returns:
        Tokens per row, in order.

    Raises:
        RowError: with on_error="raise", the first row that cannot be read or is too long.
    """
    check_on_error(on_error)
    ratio = resolve_ratio(model_config, pruning_ratio)
    options: dict[str, Any] = {"max_length": max_length, "allow_urls": allow_urls, "num_threads": num_threads}
    lengths: list[int | None] = []
    with contextlib.closing(examine(rows, processor, measure=True, ratio=ratio, **options)) as found:
        for row in tqdm(found, total=len(rows), desc="Measuring", disable=not progress):
            if row.error is not None:
                if on_error == "raise":
                    raise row.error
                logger.warning(f"Skipped: {row.error}")
            lengths.append(row.length)
    return lengths


def examine(
    rows: Any,
    processor: STTSProcessor | None,
    *,
    measure: bool = False,
    ratio: float | None = None,
    max_length: int | None = None,
    headers: bool = False,
    allow_urls: bool = False,
    num_threads: int = 8,
) -> Generator[Examined, None, None]:
    """The rows in order as `Examined`. Files are opened in threads, a little ahead; a generator, to be closed."""

    def look(index: int) -> Examined:
        row = Examined()
        try:
            row.sample = read_row(rows[index], index)
            check_urls(row.sample, allow_urls)
            check_files(row.sample)
            if measure and processor is not None:
                row.frame_times, row.image_sizes = read_headers(processor, row.sample)
            elif headers:
                check_headers(row.sample)
        except RowError as error:
            row.error = error
        return row

    # A tokenizer is not safe to share between threads, so only the files are opened in them.
    threads = num_threads if measure or headers else 1
    with contextlib.closing(in_order(look, len(rows), threads)) as looked:
        for row in looked:
            try:
                if row.sample is not None and row.error is None and processor is not None:
                    with row_errors(row.sample.id):
                        text, _ = prompt_of(processor, row.sample)
                        if measure:
                            row.length = count_tokens(processor, text, row.frame_times, row.image_sizes, ratio)
                    if row.length is not None and max_length is not None:
                        check_length(row.sample.id, row.length, max_length)
            except RowError as error:
                row.error, row.length = error, None
            yield row


def _dump_prompt(sample: Sample) -> str:
    """The prompt for `read_row`. Files that lie in the row itself as bytes stay there, and are looked up again."""
    media = {"videos": sample.videos, "images": sample.images}
    in_row = not all(isinstance(source, str) for sources in media.values() for source in sources)
    return json.dumps({"prompt": sample.prompt} | ({} if in_row else media))


def _report(errors: list[RowError], total: int, on_error: str) -> None:
    if not errors:
        return
    listed = "\n".join(f"  {error}" for error in errors[:_MAX_LISTED])
    more = f"\n  ... and {len(errors) - _MAX_LISTED} more" if len(errors) > _MAX_LISTED else ""
    message = f"{len(errors)} of {total} rows cannot be trained on:\n{listed}{more}"
    if on_error == "raise":
        raise RowError(message, errors[0].row_id)
    logger.warning(message)
