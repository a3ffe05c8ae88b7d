"""The parts of a checkpoint compared with each other; reads no weights. Each check yields what is wrong with them."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, make_dataclass
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from transformers import GenerationConfig
from transformers.generation.utils import GENERATION_MODES_MAPPING
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils import logging

from stts_hf.auto_classes import class_of
from stts_hf.modeling.budget_stts import check_pruning_ratio
from stts_hf.wording import listed

from .families import Family
from .files import Finding, raise_findings, reason_of, usable
from .tensors import StoredTensor, main_dtype


def check_sizes(config: Any, tensors: Mapping[str, StoredTensor] | None = None) -> Iterator[Finding]:
    """Compares the sizes in a model's config with 0 and those of tensors, before a model of such sizes is built."""
    largest = max((side for tensor in (tensors or {}).values() for side in tensor.shape), default=math.inf)
    if config.is_encoder_decoder:
        yield Finding("`is_encoder_decoder` is set, but these models only decode", "delete it")
    for section in config.sub_configs:
        for name, value in getattr(config, section).to_dict().items():
            if not isinstance(value, int) or isinstance(value, bool):
                continue
            is_depth = name in ("num_hidden_layers", "depth")
            is_side = name.endswith(("_size", "_heads", "head_dim", "num_position_embeddings"))
            limit = len(tensors) if is_depth and tensors else 4 * largest if is_side else math.inf
            if value > limit:
                yield Finding(
                    f"`{section}.{name}` is {value}, which is far more than the weights have ({len(tensors or ())} "
                    f"tensors, {largest} rows at most)",
                    "correct it in the configuration, or copy that again",
                )
            elif value < (name != "additional_vocab_size") and (is_side or is_depth):
                yield Finding(f"`{section}.{name}` is {value}", "set it to the model's, at least 1")


_KINDS: dict[Any, tuple[str, ...]] = {  # of the settings that decoding reads, but for token ids
    int: (
        *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "num_beams", "num_return_sequences", "top_k"),
        *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "prompt_lookup_num_tokens", "num_assistant_tokens"),
        "prefill_chunk_size",
    ),
    int | float: (
        *("max_time", "temperature", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"),
        *("repetition_penalty", "encoder_repetition_penalty", "length_penalty", "guidance_scale", "pruning_ratio"),
    ),
    bool: ("do_sample", "use_cache", "renormalize_logits", "remove_invalid_values", "token_healing"),
    bool | str: ("early_stopping",),
    str | list[str]: ("stop_strings",),
    list[int]: ("suppress_tokens", "begin_suppress_tokens"),
    list[int | float]: ("exponential_decay_length_penalty",),
    list[list[int]]: ("bad_words_ids",),
    list[list[Any]]: ("sequence_bias",),
    dict[str, Any]: ("watermarking_config", "cache_config"),
}
_POSITIVE = ("max_", "num_", "prompt_lookup_", "prefill_", "repetition_penalty", "encoder_repetition_penalty")
_FIELDS = [(name, kind | None, field(default=None)) for kind, names in _KINDS.items() for name in names]
_GenerationSettings: Any = strict(make_dataclass("_GenerationSettings", _FIELDS))


def check_generation_config(settings: dict[str, Any], config: Any) -> Iterator[Finding]:
    """Compares the kinds of generation settings with what decoding takes, and token ids with the model's."""
    where, text = "in generation_config.json", config.text_config
    total = text.vocab_size + (getattr(text, "additional_vocab_size", 0) or 0)
    given = {name: value for name, value in settings.items() if value is not None}
    for name, value in given.items():
        if name.endswith("_token_id"):
            ids = value if isinstance(value, list) and value else [value]
            if not all(type(one) is int and 0 <= one < total for one in ids):
                yield Finding(f"`{name}` {where} is {value!r}", f"it must be a token id from 0 to {total - 1}")
                return
        elif name.startswith(_POSITIVE) and isinstance(value, int | float) and value <= 0:
            yield Finding(f"`{name}` {where} is {value}", "it must be above 0")
            return
        elif value == [] or (name in ("is_assistant", "token_healing") and value):
            yield Finding(f"`{name}` {where} is {value}, by which no prompt is answered", "delete it")
            return
    known = {name: given[name] for name, _, _ in _FIELDS if name in given}
    with usable(f"the settings {where} cannot be used", "correct or delete them"):
        _GenerationSettings(**known)
        check_pruning_ratio(known.get("pruning_ratio", 0))
        decoding = GenerationConfig.from_dict({"top_k": 50} | settings | {"do_sample": False})  # as commands decode
        decoding.validate()
        if "/" in GENERATION_MODES_MAPPING[mode := decoding.get_generation_mode()]:
            raise ValueError(f"{mode.value} is code of the Hub, which is never run")


