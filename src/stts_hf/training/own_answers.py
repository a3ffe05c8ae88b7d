"""Answers that the model itself writes, with nothing dropped, to rows that have none.

A question alone teaches little about its video, because most of its words follow from the question itself. The words
of an answer depend on the video, and the model is surest of its own greedy ones. Answers are written once, before the
first step, so every epoch and a resumed run use the same rows, packed and measured like others.
"""

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from PIL import Image
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.utils import logging

from stts_hf.data.collator import check_on_error
from stts_hf.data.encoding import Processor, process
from stts_hf.data.lines import open_lines, read_lines, write_line
from stts_hf.data.prefetch import prefetch
from stts_hf.data.preparing import LENGTH, with_column
from stts_hf.data.rows import ANSWER, PROMPT, RowError, Sample, is_unanswered, read_row, row_errors
from stts_hf.inference.generate import inputs_for
from stts_hf.video.processors import get_frames
from stts_hf.video.sources import is_url

logger = logging.get_logger(__name__)

FILES = "_answers_{}.jsonl"  # one for each process; `Trainer` pushes nothing that begins with an underscore


def mark_unanswered(rows: datasets.Dataset, question: str, max_new_tokens: int) -> datasets.Dataset:
    """
    Marks rows of `load_rows` that have no answer, so that `prepare_rows` accepts them and leaves room for one.

    question: for rows that have none. max_new_tokens: maximum length of an answer; 0 if none will be written, because
    `temporal_loss_only` learns none. Raises `ValueError` for an empty question.
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
    folder: Path | None = None,
    identity: str = "",
    on_error: str = "raise",
    progress: bool = True,
) -> datasets.Dataset:
    """
    Has `model` answer the marked rows greedily, at `k = 0`; every process its share. Videos are decoded meanwhile.

    Args:
        rows: of `mark_unanswered`, then `prepare_rows`.
        model: of any backbone, on its device.
        processor: the one that prepared the rows.
        folder: where answers are kept as they come, so that a run that is killed does not lose them.
        identity: tells the model and its settings from others whose answers may lie in `folder`.
        on_error: "raise", or "skip" to leave out rows that cannot be answered, with a warning.

    Returns:
        The rows with their answers, for `prepare_rows`: other words have other lengths.

    Raises:
        RowError: with on_error="raise", for a video that cannot be decoded, or where the model answers nothing.
    """
    check_on_error(on_error)
    state = PartialState()
    marks: list[str | None] = list(rows[ANSWER]) if ANSWER in rows.column_names else []
    waiting = [index for index, mark in enumerate(marks) if mark is not None and "room" in json.loads(mark)]
    if not waiting:
        return rows
    author = _Author(model, processor, identity, _read_answers(folder))
    mine = waiting[state.process_index :: state.num_processes]
    found: dict[int, str] = {}
    prepared = prefetch(lambda index: author.prepare(rows[index]), mine)
    with _writer(folder, state.process_index) as write, contextlib.closing(prepared):
        show = progress and state.is_main_process
        bar = tqdm(prepared, total=len(mine), desc="Answering rows", disable=None if show else True)
        for index, request in zip(mine, bar, strict=True):
            try:
                found[index] = author.answer(request, write)
            except RowError as error:
                if on_error == "raise":
                    raise
                logger.warning(f"Left out: {error}")
    answers = dict(gather_object(list(found.items())))
    for index, answer in answers.items():
        marks[index] = json.dumps({"question": json.loads(marks[index] or "")["question"], "answer": answer})
    rows = with_column(rows.remove_columns([PROMPT]), ANSWER, marks, "string")
    rows = rows.remove_columns([LENGTH]) if LENGTH in rows.column_names else rows
    left_out = set(waiting) - answers.keys()
    return rows.select([index for index in range(len(rows)) if index not in left_out])


@dataclass
class _Author:
    """known: earlier answers by key."""

    model: PreTrainedModel
    processor: Processor
    identity: str
    known: dict[str, str]

    def prepare(self, row: Mapping[str, Any]) -> tuple[Sample, str, Any] | RowError:
        """The sample, a key that tells it from all others, and the inputs of its prompt where no answer is known."""
        sample = read_row(row)
        assert sample.prompt is not None  # `prepare_rows` made it
        text, spans = sample.prompt
        prompt = text[: spans[-1][0]]  # up to the stand-in
        shown = get_frames(self.processor.video_processor)
        try:
            with row_errors(sample.id):
                media = [digest_media(source) for source in (*sample.videos, *sample.images)]
                settings = f"{self.identity} {shown['num_frames']} {shown['max_fps']}"
                key = hashlib.sha256(json.dumps([settings, sample.room, prompt, media]).encode()).hexdigest()
                return sample, key, None if key in self.known else process(self.processor, sample, prompt)
        except RowError as error:
            return error

    def answer(self, request: tuple[Sample, str, Any] | RowError, write: Callable[[dict[str, str]], None]) -> str:
        """Raises `RowError` for a row that cannot be read, and an empty answer."""
        if isinstance(request, RowError):
            raise request
        sample, key, inputs = request
        answer = self.known.get(key)
        if answer is None:
            answer = _generate(self.model, self.processor, inputs, sample.room)
            write({"key": key, "id": sample.id, "answer": answer})
        if not answer:
            raise RowError(f"Row {sample.id!r}: the unpruned model answers nothing.", sample.id)
        return answer


@torch.no_grad()
def _generate(model: Any, processor: Processor, inputs: Any, max_new_tokens: int) -> str:
    options: dict[str, Any] = {"pruning_ratio": 0.0, "do_sample": False, "num_beams": 1}
    sequences = model.generate(**inputs_for(model, inputs), **options, max_new_tokens=max_new_tokens)
    return processor.decode(sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def digest_media(source: Any) -> str:
    """The SHA-256 of a video's or image's content, wherever it lies; of a URL, that of the address."""
    if isinstance(source, Image.Image):
        source = f"{source.mode} {source.size}".encode() + source.tobytes()
    if isinstance(source, bytes):
        return hashlib.sha256(source).hexdigest()
    if is_url(source):
        return hashlib.sha256(source.encode()).hexdigest()
    with open(source, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_answers(folder: Path | None) -> dict[str, str]:
    """The answers in `folder` by their keys. Raises `ValueError` for a file that something else wrote to."""
    known: dict[str, str] = {}
    for file in folder.glob(FILES.format("*")) if folder is not None else ():
        try:
            known |= {entry["key"]: entry["answer"] for entry in read_lines(file)[0]}
        except (ValueError, KeyError) as error:
            raise ValueError(f"{file} is damaged ({error}). Delete it: its answers are written again.") from error
    return known


@contextlib.contextmanager
def _writer(folder: Path | None, process: int) -> Generator[Any, None, None]:
    """Gives a function that adds an entry to the file of the process, each on the disk before the next."""
    if folder is None:
        yield lambda entry: None
        return
    folder.mkdir(parents=True, exist_ok=True)
    with open_lines(folder / FILES.format(process)) as file:
        yield functools.partial(write_line, file)
