"""
Reads a row of a data set, but not its videos: the conversation, and its videos and images in order.

A row has `messages`, or `question`, `options` and `answer`; `videos` and `images` fill the placeholders of the messages
in order. A row without an answer may have the model's own in the column `ANSWER`. See docs/training_data.md.
"""

import base64
import contextlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from stts_hf.video.sources import is_url

from .prompts import choice_messages, subtitle_text

MEDIA = {"video": "videos", "image": "images"}
# Column of rows without an answer: {"question", "room": most tokens of the answer}, later {"question", "answer"}.
ANSWER = "stts_answer"
# Column of rows from the Hub: folders, as JSON, outside of which their paths may not lead.
WITHIN = "stts_within"
PLACE = ("id", "media_root", WITHIN)  # columns that name the row and the folders of its files
_STAND_IN = "..."  # in place of an answer that the model will write
_PLACEHOLDER = re.compile(r"<(video|image)>")


class RowError(ValueError):
    """A row that cannot be trained on; the message names its id. `row_id` is lost on the way out of a worker."""

    def __init__(self, message: str, row_id: str | None = None) -> None:
        super().__init__(message)
        self.row_id = row_id


@dataclass
class Sample:
    """
    A row that was read.

    messages: `{"role", "content": parts}`; parts that stand for a video or image hold no data. videos: paths, URLs or
    bytes. images: paths, URLs, bytes or PIL images. All in the order of the placeholders. room: tokens that the last
    answer may have where the model will write it.
    """

    id: str
    messages: list[dict[str, Any]]
    videos: list[Any]
    images: list[Any]
    room: int = 0


def row_id(row: Any, index: int | None = None) -> str:
    """The `id` column, else the row's number."""
    found = row.get("id") if isinstance(row, Mapping) else None
    if found is not None:
        return str(found)
    return "<no id>" if index is None else f"row {index}"


def read_row(row: Mapping[str, Any], index: int | None = None) -> Sample:
    """Reads a row; `index` names it where it has no `id`. Raises `RowError` for one that cannot be trained on."""
    name = row_id(row, index)
    with row_errors(name):
        if not isinstance(row, Mapping):
            raise TypeError(f"a row must be a dict of columns, got {type(row).__name__}.")
        root = Path(row.get("media_root") or "")
        own = json.loads(row[ANSWER]) if row.get(ANSWER) else None
        messages = _read_messages(row, own)
        media = {key: _fill(messages, kind, row, root) for kind, key in MEDIA.items()}
        subtitles = row.get("subtitles")
        if row.get(WITHIN):
            paths = [source for sources in media.values() for source in sources if isinstance(source, str)]
            if isinstance(subtitles, str) and "-->" not in subtitles:
                paths.append(str(root / subtitles))
            _check_within(json.loads(row[WITHIN]), paths)
        if subtitles:
            if messages[0]["role"] == "subtitle":
                raise ValueError("subtitles are given twice, as a column and in messages. Leave one out.")
            messages.insert(0, {"role": "subtitle", "content": subtitle_text(subtitles, root)})
        if own is not None and not media["videos"]:
            raise ValueError(
                "it has no answer and no video, so nothing is pruned and nothing learned. Leave the row out."
            )
        return Sample(name, messages, media["videos"], media["images"], room=(own or {}).get("room", 0))


def is_unanswered(row: Mapping[str, Any]) -> bool:
    """Whether a row asks nothing, or something that nothing in it answers."""
    messages = row.get("messages")
    if messages is None:
        return row.get("answer") is None
    last = messages[-1] if isinstance(messages, list | tuple) and messages else None
    return isinstance(last, Mapping) and str(last.get("role")).lower() == "user"


@contextlib.contextmanager
def row_errors(name: str) -> Iterator[None]:
    """Turns errors into `RowError` of the row `name`, but for those that are not the row's fault."""
    try:
        yield
    except (ImportError, MemoryError, RowError):
        raise
    except Exception as error:  # decoders and chat templates raise what they like
        raise RowError(f"Row {name!r}: {error}", name) from error


