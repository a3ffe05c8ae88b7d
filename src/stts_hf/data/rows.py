"""
One row of a data set, read without touching its videos: conversation, videos and images in order, or what is wrong.

A row has `messages`, or `question` with `options` and `answer` in their place; `videos` and `images` fill the
placeholders of the messages in order. A row without an answer gets one of the model's own where the model is to match
itself, and a stand-in where only its video is looked at. See docs/training_data.md.
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
PROMPT = "stts_prompt"  # column in which `prepare_rows` keeps what the template made of a row
# Column of rows without an answer: {"question", "room"}, tokens that an answer may have, then {"question", "answer"}.
ANSWER = "stts_answer"
# Column of rows from the Hub: folders, as JSON, outside of which their paths may not lead.
WITHIN = "stts_within"
PLACE = ("id", "media_root", WITHIN)  # what says which row it is, and where its files are
_STAND_IN = "..."  # for an answer that is yet to be written
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
    bytes. images: paths, URLs, bytes or PIL images. All in the order of the placeholders. prompt: the conversation in
    the chat template's words and its learned characters `[start, end)`, once it is rendered. room: tokens that the last
    answer may have, where it is yet to be written and what is there stands in for it.
    """

    id: str
    messages: list[dict[str, Any]]
    videos: list[Any]
    images: list[Any]
    prompt: tuple[str, list[tuple[int, int]]] | None = None
    room: int = 0


def row_id(row: Any, index: int | None = None) -> str:
    """The `id` column, else the row's number."""
    found = row.get("id") if isinstance(row, Mapping) else None
    if found is not None:
        return str(found)
    return "<no id>" if index is None else f"row {index}"


def read_row(row: Mapping[str, Any], index: int | None = None) -> Sample:
    """
    Reads a row; `index` names it where it has no `id`. One of `prepare_rows` comes with its prompt, and is not read
    again but for files that lie in it as bytes.

    Raises:
        RowError: a column is missing or of the wrong kind, placeholders and videos or images differ in number, or there
            is no answer to learn from.
    """
    name = row_id(row, index)
    kept: dict[str, Any] = json.loads(row[PROMPT]) if isinstance(row, Mapping) and row.get(PROMPT) else {}
    if "videos" in kept:
        return Sample(name, [], **kept)
    with row_errors(name):
        sample = _read(row, name)
    sample.prompt = kept.get("prompt")
    return sample


def is_unanswered(row: Mapping[str, Any]) -> bool:
    """Whether a row asks nothing, or something that nothing in it answers."""
    messages = row.get("messages")
    if messages is None:
        return row.get("answer") is None
    last = messages[-1] if isinstance(messages, list | tuple) and messages else None
    return isinstance(last, Mapping) and str(last.get("role")).lower() == "user"


@contextlib.contextmanager
def row_errors(name: str) -> Iterator[None]:
    """Raises as `RowError` of the row `name` whatever is raised inside and is none yet."""
    try:
        yield
    except (ImportError, MemoryError, RowError):  # not the row's fault, or said already
        raise
    except Exception as error:  # decoders and chat templates raise what they like
        raise RowError(f"Row {name!r}: {error}", name) from error


def check_files(sample: Sample, allow_urls: bool = False) -> None:
    """Raises `RowError` where a video or image is missing, is empty, or would be fetched without `allow_urls`."""
    for key, sources in (("videos", sample.videos), ("images", sample.images)):
        for source in sources:
            if not isinstance(source, str) or (is_url(source) and allow_urls):
                continue
            if is_url(source):
                problem = (
                    f"{source!r} is a URL, and nothing is fetched unasked. Download it and give its path, or pass "
                    "allow_urls (--allow-urls on the command line)."
                )
            elif not os.path.isfile(source):
                problem = f"the file {source!r} {_why_no_file(source)}."
            elif not os.path.getsize(source):
                problem = f"the file {source!r} is empty."
            else:
                continue
            raise RowError(f"Row {sample.id!r}: {key}: {problem}", sample.id)


def _why_no_file(path: str) -> str:
    try:
        return "is a folder" if stat.S_ISDIR(os.stat(path).st_mode) else "is a pipe or device"
    except PermissionError as error:
        return f"cannot be read: {error.strerror}"
    except (OSError, ValueError):  # a null byte in it, too
        return "does not exist"


