"""Which tokens of a conversation are learned: what the assistant says, and the token that ends each of its turns."""

import itertools
from typing import Any

import jinja2
import torch

from stts_hf.modeling.processing_stts import STTSProcessor
from stts_hf.modeling.sequence_stts import align_labels as align_labels

IGNORED = -100


def render(processor: STTSProcessor, messages: list[dict[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
    """
    The conversation in the chat template's words, and which of its characters `[start, end)` are learned.

    What an assistant's turn adds to the prompt that asks for it is learned, and the `eos_token` that closes it, which
    is added where the template leaves the last turn open. So nothing is asked of the template but that a conversation
    begins with the prompts that led to it. A conversation with one answer, at its end, is rendered once; one with more,
    and one whose answer is not found in that, is compared with what the template makes of each prompt in it.

    Raises:
        ValueError: the template refuses the conversation, or breaks that rule.
    """
    answers = [message for message in messages if message["role"] == "assistant"]
    if len(answers) == 1 and messages[-1] is answers[0]:
        found = _render_once(processor, messages)
        if found is not None:
            return found
    return _render_and_compare(processor, messages)


def _render_once(processor: STTSProcessor, messages: list[dict[str, Any]]) -> tuple[str, list[tuple[int, int]]] | None:
    """
    For one answer at the end. Rendered with the prompt for another answer behind it, the conversation ends in the words
    that ask for one; where the same words stand before the answer, it is what lies between them. None where this cannot
    be told.
    """
    parts, eos = messages[-1]["content"], processor.tokenizer.eos_token
    if len(parts) != 1 or parts[0].keys() != {"type", "text"}:
        return None
    answer = parts[0]["text"]
    text = _apply(processor, messages, add_generation_prompt=True)
    start = text.rfind(answer)
    while start >= 0:
        end = start + len(answer)
        closing = text[end:].startswith(eos)
        request = text[end + len(eos) * closing :].lstrip("\n" if closing else "")
        if request.strip() and text[:start].endswith(request):
            conversation = text[: len(text) - len(request)] + ("" if closing else eos)
            return conversation, [(start, end + len(eos))]
        start = text.rfind(answer, 0, end - 1)
    return None


def _render_and_compare(processor: STTSProcessor, messages: list[dict[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
    """Rendered whole and up to each of its prompts and answers: an answer is by how much the text grows."""
    text = _apply(processor, messages)
    first_media_first = _media_first(messages)
    if _apply(processor, first_media_first) == text:
        # Molmo2's template puts all media in front; so a prompt is a prefix even where a later turn has an image.
        messages = first_media_first
    eos = processor.tokenizer.eos_token
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = _apply(processor, messages[:index], add_generation_prompt=True)
        answered = _apply(processor, messages[: index + 1])
        if not (text.startswith(answered) and answered.startswith(prompt)):
            alike = (len(set(letters)) == 1 for letters in zip(text, answered, prompt, strict=False))
            differs = sum(itertools.takewhile(bool, alike))
            raise ValueError(
                "chat_template: which tokens are the assistant's cannot be told, because the prompt before "
                f"messages[{index}] is not the beginning of the whole conversation: they part at character {differs}, "
                f"{text[differs : differs + 40]!r}. Use a template whose turns do not depend on later ones."
            )
        start, end = len(prompt), len(answered)
        closing = text.rfind(eos, start, end)
        if closing >= 0 and not text[closing + len(eos) : end].strip():
            end = closing + len(eos)
        elif text.startswith(eos, end):
            end += len(eos)
        elif end == len(text):
            text += eos
            end += len(eos)
        else:
            raise ValueError(
                f"chat_template: no eos_token {eos!r} ends the assistant's turn in messages[{index}], "
                f"{text[end : end + 40]!r} follows. Set the tokenizer's eos_token to the token that does."
            )
        spans.append((start, end))
    return text, spans


def _apply(processor: STTSProcessor, messages: list[dict[str, Any]], **options: Any) -> str:
    if not messages:
        return ""
    try:
        return processor.apply_chat_template(messages, tokenize=False, **options)
    except jinja2.TemplateError as error:
        if len(messages) > 1:
            _apply(processor, messages[:-1])  # so that it is the first message it refuses that is named
        number, role = len(messages) - 1, messages[-1]["role"]
        raise ValueError(f"chat_template refuses messages[{number}], of role {role!r}: {error}") from error


def _media_first(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation with all videos and images at the start of its first user message."""
    media = [
        part
        for message in messages
        if not isinstance(message["content"], str)
        for part in message["content"]
        if part["type"] != "text"
    ]
    moved = []
    for message in messages:
        if not isinstance(message["content"], str):
            texts = [part for part in message["content"] if part["type"] == "text"]
            if message["role"] == "user":
                texts, media = media + texts, []
            message = message | {"content": texts}
        moved.append(message)
    return moved


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
