"""Rows for the tests of the training data."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets

from stts_hf import load_rows, prepare_rows


def user(text: str, *kinds: str) -> dict[str, Any]:
    return {"role": "user", "content": [*({"type": kind} for kind in kinds), {"type": "text", "text": text}]}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}


def video_row(name: str, path: Any, answer: str = "A red ball.", question: str = "What moves?") -> dict[str, Any]:
    path = str(path) if isinstance(path, Path) else path
    return {"id": name, "messages": [user(question, "video"), assistant(answer)], "videos": [path]}


def text_row(name: str, answer: str = "Yes, it does.") -> dict[str, Any]:
    return {"id": name, "messages": [user("Does it move?"), assistant(answer)]}


def image_row(name: str, *paths: Any) -> dict[str, Any]:
    messages = [user("Which colour?", *["image"] * len(paths)), assistant("Red")]
    return {"id": name, "messages": messages, "images": [str(path) for path in paths]}


def prepare_each(rows: Sequence[dict[str, Any]], processor: Any, **options: Any) -> list[datasets.Dataset]:
    """Each row prepared by itself: rows with paths and rows with bytes make no table together."""
    tables = [load_rows(datasets.Dataset.from_list([row])) for row in rows]
    return [prepare_rows(table, processor, progress=False, **options) for table in tables]


def lengths(rows: Sequence[dict[str, Any]], processor: Any, pruning_ratio: float, **options: Any) -> list[int]:
    """Tokens of each row after pruning, as `prepare_rows` counts them."""
    return [table["length"][0] for table in prepare_each(rows, processor, pruning_ratio=pruning_ratio, **options)]
