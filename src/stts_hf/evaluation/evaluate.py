"""A model's answers to the questions of a data set, scored: the code behind `stts-hf eval`."""

import contextlib
from collections.abc import Generator, Iterable, Mapping
from typing import Any

from stts_hf.data.prompts import find_option
from stts_hf.data.rows import RowError, row_id
from stts_hf.inference.engine import PromptAnswer
from stts_hf.inference.predicting import answer_rows, describe_error, read_prompt
from stts_hf.inference.requests import Request

from .scoring import find_choice, is_right


def evaluate(
    model: Any,
    processor: Any,
    rows: Iterable[Mapping[str, Any]],
    *,
    pruning_ratio: float | None = None,
    batch_size: int = 8,
    num_workers: int = 0,
    decode_timeout: float | None = 600.0,
    processing: Mapping[str, Any] | None = None,
    max_new_tokens: int = 16,
    allow_urls: bool = False,
) -> Generator[dict[str, Any], None, None]:
    """
    Asks every question of `rows` (docs/training_data.md) greedily and says which answers are right. Questions about the
    same video are answered in one batch; it is decoded, and read by the model, once.

    Args:
        model: an STTS model of any backbone, or one made of it.
        processor: its processor.
        rows: dicts with `question`, `answer` and, as the case may be, `options`, `videos`, `images`, `subtitles`, and
            `type` and `group`, which name what the question is about.
        pruning_ratio: share `k` of video tokens to drop, by default the model's.
        batch_size: most questions at once.
        num_workers: processes that decode; with 0 a thread of this one does.
        decode_timeout: seconds that such a process may take over one row; None sets no limit.
        processing: options of the processor for videos, such as `{"num_frames": 32, "test_time_scaling": True}`.
        max_new_tokens: tokens that an answer may have.
        allow_urls: whether videos and images may be fetched from http(s) URLs.

    Returns:
        A record for each row, as soon as it is answered, rows that cannot be read first: `id`, `type`, `group`,
        `written`, `right`, `no_option` (what was written is none of the options), `error` (None where all went well,
        else what is wrong with the row, and `written` is None), `prompt_tokens`, `video_tokens`, `video_tokens_kept`,
        and `seconds`, the model's for the batch divided by its questions.

    Raises:
        ValueError: an argument is out of range. What the model raises comes through.
    """
    answers = answer_rows(
        model,
        processor,
        rows,
        read_question,
        pruning_ratio=pruning_ratio,
        batch_size=batch_size,
        num_workers=num_workers,
        decode_timeout=decode_timeout,
        processing=processing,
        allow_urls=allow_urls,
        max_new_tokens=max_new_tokens,
        do_sample=False,
    )
    with contextlib.closing(answers):
        for row, answer in answers:
            yield record_of(row, answer)


def ask_openly(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """
    The rows without their options: the answer is the right option's words. A row whose options or answer will not do
    stays as it is, for `evaluate` to say what is wrong.
    """
    return [_openly(row) for row in rows]


def _openly(row: Mapping[str, Any]) -> dict[str, Any]:
    options = row.get("options")
    if not isinstance(options, list):
        return dict(row)
    texts = [str(option) for option in options]
    try:
        answer = texts[find_option(texts, row.get("answer"))]
    except ValueError:
        return dict(row)
    return {name: value for name, value in row.items() if name != "options"} | {"answer": answer}


def read_question(
    processor: Any, row: Mapping[str, Any], index: int | None = None, allow_urls: bool = False
) -> Request:
    """The prompt of a row's question, its answer left out. Raises `RowError` for a row that cannot be asked."""
    prompt = read_prompt(processor, row, index, allow_urls)
    if row.get("question") is None:
        name = row_id(row, index)
        raise RowError(
            f"Row {name!r}: question is empty: a conversation in messages is for training, not for scoring.", name
        )
    return prompt


def record_of(row: Mapping[str, Any], answer: PromptAnswer | Exception) -> dict[str, Any]:
    """`evaluate`'s record of a row; what is not known of a row that could not be read is None, or 0 for `seconds`."""
    record = {"id": row["id"], "type": row.get("type"), "group": row.get("group")}
    if isinstance(answer, Exception):
        tokens = dict.fromkeys(("prompt_tokens", "video_tokens", "video_tokens_kept"))
        outcome = {"written": None, "right": False, "no_option": False, "error": describe_error(answer)}
        return record | outcome | tokens | {"seconds": 0.0}
    options = row.get("options")
    return record | {
        "written": answer.written,
        "right": is_right(answer.written, row),
        "no_option": options is not None and find_choice(answer.written, options) is None,
        "error": None,
        "prompt_tokens": answer.prompt_tokens,
        "video_tokens": answer.video_tokens,
        "video_tokens_kept": answer.video_tokens_kept,
        "seconds": answer.seconds,
    }