def empty_model(config: Any) -> Any:
    """Returns the model without memory for its weights (on the meta device), for names and shapes."""
    with torch.device("meta"):
        return class_of(config)(config)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' report and progress bar, which would come before our own sentence."""
    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()


@dataclass(frozen=True)
class WeightComparison:
    """Weights that a model lacks, those it has no use for, and those of other shapes, which say which."""

    missing: list[str]
    unexpected: list[str]
    misshapen: list[str]

    def findings(self) -> Iterator[Finding]:
        """One that names them, where there are any."""
        kinds = {"missing": self.missing, "unexpected": self.unexpected, "of the wrong shape": self.misshapen}
        texts = [f"{len(names)} tensors are {kind}: {listed(names)}" for kind, names in kinds.items() if names]
        if texts:
            only_scorer = all(map(is_scorer, self.missing)) and not self.unexpected and not self.misshapen
            remedy = "give it a new scorer with stts-hf convert" if only_scorer else "copy or convert the weights again"
            yield Finding(f"the weights are not those of the configuration ({'; '.join(texts)})", remedy)


def is_scorer(name: str) -> bool:
    """Whether a weight's name, in files or in the model, is one of the scorer's."""
    return ".scorer." in name


def compare_weights(config: Any, tensors: Mapping[str, StoredTensor]) -> WeightComparison:
    """
    Compares names and shapes of tensors with the model's, as transformers loads them. Quantised weights are not
    compared, nor any under DeepSpeed's ZeRO-3, which cannot load onto the meta device. Raises `ValueError` where no
    such model can be built, or the weights are of other dtypes.
    """
    if getattr(config, "quantization_config", None) is not None or is_deepspeed_zero3_enabled():
        return WeightComparison([], [], [])
    raise_findings("config.json and the weights differ", check_sizes(config, tensors))
    main_dtype(tensors)
    shapes = {name: torch.empty(tensor.shape, device="meta") for name, tensor in tensors.items()}
    with usable("no model can be made of config.json and the weights", "correct or copy them again"), _quiet():
        _, found = class_of(config).from_pretrained(
            None,
            config=config,
            state_dict=shapes,
            device_map="meta",
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    misshapen = [f"{name} {list(there)} instead of {list(needed)}" for name, there, needed in found["mismatched_keys"]]
    return WeightComparison(sorted(found["missing_keys"]), sorted(found["unexpected_keys"]), sorted(misshapen))


def check_vocabulary(vocabulary: Mapping[str, int], config: Any, family: Family) -> Iterator[Finding]:
    """Compares a tokenizer's token ids (text to id) with the special ids and the vocabulary size of a config."""
    text = config.text_config
    additional = getattr(text, "additional_vocab_size", 0)  # embedded alone: the LM head has no rows for them
    total, largest = text.vocab_size + additional, max(vocabulary.values(), default=0)
    if largest >= total:
        of = f" and `additional_vocab_size` {additional}" if additional else ""
        yield Finding(
            f"the tokenizer has ids up to {largest}, but the model embeds {total} tokens "
            f"(`vocab_size` {text.vocab_size}{of})",
            "take the tokenizer that the model was trained with",
        )
        return
    for name, token in family.special_tokens.items():
        number = getattr(config, name)
        if (known := vocabulary.get(token, number)) != number:
            what = f"{token} is {known} in the tokenizer but {number} in the config's `{name}`"
            yield Finding(what, "take the tokenizer that the model was trained with, or correct config.json")
        elif not 0 <= number < total:
            yield Finding(f"`{name}` is {number}", f"it must be a token id from 0 to {total - 1}")


def check_processor(processor: Any, config: Any, family: Family) -> Iterator[Finding]:
    """Compares the settings of the image and of the video processor with the config."""
    for name, settings in family.settings(config).items():
        found = getattr(processor, name).to_dict()
        for key, value in settings.items():
            if found.get(key) != value:
                yield Finding(
                    f"`{key}` of the {name} is {found.get(key)}, but the config needs {value}",
                    f"set `{key}` in processor_config.json to {value}",
                )


def check_chat_template(processor: Any) -> Iterator[Finding]:
    """Makes a prompt about a video."""
    if not processor.chat_template:
        yield Finding("chat_template.jinja is missing, and prompts cannot be made", "copy that of the base model")
        return
    content = [{"type": "video"}, {"type": "text", "text": "?"}]
    reason = f"it lacks {processor.video_token}"
    try:
        prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        if processor.video_token in prompt:
            return
    except Exception as error:  # of Jinja, or of what the template reaches for
        reason = reason_of(error)
    what = f"the chat template (chat_template.jinja) makes no prompt about a video ({reason})"
    yield Finding(what, "copy that of the base model")
