"""What lmms-eval asks of a row, and how it scores the answer: as `stts-hf eval` does."""

from typing import Any

from stts_hf.data.rows import read_row
from stts_hf.evaluation.scoring import find_choice, is_right


def doc_to_messages(doc: dict[str, Any], lmms_eval_specific_kwargs: dict[str, Any]) -> list[dict[str, Any]]:
    """The question with its videos and images, without the answer."""
    sample = read_row({**doc, "media_root": lmms_eval_specific_kwargs["folder"]})
    sources = {"video": iter(sample.videos), "image": iter(sample.images)}
    return [
        {
            "role": message["role"],
            "content": [
                part if part["type"] == "text" else {"type": part["type"], "url": next(sources[part["type"]])}
                for part in message["content"]
            ],
        }
        for message in sample.messages[:-1]
    ]


def doc_to_visual(doc: dict[str, Any], lmms_eval_specific_kwargs: dict[str, Any]) -> list[Any]:
    """The same videos and images, for models of lmms-eval that take no messages."""
    sample = read_row({**doc, "media_root": lmms_eval_specific_kwargs["folder"]})
    return [*sample.videos, *sample.images]


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Scores one answer."""
    no_option = doc.get("options") is not None and find_choice(results[0], doc["options"]) is None
    return {"accuracy": float(is_right(results[0], doc)), "no_option": float(no_option)}