def _read(row: Any, name: str) -> Sample:
    if not isinstance(row, Mapping):
        raise TypeError(f"a row must be a dict of columns, got {type(row).__name__}.")
    root = Path(row["media_root"]) if row.get("media_root") else None
    own = json.loads(row[ANSWER]) if row.get(ANSWER) else None
    messages = _read_messages(row, own)
    media = {key: _fill(messages, kind, _read_media(row, kind, root), root) for kind, key in MEDIA.items()}
    if row.get(WITHIN):
        _check_within([Path(place) for place in json.loads(row[WITHIN])], row.get("subtitles"), root, media)
    if row.get("subtitles"):
        if messages[0]["role"] == "subtitle":
            raise ValueError("subtitles: messages begin with subtitles as well. Give them once.")
        messages.insert(0, {"role": "subtitle", "content": subtitle_text(row["subtitles"], root)})
    if own is not None and not media["videos"]:
        raise ValueError(
            "it has no answer and no video. Text and images alone are never pruned: there is nothing to learn. Leave "
            "the row out."
        )
    return Sample(name, messages, media["videos"], media["images"], room=(own or {}).get("room", 0))


def _check_within(allowed: list[Path], subtitles: Any, root: Path | None, media: Mapping[str, list[Any]]) -> None:
    """Raises `ValueError` for a path in a row from the Hub, also behind links, that lies in none of these folders."""
    paths = [
        source for sources in media.values() for source in sources if isinstance(source, str) and not is_url(source)
    ]
    if isinstance(subtitles, str) and "-->" not in subtitles:
        paths.append(str((root or Path()) / subtitles))
    for path in paths:
        if "\0" in path or not any(Path(path).resolve().is_relative_to(place.resolve()) for place in allowed):
            raise ValueError(
                f"{path!r} is no file of the data set, and a row from the Hub may name no other. Pass media_root, the "
                "folder that its files are in; or save the rows beside them, and name that file."
            )


def _conversation(row: Mapping[str, Any], own: Mapping[str, Any] | None) -> tuple[list[Any], Sequence[int]]:
    """
    The messages of a row, and which of them may hold placeholders: not the texts of a question, nor an `own` answer of
    the model, which is the last message, or a stand-in for it.
    """
    given, question = row.get("messages"), row.get("question")
    if own is not None and given is None and question is None:
        question = own["question"]
    if (given is None) == (question is None):
        columns = sorted(name for name, value in row.items() if value is not None)
        raise ValueError(f"one of the columns messages and question must be filled, this row has {columns}.")
    answer = [] if own is None else [{"role": "assistant", "content": own.get("answer", _STAND_IN)}]
    if given is None:
        if own is None and row.get("answer") is None:
            raise ValueError("answer is empty, so there is nothing to learn of the question.")
        asked = choice_messages(question, row.get("options"), row.get("answer") if own is None else None)
        return [*asked, *answer], ()
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise TypeError(f"messages must be a list of {{'role', 'content'}}, got {given!r}.")
    return [*given, *answer], range(len(given))