def check_files(sample: Sample, allow_urls: bool = False) -> None:
    """Raises `RowError` where a video or image is missing, is empty, or would be fetched without `allow_urls`."""
    for key, sources in (("videos", sample.videos), ("images", sample.images)):
        for source in sources:
            problem = _problem(source, allow_urls) if isinstance(source, str) else None
            if problem:
                raise RowError(f"Row {sample.id!r}: {key}: {problem}", sample.id)


def _problem(source: str, allow_urls: bool) -> str | None:
    if is_url(source):
        advice = "Download it and give its path, or pass allow_urls (--allow-urls on the command line)."
        return None if allow_urls else f"{source!r} is a URL, and nothing is fetched unasked. {advice}"
    try:
        found = os.stat(source)
    except PermissionError as error:
        return f"the file {source!r} cannot be read: {error.strerror}."
    except (OSError, ValueError):  # a null byte in it, too
        return f"the file {source!r} does not exist."
    if not stat.S_ISREG(found.st_mode):
        return f"the file {source!r} is a {'folder' if stat.S_ISDIR(found.st_mode) else 'pipe or device'}."
    return None if found.st_size else f"the file {source!r} is empty."


def _check_within(folders: Sequence[str], paths: Sequence[str]) -> None:
    """Raises `ValueError` for a path, of a row from the Hub, that leads out of these folders, also over links."""
    allowed = [Path(folder).resolve() for folder in folders]
    for path in paths:
        if is_url(path):
            continue
        if "\0" in path or not any(Path(path).resolve().is_relative_to(folder) for folder in allowed):
            raise ValueError(
                f"{path!r} is no file of the data set, and a row from the Hub may name no other. Pass media_root, the "
                "folder that its files are in; or save the rows beside them, and name that file."
            )


def _conversation(row: Mapping[str, Any], own: Mapping[str, Any] | None) -> tuple[list[Any], int]:
    """The messages, an `own` answer or a stand-in last; and how many may hold placeholders: those of the row."""
    given, question = row.get("messages"), row.get("question")
    if own is not None and given is None and question is None:
        question = own["question"]
    if (given is None) == (question is None):
        columns = sorted(name for name, value in row.items() if value is not None)
        raise ValueError(f"one of the columns messages and question must be filled, this row has {columns}.")
    answer = [] if own is None else [{"role": "assistant", "content": own.get("answer", _STAND_IN)}]
    if given is None:
        if own is None and row.get("answer") is None:
            raise ValueError("answer is empty, so nothing is learned of the question. Fill it, or leave the row out.")
        asked = choice_messages(question, row.get("options"), row.get("answer") if own is None else None)
        return [*asked, *answer], 0
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise TypeError(f"messages must be a list of {{'role', 'content'}}, got {given!r}.")
    return [*given, *answer], len(given)


