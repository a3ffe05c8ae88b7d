"""Which tokens of a conversation are learned: what the assistant says, and the token that ends each of its turns."""

import itertools
import re
from typing import Any

import jinja2
import torch

from stts_hf.modeling.processing_stts import STTSProcessor
from stts_hf.modeling.sequence_stts import align_labels as align_labels

IGNORED = -100


def render(processor: STTSProcessor, messages: list[dict[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
    """
    The conversation in the chat template's words, and which of its characters `[start, end)` are learned.

    It is rendered with the prompt for another answer behind it, so it ends in the words that ask for one. Where the
    same words stand, an answer begins; it ends with the `eos_token` behind it, which no text may hold, and which is
    added where the template leaves the last turn open.

    Raises:
        ValueError: the template refuses the conversation, or it cannot be told which words are the assistant's.
    """
    eos = processor.tokenizer.eos_token
    text = _apply(processor, messages, add_generation_prompt=True)
    request = _find_request(text, messages[-1], eos)
    if request is None:
        whole = _apply(processor, messages)
        request = text[len(whole) :] if text.startswith(whole) else ""
    text = text.removesuffix(request)
    if messages[-1]["role"] == "assistant" and not text.rstrip().endswith(eos):
        text += eos
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    starts = [found.end() for found in re.finditer(re.escape(request), text)] if request else []
    if len(starts) != len(answers):
        raise ValueError(
            "chat_template: which tokens are the assistant's cannot be told: the prompt for an answer ends with "
            f"{request!r}, which stands at {len(starts)} places of a conversation with {len(answers)} answers. Use a "
            "template that begins every answer with the prompt for it, and take such words out of the texts."
        )
    spans = []
    for number, (start, following) in zip(answers, itertools.pairwise([*starts, len(text)]), strict=True):
        end = text.find(eos, start, following)
        words = r"\s*".join(["", *map(_shown, messages[number]["content"]), ""])
        if end < 0 or not re.fullmatch(words, text[start:end]):
            raise ValueError(
                f"chat_template: no eos_token {eos!r} ends the assistant's turn in messages[{number}], or it is not "
                f"shown as it was written: {text[start : start + 40]!r}. Set the tokenizer's eos_token to the token "
                "that ends a turn, and use a template that keeps the words."
            )
        spans.append((start, end + len(eos)))
    return text, spans


def _shown(part: dict[str, Any]) -> str:
    """A pattern for a part of an answer; a template may trim it, and may write its style in front."""
    style = rf"(?:{re.escape(str(part['style']))}\W*)?" if "style" in part else ""
    return style + re.escape(part["text"].strip())


def _find_request(text: str, last: dict[str, Any], eos: str) -> str | None:
    """
    The words at the end of `text` that ask for an answer: those that stand both before and behind the last answer. None
    where the last message is no answer of one text, or its words do not come back as they are.
    """
    content = last["content"]
    if last["role"] != "assistant" or len(content) != 1 or content[0].keys() != {"type", "text"}:
        return None
    answer = content[0]["text"]
    start = text.rfind(answer)
    while start >= 0:
        behind = text[start + len(answer) :]
        request = behind.removeprefix(eos).lstrip("\n") if behind.startswith(eos) else behind
        if request.strip() and text[:start].endswith(request):
            return request
        start = text.rfind(answer, 0, start + len(answer) - 1)
    return None


def _apply(processor: STTSProcessor, messages: list[dict[str, Any]], **options: Any) -> str:
    try:
        return processor.apply_chat_template(messages, tokenize=False, **options)
    except jinja2.TemplateError as error:
        if len(messages) > 1:
            _apply(processor, messages[:-1])  # so that it is the first message it refuses that is named
        number, role = len(messages) - 1, messages[-1]["role"]
        raise ValueError(f"chat_template refuses messages[{number}], of role {role!r}: {error}") from error


def make_labels(input_ids: torch.Tensor, offsets: torch.Tensor, spans: list[tuple[int, int]]) -> torch.Tensor:
    """
    `input_ids` (L,) where a token lies within a span, -100 elsewhere. A token that a tokenizer merged across a span's
    border is half prompt, so it is not learned.

    offsets: (L, 2) characters of each token. spans: characters `[start, end)`.
    """
    learned = torch.zeros_like(input_ids, dtype=torch.bool)
    starts, ends = offsets[:, 0], offsets[:, 1]
    for start, end in spans:
        learned |= (starts >= start) & (ends <= end) & (ends > starts)
    learned[0] = False  # nothing predicts a sample's first token
    return input_ids.where(learned, IGNORED)