def _read_messages(row: Mapping[str, Any], own: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Messages with their content as a list of parts, or as text for subtitles."""
    given, with_placeholders = _conversation(row, own)
    messages: list[dict[str, Any]] = []
    for number, message in enumerate(given):
        if not isinstance(message, Mapping) or message.get("role") is None or message.get("content") is None:
            raise ValueError(f"messages[{number}] must have role and content, got {message!r}.")
        role, content = str(message["role"]).lower(), message["content"]
        if role not in ("user", "assistant", "system") and (role, number) != ("subtitle", 0):
            raise ValueError(f"messages[{number}] has role {role!r}; user and assistant are known, and subtitle first.")
        parts = [_read_part(part, number) for part in (content if isinstance(content, list | tuple) else [content])]
        if role == "subtitle":
            messages.append({"role": role, "content": "\n".join(part.get("text", "") for part in parts)})
            continue
        if number in with_placeholders:
            parts = [piece for part in parts for piece in _split(part)]
        if role == "assistant" and any(part["type"] != "text" for part in parts):
            raise ValueError(f"messages[{number}]: an answer cannot hold a video or image.")
        if role == "assistant" and not "".join(part["text"] for part in parts).strip():
            raise ValueError(f"messages[{number}]: the answer is empty.")
        messages.append({"role": role, "content": parts})
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("messages: there is no assistant message, so nothing to learn: all labels would be masked.")
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
            part = {"type": "text"}  # a style is said once
    return parts


def _read_part(part: Any, number: int) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise TypeError(f"messages[{number}]: content must be a text or a list of parts with a type, got {part!r}.")
    # Tables fill the keys that other parts have with None, and the chat template asks which keys there are.
    kept = {key: value for key, value in part.items() if value is not None}
    kind = kept.get("type") or next((name for name in ("text", *MEDIA) if name in kept), None)
    if kind == "text":
        if not isinstance(kept.get("text"), str):
            raise ValueError(f"messages[{number}]: a part of type text needs a text, got {part!r}.")
        return {"type": "text", "text": kept["text"]} | ({"style": kept["style"]} if "style" in kept else {})
    if kind not in MEDIA:
        raise ValueError(f"messages[{number}]: the type of a part must be text, video or image, got {kind!r}.")
    sources = [kept[key] for key in (kind, "path", "url", f"{kind}_url") if key in kept]
    return {"type": kind} | ({"source": sources[0]} if sources else {})


def _read_media(row: Mapping[str, Any], kind: str, root: Path | None) -> list[Any]:
    """The columns `videos` and `video`, or `images` and `image`."""
    found: list[Any] = []
    for key in (MEDIA[kind], kind):
        value = row.get(key)
        if value is None:
            continue
        entries = value if isinstance(value, list | tuple) else [value]
        found.extend(_source(entry, f"{key}[{number}]", kind, root) for number, entry in enumerate(entries))
    return found


def _source(entry: Any, key: str, kind: str, root: Path | None) -> Any:
    if isinstance(entry, Mapping):
        data, path = entry.get("bytes"), entry.get("path") or entry.get("url")
        entry = path if data is None else data
    if isinstance(entry, bytes | bytearray | memoryview):
        if not entry:
            raise ValueError(f"{key} is empty.")
        return bytes(entry)
    if isinstance(entry, os.PathLike):
        entry = os.fspath(entry)
    if isinstance(entry, str) and entry.lower().startswith("data:"):
        return base64.b64decode(entry.partition(",")[2])
    if isinstance(entry, str) and entry:
        return entry if is_url(entry) else str((root or Path()) / entry.removeprefix("file://"))
    if kind == "image" and isinstance(entry, Image.Image):
        return entry
    forms = "a path, bytes or {'bytes', 'path'}" + (" or a PIL image" if kind == "image" else "")
    if isinstance(entry, list | tuple):
        advice = f"Write the files in one list, not in lists of lists; a {kind} is one file."
    else:
        advice = f"Columns that datasets decodes must be cast to {kind.title()}(decode=False); load_rows does that."
    raise TypeError(f"{key} must be {forms}, got {type(entry).__name__}. {advice}")


def _fill(messages: list[dict[str, Any]], kind: str, given: list[Any], root: Path | None) -> list[Any]:
    """All videos or images in the order of their parts; takes them out of the parts."""
    parts = [
        part
        for message in messages
        if message["role"] != "subtitle"
        for part in message["content"]
        if part["type"] == kind
    ]
    if given and not parts:
        first_user = next((message for message in messages if message["role"] == "user"), None)
        if first_user is None:
            raise ValueError(f"messages: there is no user message to ask about the {kind}.")
        first_user["content"][:0] = [{"type": kind} for _ in given]
        return given
    empty = sum("source" not in part for part in parts)
    if empty != len(given):
        raise ValueError(
            f"{MEDIA[kind]} has {len(given)} entries, but the messages have {empty} places for them (parts of type "
            f"{kind} without a source, or <{kind}> in a text)."
        )
    remaining = iter(given)
    return [
        _source(part.pop("source"), f"messages: {kind}", kind, root) if "source" in part else next(remaining)
        for part in parts
    ]
