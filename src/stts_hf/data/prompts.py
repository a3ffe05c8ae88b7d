"""Texts of the prompt: subtitles with their times, and multiple choice with lettered options."""

import html
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CHOICE_INSTRUCTION = "Answer with the option's letter from the given choices directly."


def subtitle_text(subtitles: Any, root: Path | None = None) -> str:
    """
    Subtitles as the prompt shows them: one line `start - end text` per cue, in seconds with one decimal.

    subtitles: path (below `root`) of an SRT or WebVTT file, the text of one, or cues `{"start", "end", "text"}` in
    seconds. Raises `ValueError` where nothing can be read.
    """
    cues = read_subtitles(subtitles, root) if isinstance(subtitles, str | Path) else _read_cues(subtitles)
    lines = [f"{start:.1f} - {end:.1f} {text}" for start, end, text in cues if text]
    if not lines:
        raise ValueError("subtitles hold no text. Leave the column empty for a video without subtitles.")
    return "\n".join(lines)


def read_subtitles(subtitles: str | Path, root: Path | None = None) -> list[tuple[float, float, str]]:
    """Cues `(start, end, text)`, in seconds, of an SRT or WebVTT file or its text. Raises `ValueError` for others."""
    import pysubs2

    text = str(subtitles)
    if "-->" not in text:
        path = (root or Path()) / text
        if not path.is_file():
            raise ValueError(f"There is no subtitle file {str(path)!r}. Pass a path, the text of a file, or a list.")
        text = path.read_text(encoding="utf-8-sig", errors="replace")
    try:
        events = pysubs2.SSAFile.from_string(text)
    except pysubs2.exceptions.Pysubs2Error as error:
        raise ValueError("subtitles are neither SRT nor WebVTT: no line 'start --> end' can be read.") from error
    return [(e.start / 1000, e.end / 1000, " ".join(html.unescape(e.plaintext).split())) for e in events]


def _read_cues(cues: Any) -> list[tuple[float, float, str]]:
    if not isinstance(cues, Sequence):
        raise TypeError(f"subtitles must be a path, a text or a list of cues, got {type(cues).__name__}.")
    read = []
    for number, cue in enumerate(cues):
        if not isinstance(cue, Mapping) or not {"start", "end", "text"} <= cue.keys():
            raise ValueError(f"subtitles[{number}] must be {{'start', 'end', 'text'}} in seconds, got {cue!r}.")
        try:
            start, end = float(cue["start"]), float(cue["end"])
        except (TypeError, ValueError) as error:
            raise ValueError(f"subtitles[{number}] must start and end at a number of seconds, got {cue!r}.") from error
        read.append((start, end, " ".join(str(cue["text"]).split())))
    return read


def choice_messages(question: Any, options: Any, answer: Any) -> list[dict[str, Any]]:
    """
    A question, and its answer where one is given, as messages. With `options`, the prompt is the question, a line
    `A. option` for each and Molmo2's instruction to answer with the letter, and the letter is what is learned.

    options: up to 26 texts, or None for an open question, whose answer is text. answer: the right option by number
    (counted from 0), letter or text. Raises `ValueError` where one of them does not fit.
    """
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"question must be a text, got {question!r}.")
    if options is not None:
        letters = string.ascii_uppercase
        if isinstance(options, str) or not 2 <= len(options) <= len(letters):
            raise ValueError(f"options must be a list of 2 to {len(letters)} texts, got {options!r}.")
        texts = [str(option) for option in options]
        lines = [f"{letter}. {text}" for letter, text in zip(letters, texts, strict=False)]
        question = "\n".join([question, *lines, CHOICE_INSTRUCTION])
        answer = None if answer is None else letters[find_option(texts, answer)]
    messages = [{"role": "user", "content": question}]
    if answer is not None:
        messages.append({"role": "assistant", "content": str(answer)})
    return messages


def find_option(options: Sequence[str], answer: Any) -> int:
    """The index of the right option, given by number from 0, letter or text. Raises `ValueError` unless it is one."""
    found = set()
    text = str(answer).strip()
    if isinstance(answer, bool):
        pass
    elif isinstance(answer, int) or text.isdecimal():
        found = {int(text)} & set(range(len(options)))
    elif len(letter := text.strip("().").upper()) == 1 and letter in string.ascii_uppercase[: len(options)]:
        found = {string.ascii_uppercase.index(letter)}
    if not isinstance(answer, int):
        found |= {index for index, option in enumerate(options) if option.strip() == text}
    if len(found) != 1:
        problem = "fits several of" if found else "is none of"
        raise ValueError(f"answer {answer!r} {problem} the options {options}. Give the option's number from 0.")
    return found.pop()