def _read_messages(row: Mapping[str, Any], own: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Messages with their content as a list of parts, or as text for subtitles."""
    given, with_placeholders = _conversation(row, own)
    messages: list[dict[str, Any]] = []
    for number, message in enumerate(given):
        if not isinstance(message, Mapping) or message.get("role") is None or message.get("content") is None:
            raise ValueError(f"messages[{number}] must have role and content, got {message!r}.")
        role, content = str(message["role"]).lower(), message["content"]
        if role not in ("user", "assistant", "system") and (role, number) != ("subtitle", 0):
            raise ValueError(f"messages[{number}] has role {role!r}; use user, assistant, system, or subtitle first.")
        parts = [_read_part(part, number) for part in (content if isinstance(content, list | tuple) else [content])]
        if role == "subtitle":
            messages.append({"role": role, "content": "\n".join(part.get("text", "") for part in parts)})
            continue
        if number < with_placeholders:
            parts = [piece for part in parts for piece in _split(part)]
        if role == "assistant" and not "".join(part.get("text", "") for part in parts).strip():
            raise ValueError(f"messages[{number}]: the answer is empty. Fill it, or leave the row out.")
        if role == "assistant" and any(part["type"] != "text" for part in parts):
            raise ValueError(f"messages[{number}]: an answer cannot hold a video or image. Keep its text only.")
        messages.append({"role": role, "content": parts})
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("messages: there is no assistant message to learn. Add one, or leave the row out.")
    return messages


def _split(part: dict[str, Any]) -> list[dict[str, Any]]:
    """A text with `<video>` and `<image>` placeholders as parts; line breaks beside a placeholder belong to it."""
    pieces = _PLACEHOLDER.split(part.get("text", ""))
    if len(pieces) == 1:
        return [part]
    parts: list[dict[str, Any]] = []
    for position, piece in enumerate(pieces):
        if position % 2:
            parts.append({"type": piece})
        elif words := piece.strip("\n"):
            parts.append(part | {"text": words})
            part = {"type": "text"}  # only the first part keeps the style
    return parts


def _read_part(part: Any, number: int) -> dict[str, Any]:
    """A part with its text or, under `source`, its file."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise TypeError(f"messages[{number}]: content must be a text or a list of parts with a type, got {part!r}.")
    # Tables fill the keys that other parts have with None, and the chat template asks which keys there are.
    kept = {key: value for key, value in part.items() if value is not None}
    kind = kept.get("type") or next((name for name in ("text", *MEDIA) if name in kept), None)
    if kind == "text" and isinstance(kept.get("text"), str):
        return {key: kept[key] for key in ("text", "style") if key in kept} | {"type": "text"}
    if kind not in MEDIA:
        raise ValueError(f"messages[{number}]: a part must have the type text, video or image, got {part!r}.")
    sources = [kept[key] for key in (kind, "path", "url", f"{kind}_url") if key in kept]
    return {"type": kind} | ({"source": sources[0]} if sources else {})


def _source(entry: Any, key: str, kind: str, root: Path) -> Any:
    """A path, URL, bytes or PIL image."""
    if isinstance(entry, Mapping):
        data, path = entry.get("bytes"), entry.get("path") or entry.get("url")
        entry = path if data is None else data
    if isinstance(entry, os.PathLike):
        entry = os.fspath(entry)
    if isinstance(entry, bytes | bytearray | memoryview) and entry:
        return bytes(entry)
    if isinstance(entry, str) and entry.lower().startswith("data:"):
        return base64.b64decode(entry.partition(",")[2])
    if isinstance(entry, str) and entry:
        return entry if is_url(entry) else str(root / entry.removeprefix("file://"))
    if kind == "image" and isinstance(entry, Image.Image):
        return entry
    raise TypeError(
        f"{key} must be a path, a URL, bytes, {{'bytes', 'path'}} or a PIL image, got {entry!r:.80}. Columns that "
        f"datasets decodes must be cast to {kind.title()}(decode=False); load_rows does that."
    )


def _fill(messages: list[dict[str, Any]], kind: str, row: Mapping[str, Any], root: Path) -> list[Any]:
    """All videos or images in the order of their parts, which lose them; those of the columns fill empty parts."""
    given: list[Any] = []
    for key in (MEDIA[kind], kind):
        value = row.get(key)
        entries = value if isinstance(value, list | tuple) else [] if value is None else [value]
        given.extend(_source(entry, f"{key}[{number}]", kind, root) for number, entry in enumerate(entries))
    contents = [message["content"] for message in messages if message["role"] != "subtitle"]
    parts = [part for content in contents for part in content if part["type"] == kind]
    if given and not parts:
        first_user = next((message for message in messages if message["role"] == "user"), None)
        if first_user is None:
            raise ValueError(f"messages: there is no user message to ask about the {kind}. Add one.")
        first_user["content"][:0] = [{"type": kind} for _ in given]
        return given
    empty = sum("source" not in part for part in parts)
    if empty != len(given):
        raise ValueError(
            f"{MEDIA[kind]} has {len(given)} entries, but the messages have {empty} places for them. Add or remove "
            f"parts of type {kind} without a source, or <{kind}> in a text."
        )
    remaining = iter(given)
    return [
        _source(part.pop("source"), f"messages: {kind}", kind, root) if "source" in part else next(remaining)
        for part in parts
    ]
