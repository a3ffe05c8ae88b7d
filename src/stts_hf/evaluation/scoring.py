"""Whether what a model wrote is right, for multiple choice and open questions, and how often it is."""

import re
import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from unicodedata import category

from stts_hf.data.prompts import find_option

COUNTS = ("prompt_tokens", "video_tokens", "video_tokens_kept")
# What may stand in front of a letter or an option: "Answer: B", "The correct option is (B)".
_LEAD = re.compile(r"^(?:the\s+)?(?:(?:correct|right|best|final)\s+)?(?:answer|option|choice)(?:\s+is)?\s*:?\s*", re.I)
_LETTER = re.compile(r"\(?([A-Za-z])\)?(?:[.):,\u3001\u3002]?\s*|[.):,]\s.*|\n.*)", re.DOTALL)
# Letters and nothing else: "A, B", "(A) or (B)".
_LETTERS = re.compile(r"\W*[a-z](?:(?:\W|\band\b|\bor\b)+[a-z])*\W*", re.I)
_AROUND = " \t\r\n*`\"'"  # also of Markdown
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def is_right(written: str, row: Mapping[str, Any]) -> bool:
    """
    Whether `written` answers the row's question as its `answer` does: the option chosen where it has `options`, else
    the same words but for case, punctuation, articles and space. Raises `ValueError` where `answer` is no option.
    """
    options = row.get("options")
    if options is None:
        return normalize(written) == normalize(str(row["answer"]))
    return find_choice(written, options) == find_option([str(option) for option in options], row["answer"])


def find_choice(written: str, options: Sequence[Any]) -> int | None:
    """
    Which option was chosen, from 0: the one whose letter was written, alone ("B", "(b)", "B.") or in front of more
    ("B. left"), or else the one whose text was; after "The answer is" or not. None if neither fits: a sentence that
    begins with the word "A" chooses nothing, and so do several letters.
    """
    text = written.strip(_AROUND)
    for words in (text, _LEAD.sub("", text, count=1).strip(_AROUND)):
        letter = _LETTER.fullmatch(words)
        place = string.ascii_uppercase.index(letter[1].upper()) if letter else len(options)
        if place < len(options) and not _names_several(words, f"{string.ascii_uppercase[place]}. {options[place]}"):
            return place
        same = [place for place, option in enumerate(options) if normalize(str(option)) == normalize(words)]
        if len(same) == 1:
            return same[0]
    return None


def _names_several(words: str, option: str) -> bool:
    """Whether `words` are different letters, but not the letter of an option in front of one that is its text."""
    several = _LETTERS.fullmatch(words) and len(set(re.findall(r"\b[A-Z]\b", words.upper()))) > 1
    return bool(several) and normalize(words) != normalize(option)


def normalize(text: str) -> str:
    """Lower case, without punctuation, symbols, articles and needless space; a text of nothing else as it is."""
    words = _ARTICLES.sub(" ", "".join(" " if category(one)[0] in "PS" else one for one in text.lower())).split()
    return " ".join(words) if words else " ".join(text.lower().split())


def summarize(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """
    Sums of `evaluate`'s records: `{"all": sums, "types": {type: sums}, "groups": {group: sums}}`, in the order in which
    types and groups first come.

    Sums are `questions`, `right`, `accuracy` (right of all questions: those with an error and answers that are no
    option are wrong), `no_option`, `errors`, means per question that was answered of `prompt_tokens`, `video_tokens`
    and `video_tokens_kept`, and `seconds` in all.
    """
    records = list(records)
    summary: dict[str, Any] = {"all": _sums(records)}
    for column in ("type", "group"):
        named: dict[Any, list[Mapping[str, Any]]] = {}
        for record in records:
            named.setdefault(record[column], []).append(record)
        summary[f"{column}s"] = {name: _sums(of_name) for name, of_name in named.items() if name is not None}
    return summary


def _sums(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    answered = [record for record in records if record["error"] is None]
    right = sum(record["right"] for record in records)
    tokens = {name: sum(record[name] for record in answered) / max(len(answered), 1) for name in COUNTS}
    return {
        "questions": len(records),
        "right": right,
        "accuracy": right / max(len(records), 1),
        "no_option": sum(record["no_option"] for record in records),
        "errors": len(records) - len(answered),
        **tokens,
        "seconds": sum(record["seconds"] for record in answered),
    }
