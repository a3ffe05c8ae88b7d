"""What a study reads and writes but for weights: the data set, encoded once for all runs, and small JSON files."""

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from tqdm import tqdm

from stts_hf.checkpoints.atomic_folder import atomic_file
from stts_hf.checkpoints.families import family_of_checkpoint
from stts_hf.checkpoints.files import digest_files, read_json
from stts_hf.data.encoding import Encoded, encode
from stts_hf.data.loading import load_rows
from stts_hf.data.prompts import choice_messages
from stts_hf.data.rows import check_files, read_row
from stts_hf.evaluation.evaluate import ask_openly

from .make_dataset import levels, read_about

TRAIN, TRAIN_QUESTIONS, TEST = "train_conversations.jsonl", "train.jsonl", "test.jsonl"
ENCODED, CONVERSATIONS = "encoded", "conversations.pt"


class StudyError(ValueError):
    """What the user can mend, in a sentence."""


def check_dataset(dataset: Path, questions: str = TEST) -> dict[str, Any]:
    """
    What `dataset.json` says. questions: the file of those that are asked. Raises `StudyError` for a folder that is no
    data set of this version, or not whole.
    """
    try:
        about = read_about(dataset)
        _check_rows(dataset, TRAIN, about["splits"]["train"]["clips"])
        _check_rows(dataset, TRAIN_QUESTIONS, about["splits"]["train"]["questions"])
        _check_rows(dataset, questions, about["splits"][Path(questions).stem]["questions"])
        load_masks(dataset, "motion", questions)
        load_masks(dataset, "things", questions)
    except (ValueError, OSError, KeyError, zipfile.BadZipFile) as error:
        raise StudyError(f"--dataset {dataset} cannot be used ({error}): make it again with make-dataset") from error
    return about


def _check_rows(dataset: Path, name: str, number: int) -> None:
    """Raises `ValueError` or `OSError` where a file of rows, or one that a row is about, is missing or damaged."""
    rows = [json.loads(line) for line in (dataset / name).read_text(encoding="utf-8").splitlines()]
    if len(rows) != number:
        raise ValueError(f"{name} has {len(rows)} rows, not {number}")
    media = {file for row in rows for file in (*row.get("videos", ()), *row.get("images", ()))}
    if missing := sorted(file for file in media if not (dataset / file).is_file()):
        raise ValueError(f"{len(missing)} files are missing, such as {missing[0]}")


def fingerprint_dataset(dataset: Path) -> str:
    """Of everything that is asked and answered; the clips follow from it, but for their encoder."""
    return digest_files([dataset / name for name in ("dataset.json", TRAIN, TEST)])


class EncodedRows(Dataset):
    """What `encode_conversations` wrote, as samples for `STTSDataCollator`; their tensors stay in the file."""

    def __init__(self, folder: Path) -> None:
        # Mapped: processes share the pages, and only what a batch needs is read.
        self.rows = torch.load(folder / ENCODED / CONVERSATIONS, mmap=True, weights_only=True)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Encoded:
        return Encoded(**self.rows[index])


def encode_conversations(dataset: Path, processor: Any, folder: Path, without_options: bool = False) -> None:
    """
    Decodes and tokenizes the training conversations of a data set, once for all runs of the study in `folder`.
    without_options: all questions openly, as they are asked. Raises `RowError` for one that cannot be.
    """
    path = folder / ENCODED / CONVERSATIONS
    if path.exists():
        return
    rows = []
    for row in tqdm(load_rows(dataset / TRAIN), desc="Decoding the training clips", disable=None):
        sample = read_row(row | {"messages": open_messages(row["messages"])} if without_options else row)
        check_files(sample)
        rows.append(vars(encode(processor, sample)))
    with atomic_file(path) as new:
        torch.save(rows, new)


def open_messages(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """A conversation of `make-dataset` whose questions show no options: the right option's text is the answer."""
    found = []
    for question, answer in zip(messages[::2], messages[1::2], strict=True):
        text, *options = question["content"].split("\n")
        right = [line[3:] for line in options if line.startswith(f"{answer['content']}. ")]
        found += choice_messages(text, None, right[0] if right else answer["content"])
    return found


def load_processor(base: Path) -> Any:
    """The processor of a checkpoint. Raises `ValueError` where that would run code of the checkpoint."""
    return family_of_checkpoint(base).processor.from_pretrained(base, trust_remote_code=False)


def load_masks(dataset: Path, kind: str, questions: str = TEST) -> dict[str, np.ndarray]:
    """
    Masks of each clip that is asked about, in the frames that `make-dataset` counts with. kind: "motion", which patches
    move, (T, rows, columns) bool; "things", how much of them a thing covers, (things, T, rows, columns) in percent.
    """
    with np.load(dataset / kind / f"{Path(questions).stem}.npz") as masks:
        return dict(masks)


def read_questions(dataset: Path, without_options: bool = False, name: str = TEST) -> list[dict[str, Any]]:
    """The rows of a split, by default for testing; without_options: all to be answered openly."""
    rows = [json.loads(line) for line in (dataset / name).read_text(encoding="utf-8").splitlines()]
    return ask_openly(rows) if without_options else rows


def describe_questions(dataset: Path, without_options: bool, name: str = TEST) -> dict[str, Any]:
    """What a report needs of a data set, so that it is made without: ids and kinds of questions, levels of chance."""
    about, rows = read_about(dataset), read_questions(dataset, without_options, name)
    if without_options or name != TEST:  # the data set's levels are of test questions as it asks them
        about |= levels({TRAIN: read_questions(dataset, without_options, TRAIN_QUESTIONS), name: rows})
    return {
        "questions": [{key: row[key] for key in ("id", "clip", "type", "group")} for row in rows],
        **{key: about.get(key) for key in ("splits", "look", "chance", "text_only")},
    }


def write_json(path: Path, content: Any) -> None:
    """Writes the file, whole or not at all."""
    with atomic_file(path) as new:
        new.write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises `StudyError` if there is none."""
    if not path.is_file():
        raise StudyError(f"there is no {path}")
    try:
        return read_json(path)
    except ValueError as error:
        raise StudyError(str(error)) from error
