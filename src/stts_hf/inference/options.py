"""Options of `generate` for an answer: those that are not given, and what is none."""

import inspect
from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig, GenerationMixin

from stts_hf.modeling.generation_stts import resolve_setting
from stts_hf.video.processors import OF_VIDEOS
from stts_hf.wording import did_you_mean

MAX_NEW_TOKENS = 256
_LENGTHS = ("max_new_tokens", "min_new_tokens", "max_length", "min_length")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p")


def generate_options(processor: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """
    `given`, and where it does not say otherwise the likeliest answer, of at most 256 tokens. Options of sampling ask
    for sampling; a `generation_config` says all. Raises `ValueError` for what `generate` does not take from a caller,
    and `TypeError` for lengths that are no whole numbers.
    """
    options = dict(given)
    config = options.get("generation_config")
    of_call = inspect.signature(GenerationMixin.generate).parameters.keys() - {"self", "inputs", "kwargs"}
    known = {name for name in vars(GenerationConfig()) if not name.startswith("_")} | of_call
    for name, value in given.items():
        if name in OF_VIDEOS - known:
            raise ValueError(
                f"{name} is {value!r}, but it is an option of videos, not of `generate`: pass "
                f"processing={{{name!r}: {value!r}}} where the video is given."
            )
        if name not in known:
            advice = did_you_mean(name, known, "Leave it out.")
            raise ValueError(f"{name} is {value!r}, but `generate` has no such option. {advice}")
    for name in _LENGTHS:
        if (length := given.get(name)) is not None and (isinstance(length, bool) or not isinstance(length, int)):
            raise TypeError(f"{name} must be a whole number of tokens, got {length!r}.")
    if (number := resolve_setting("num_return_sequences", options, config)) not in (None, 1):
        raise ValueError(f"num_return_sequences is {number!r}, but a question gets one answer. Leave it out.")
    if (ratio := getattr(config, "pruning_ratio", None)) is not None:
        raise ValueError(f"generation_config has pruning_ratio={ratio!r}. Pass pruning_ratio to `answer` or `watch`.")
    if resolve_setting("stop_strings", options, config) is not None:
        options["tokenizer"] = processor.tokenizer
    if config is None:
        options.setdefault("do_sample", any(given.get(name) is not None for name in _SAMPLING))
        if given.get("max_length") is None:
            options.setdefault("max_new_tokens", MAX_NEW_TOKENS)
    return options
