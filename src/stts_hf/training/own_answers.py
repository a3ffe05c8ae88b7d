"""Answers that the model itself writes, with nothing dropped, to rows that have none.

Most tokens of a question do not depend on the video; those of an answer do, and the model is surest of its own greedy
ones. Answers are written once, before the first step, so every epoch and a resumed run use the same rows.
"""

import contextlib
import functools
import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets
from accelerate import PartialState
from accelerate.utils import gather_object
from datasets.fingerprint import Hasher
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.utils import logging

from stts_hf.data.encoding import Processor, prompt_of
from stts_hf.data.lines import open_lines, read_lines, write_line
from stts_hf.data.preparing import LENGTH, with_column
from stts_hf.data.rows import ANSWER, RowError, is_unanswered, read_row, row_errors
from stts_hf.inference.engine import answer_requests
from stts_hf.inference.requests import Request
from stts_hf.video.processors import get_frames
from stts_hf.video.sources import is_url

logger = logging.get_logger(__name__)

FILES = "_answers_{}.jsonl"  # one for each process; `Trainer` pushes nothing that begins with an underscore


def mark_unanswered(rows: datasets.Dataset, question: str, max_new_tokens: int) -> datasets.Dataset:
    """
    Marks rows of `load_rows` that have no answer, so that `prepare_rows` accepts them and leaves room for one.

    question: for rows that have none. max_new_tokens: maximum length of an answer; 0 if none will be written, because
    the temporal loss needs none. Raises `ValueError` for an empty question.
    """
    if not question.strip():
        raise ValueError("question is empty. Give the words to ask about clips that come without any.")
    columns = [name for name in ("messages", "question", "answer", "id") if name in rows.column_names]
    mark = json.dumps({"question": question, "room": max_new_tokens})
    marks = [mark if is_unanswered(row) else None for row in rows.select_columns(columns)]
    return with_column(rows, ANSWER, marks, "string") if any(marks) else rows


def answer_rows(
    rows: datasets.Dataset,
    model: PreTrainedModel,
    processor: Processor,
    *,
    folder: Path,
    identity: str = "",
    on_error: str = "raise",
) -> datasets.Dataset:
    """
    Returns the rows with the model's greedy answers, at `k = 0`, to the marked ones; every process answers its share.
    `prepare_rows` then measures them again.

    rows: of `mark_unanswered`, then `prepare_rows` with the same processor. folder: keeps answers as they come, so that
    a killed run does not lose them. identity: of the model and its settings; answers in `folder` of other identities
    are ignored. on_error: "raise" a `RowError` for a video that cannot be decoded or an empty answer, or "skip" such a
    row with a warning.
    """
    state = PartialState()
    marks: list[str | None] = list(rows[ANSWER]) if ANSWER in rows.column_names else []
    rooms = {index: json.loads(mark).get("room") for index, mark in enumerate(marks) if mark is not None}
    if not (waiting := [index for index, room in rooms.items() if room is not None]):
        return rows
    mine = waiting[state.process_index :: state.num_processes]
    found: dict[int, str] = {}
    asked: deque[tuple[int, str, str]] = deque()  # index, id and key

    with _open_answers(folder, state.process_index) as (known, write):

        def requests() -> Iterator[Request]:
            for index in mine:
                name, key, request = _request(rows[index], processor, identity)
                if key in known:
                    found[index] = known[key]
                else:
                    asked.append((index, name, key))
                    yield request

        options = {"max_new_tokens": rooms[waiting[0]], "do_sample": False, "num_beams": 1}  # one room for all rows
        answers = answer_requests(model, processor, requests(), pruning_ratio=0.0, batch_size=1, share=False, **options)
        bar = tqdm(answers, "Answering rows", len(mine), disable=None if state.is_main_process else True)
        with contextlib.closing(answers):
            for _, answer in bar:
                index, name, key = asked.popleft()
                try:
                    with row_errors(name):
                        if answer.error is not None:
                            raise answer.error
                        if not answer.text:
                            raise ValueError("the unpruned model answers nothing.")
                except RowError as error:
                    if on_error == "raise":
                        raise
                    logger.warning(f"Left out: {error}")
                    continue
                found[index] = answer.text
                write({"key": key, "id": name, "answer": answer.text})
    return _with_answers(rows, marks, set(waiting), dict(gather_object(list(found.items()))))


def _with_answers(
    rows: datasets.Dataset, marks: list[str | None], waiting: set[int], answers: Mapping[int, str]
) -> datasets.Dataset:
    """The rows with `answers` in their marks, without those of `waiting` that have none."""
    for index, text in answers.items():
        marks[index] = json.dumps({"question": json.loads(marks[index] or "")["question"], "answer": text})
    rows = with_column(rows, ANSWER, marks, "string")
    rows = rows.remove_columns([LENGTH] if LENGTH in rows.column_names else [])
    left_out = waiting - answers.keys()
    return rows.select([index for index in range(len(rows)) if index not in left_out])


def _request(row: Mapping[str, Any], processor: Processor, identity: str) -> tuple[str, str, Request]:
    """A row's id, the key of its answer, which depends on the content of its media, and what to ask."""
    sample = read_row(row)
    text, spans = prompt_of(processor, sample)
    prompt = text[: spans[-1][0]]  # up to the stand-in
    try:
        with row_errors(sample.id):
            media = [_digest(source) for source in (*sample.videos, *sample.images)]
    except RowError as error:
        return sample.id, "", Request("", "", error=error)
    key = Hasher.hash([identity, get_frames(processor.video_processor), sample.room, prompt, media])
    return sample.id, key, Request("", prompt, tuple(sample.videos), tuple(sample.images))


def _digest(source: Any) -> str:
    """A hash of a video's or image's content, wherever it lies; of a URL, that of the address."""
    if not isinstance(source, str) or is_url(source):
        return Hasher.hash(source)
    with open(source, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _open_answers(folder: Path, process: int) -> Iterator[tuple[dict[str, str], Callable[[Mapping[str, Any]], None]]]:
    """The answers in `folder` by their keys, and a function that adds one to the file of this process."""
    folder.mkdir(parents=True, exist_ok=True)
    known: dict[str, str] = {}
    for path in folder.glob(FILES.format("*")):
        try:
            known |= {entry["key"]: entry["answer"] for entry in read_lines(path)[0]}
        except (ValueError, KeyError) as error:
            raise ValueError(f"{path} is damaged ({error}). Delete it: its answers are written again.") from error
    with open_lines(folder / FILES.format(process)) as file:
        yield known, functools.partial(write_line, file)
