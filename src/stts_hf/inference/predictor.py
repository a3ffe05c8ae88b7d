"""Answers to the rows of a data set: the code behind `stts-hf predict`, and `stts-hf eval`."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

from stts_hf.checkpoints.loading import choose_device, load_config_and_processor, load_model
from stts_hf.data.encoding import Processor, check_videos, place_subtitles
from stts_hf.data.rows import PLACE, RowError, check_files, read_row, row_errors, row_id
from stts_hf.keeping import own_rule, rule_arguments, set_rule, take_rule

from .engine import answer_requests
from .inputs import STAND_INS, StoredVideo
from .requests import Answer, Request, make_request

Row = Mapping[str, Any]


class Predictor:
    """
    Answers rows with a checkpoint that it loads itself, the weights on first use: made of plain values, so that any
    process can hold one.

        predictor = Predictor("my-stts", pruning_ratio=0.5, max_new_tokens=64, num_workers=2)
        for row in predictor.predict([{"id": "a", "video": "a.mp4", "prompt": "What happens?"}]):
            print(row["answer"] or row["error"])

    Args:
        checkpoint, revision, selector, device, dtype: as in `stts_hf.load`.
        max_new_tokens: maximum number of tokens of an answer.
        allow_urls: whether videos may be fetched from http(s) URLs.
        options: of `answer_requests`: `pruning_ratio`, `score_threshold` and the like, `processing`, `batch_size`,
            `num_workers`, `decode_timeout`.

    Attributes:
        config: the model's.
        processor: of the checkpoint.
        rule: how many blocks of each video stay.
        options: of `answer_rows`.

    Raises:
        ValueError: there is no such checkpoint or device, or an argument is out of range.
    """

    def __init__(
        self,
        checkpoint: str,
        *,
        revision: str | None = None,
        selector: str | None = None,
        device: str = "auto",
        dtype: str = "auto",
        max_new_tokens: int = 64,
        **options: Any,
    ):
        self.config, self.processor = load_config_and_processor(checkpoint, revision=revision, selector=selector)
        self.rule = take_rule(self.config, options)
        set_rule(self.config.vision_config, rule_arguments(self.rule))
        self._place = (checkpoint, self.config, choose_device(device))
        self._weights: dict[str, Any] = {"revision": revision, "dtype": dtype}
        self.options = {"max_new_tokens": max_new_tokens, **rule_arguments(self.rule), **options}

    @functools.cached_property
    def model(self) -> Any:
        return load_model(*self._place, **self._weights)

    def predict(self, rows: Iterable[Row]) -> Generator[dict[str, Any], None, None]:
        """
        Answers rows greedily, those about one video together.

        Args:
            rows: dicts with `id`, `video` (a path, from the folder `media_root` where there is one, a URL, or bytes)
                and `prompt`; a row may have its own `pruning_ratio`, `score_threshold` and the like.

        Yields:
            A dict for each row, as soon as it is answered, missing and empty files first: `id`, `video`, `prompt`,
            `answer` (None if there is an error), `video_tokens_kept`, `video_tokens`, `prompt_tokens`, `new_tokens`,
            `frames`, `damaged_frames`, `seconds` in the model (the batch's, divided by its rows), and `error`.
        """
        answers = answer_rows(self.model, self.processor, rows, read_asked, do_sample=False, **self.options)
        with contextlib.closing(answers):
            for row, answer in answers:
                yield record_of(row, answer)


def answer_rows(
    model: Any,
    processor: Processor,
    rows: Iterable[Row],
    read: Callable[[Any, Row, int, bool], Request],
    *,
    allow_urls: bool = False,
    **options: Any,
) -> Generator[tuple[dict[str, Any], Answer], None, None]:
    """Each row, with an `id`, and its answer, unreadable ones first. read: makes a request or raises `RowError`."""
    asked: list[dict[str, Any]] = []
    requests: list[Request] = []
    for index, row in enumerate(rows):
        named = {**row, "id": row_id(row, index)}
        try:
            request = read(processor, row, index, allow_urls)
            if own := own_rule(row):
                with row_errors(named["id"]):
                    request = dataclasses.replace(request, rule=take_rule(model.config, {**options}, own))
            requests.append(request)
            asked.append(named)
        except RowError as error:
            yield named, Answer(error=error)
    answers = answer_requests(model, processor, requests, **options)
    with contextlib.closing(answers):
        for index, answer in answers:
            yield asked[index], answer


def read_prompt(processor: Processor, row: Row, index: int | None = None, allow_urls: bool = False) -> Request:
    """The request of a row (docs/training_data.md), without its answer. Raises `RowError` for a row that has none."""
    sample = read_row(row, index)
    with row_errors(sample.id):
        check_files(sample, allow_urls)
        check_videos(processor, sample)
        return make_request(processor, place_subtitles(processor, sample.messages[:-1]), sample.videos, sample.images)


def read_asked(processor: Processor, row: Row, index: int | None = None, allow_urls: bool = False) -> Request:
    """The request of a row `{id, video, prompt}`. Raises `RowError` for a row that has none."""
    name = row_id(row, index)
    if row.get("video") is None:
        raise RowError(f"Row {name!r}: video is empty. Name a file.", name)
    stored = row["video"] if isinstance(row["video"], StoredVideo) else None
    columns = {name: row.get(name) for name in PLACE} | STAND_INS
    columns |= {"question": row.get("prompt"), "video": b"?" if stored else row["video"]}
    request = read_prompt(processor, columns, index, allow_urls)
    return dataclasses.replace(request, videos=(stored,)) if stored else request


def record_of(row: Row, answer: Answer) -> dict[str, Any]:
    """`Predictor.predict`'s record of a row; with an error, counts are None and `seconds` is 0."""
    names = ("video_tokens_kept", "video_tokens", "prompt_tokens", "new_tokens")
    counts: dict[str, int | None] = {name: getattr(answer, name) for name in names}
    for name, counted in (("frames", "num_frames"), ("damaged_frames", "damaged_frames")):
        counts[name] = sum(getattr(video, counted) for video in (answer, *answer.others))
    error = None if answer.error is None else describe_error(answer.error)
    said = {"id": row["id"], "video": video_name(row), "prompt": row.get("prompt"), "answer": answer.answer}
    return {**said, **(dict.fromkeys(counts) if error else counts), "seconds": answer.seconds, "error": error}


def video_name(row: Row) -> str | None:
    """What a record calls the video of a row; None where the data set holds it."""
    video = row.get("video")
    if isinstance(video, Mapping):
        video = video.get("path")
    return video if isinstance(video, str) else None


def describe_error(error: Exception) -> str:
    """What a record says of an error: its kind too, unless it is one that unreadable files end in."""
    name = type(error).__name__
    return str(error) or name if isinstance(error, ValueError | OSError | MemoryError) else f"{name}: {error}"
