"""Rows for the tests of the training data."""

from pathlib import Path
from typing import Any


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
