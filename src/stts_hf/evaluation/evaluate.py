"""A model's answers to the questions of a data set, scored: the code behind `stts-hf eval`."""

import contextlib
from collections.abc import Generator, Iterable, Mapping
from typing import Any

from stts_hf.data.encoding import Processor
from stts_hf.data.prompts import find_option
from stts_hf.data.rows import RowError, row_id
from stts_hf.inference.predictor import answer_rows, describe_error, read_prompt
from stts_hf.inference.requests import Answer, Request

from .scoring import COUNTS, find_choice, is_right

LABELS = ("type", "group")


def evaluate(
    model: Any, processor: Processor, rows: Iterable[Mapping[str, Any]], *, max_new_tokens: int = 16, **options: Any
) -> Generator[dict[str, Any], None, None]:
    """
    Asks every question of `rows` (docs/training_data.md) greedily and scores the answers. Questions about the same
    video are answered in one batch; it is decoded, and read by the model, once.

    Args:
        model, processor: an STTS model of any backbone, or one derived from it, and its processor.
        rows: dicts with `question`, `answer` and optionally `options`, `videos`, `images`, `subtitles`, and `type` and
            `group`, which name what the question is about.
        max_new_tokens: maximum number of tokens of an answer.
        options: of `answer_rows`: `pruning_ratio` (default: the model's), `allow_urls`, and those of `answer_requests`:
            `batch_size`, `num_workers`, `decode_timeout`, `processing`.

    Returns:
        A record for each row, as soon as it is answered, rows that cannot be read first: `id`, `type`, `group`,
        `written`, `right`, `no_option` (what was written is none of the options), `error` (what is wrong with the row;
        then `written` is None), `prompt_tokens`, `video_tokens`, `video_tokens_kept`, and `seconds`, the model's for
        the batch divided by its questions.

    Raises:
        ValueError: an argument is out of range. Errors of the model are raised as they are.
    """
    options |= {"max_new_tokens": max_new_tokens, "do_sample": False}
    with contextlib.closing(answer_rows(model, processor, rows, read_question, **options)) as answers:
        for row, answer in answers:
            yield record_of(row, answer)


def ask_openly(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows without options, the right option's text as answer. A wrong row stays, for `evaluate` to report."""
    asked = [dict(row) for row in rows]
    for row in asked:
        options = row.get("options")
        if isinstance(options, list):
            texts = [str(option) for option in options]
            with contextlib.suppress(ValueError):
                row["answer"] = texts[find_option(texts, row.get("answer"))]
                del row["options"]
    return asked


def read_question(
    processor: Processor, row: Mapping[str, Any], index: int | None = None, allow_urls: bool = False
) -> Request:
    """The prompt of a row's question, its answer left out. Raises `RowError` for a row that cannot be asked."""
    prompt, name = read_prompt(processor, row, index, allow_urls), row_id(row, index)
    for column in LABELS:
        if label_of(row, column) != row.get(column):
            raise RowError(f"Row {name!r}: {column} is {row[column]!r}. Name it by one text or number.", name)
    if row.get("question") is None:
        raise RowError(f"Row {name!r}: question is empty: a conversation in messages is for training.", name)
    return prompt


def label_of(row: Mapping[str, Any], column: str) -> str | float | None:
    """A row's type or group; None where it is neither a text that can be printed nor a number."""
    found = row.get(column)
    return found if isinstance(found, int | float) or (isinstance(found, str) and found.isprintable()) else None


# Columns of a record with their types; where there is an error, None is allowed too.
COLUMNS: dict[str, Any] = {"id": object, "type": object, "group": object, "written": str, "right": bool}
COLUMNS |= {"no_option": bool, "error": str | None, **dict.fromkeys(COUNTS, int), "seconds": float}


def record_of(row: Mapping[str, Any], answer: Answer) -> dict[str, Any]:
    """`evaluate`'s record of a row; of a row that could not be read, counts are None and `seconds` is 0."""
    record = {"id": row["id"], **{column: label_of(row, column) for column in LABELS}}
    if answer.error is not None:
        outcome = {"written": None, "right": False, "no_option": False, "error": describe_error(answer.error)}
        return record | outcome | dict.fromkeys(COUNTS) | {"seconds": 0.0}
    options = row.get("options")
    return record | {
        "written": answer.text,
        "right": is_right(answer.text, row),
        "no_option": options is not None and find_choice(answer.text, options) is None,
        "error": None,
        **{name: getattr(answer, name) for name in COUNTS},
        "seconds": answer.seconds,
    }
