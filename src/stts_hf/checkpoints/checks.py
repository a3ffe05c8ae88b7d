"""The parts of a checkpoint compared with each other; reads no weights. Each check names what is wrong with them."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import GenerationConfig

from .families import Family
from .files import Finding, reason_of, usable
from .layout import EMBEDDING, Group
from .tensors import StoredTensor


def check_sizes(config: Any, tensors: Mapping[str, StoredTensor] | None = None) -> Iterator[Finding]:
    """Compares the sizes in a model's config with 0 and those of tensors, before a model of such sizes is built."""
    largest = max((side for tensor in (tensors or {}).values() for side in tensor.shape), default=math.inf)
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


_WHOLE = ("num_beams", "num_return_sequences", "max_length", "max_new_tokens")
_FROM_0 = ("top_k", "min_length", "min_new_tokens", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size")
_NUMBERS = ("temperature", "top_p", "repetition_penalty", "length_penalty")
_FLAGS = ("do_sample", "use_cache", "early_stopping", "renormalize_logits", "remove_invalid_values")


def check_generation_config(settings: dict[str, Any], config: Any) -> Iterator[Finding]:
    """Compares the settings that every answer depends on with what they may be, and token ids with the model's."""
    where = "in generation_config.json"
    text = config.text_config
    total = text.vocab_size + (getattr(text, "additional_vocab_size", 0) or 0)

    def is_whole(value: object, least: int) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= least

    for name, value in settings.items():
        needed = None
        if value is None:
            continue
        if name.endswith("_token_id"):
            ids = value if isinstance(value, list) and value else [value]
            if not all(is_whole(one, 0) and one < total for one in ids):
                needed = f"a token id from 0 to {total - 1}"
        elif name in _WHOLE + _FROM_0 and not is_whole(value, int(name in _WHOLE)):
            needed = f"a whole number of at least {int(name in _WHOLE)}"
        elif name in _NUMBERS and (not isinstance(value, int | float) or isinstance(value, bool)):
            needed = "a number"
        elif name in _FLAGS and not isinstance(value, bool) and value != "never":
            needed = "true or false"
        if needed:
            yield Finding(f"`{name}` {where} is {value!r}", f"it must be {needed}")
            return
    with usable(f"the settings {where} do not fit each other", "correct or delete them"):
        GenerationConfig.from_dict(settings).validate()


def check_weights(
    tensors: Mapping[str, StoredTensor], layout: list[Group], declared_layers: int = 0, kept_layers: int = 0
) -> Iterator[Finding]:
    """Compares the names and shapes of tensors with the model's.

    Args:
        declared_layers: ViT layers from `kept_layers` up to this one may be there; the model has no use for them.
    """
    used: set[str] = set()
    missing, wrong_shapes = [], []
    for group in layout:
        wanted = group.names_in(tensors)
        used |= wanted.keys()
        if absent := [name for name in wanted if name not in tensors]:
            missing += absent
            continue
        wrong = {name for name, shape in wanted.items() if tensors[name].shape != shape}
        pieces = {name for name in filter(EMBEDDING.fullmatch, wanted) if tensors[name].shape[1:] == wanted[name][1:]}
        if sum(tensors[name].shape[0] - wanted[name][0] for name in pieces) == 0:
            wrong -= pieces
        wrong_shapes += [
            f"{name} {list(tensors[name].shape)} instead of {list(wanted[name])}" for name in sorted(wrong)
        ]
    unneeded = rf"(resblocks|vision_tower\.layers)\.({'|'.join(map(str, range(kept_layers, declared_layers)))})\."
    unexpected = sorted(name for name in tensors.keys() - used if not re.search(unneeded, name))
    problems = {"missing": missing, "unexpected": unexpected, "of the wrong shape": wrong_shapes}
    texts = [
        f"{len(names)} tensors are {kind}: {', '.join(names[:4])}"
        + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        for kind, names in problems.items()
        if names
    ]
    if texts:
        only_scorer = all(".scorer." in name for name in missing) and not unexpected and not wrong_shapes
        remedy = "give it a new scorer with stts-hf convert" if only_scorer else "copy or convert the weights again"
        yield Finding(f"the weights are not those of the configuration ({'; '.join(texts)})", remedy)


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
    wrong = []
    first = text.vocab_size if additional else 0  # elsewhere the LM head has rows, so that it could be generated
    for field, token in family.special_tokens.items():
        number = getattr(config, field)
        if vocabulary.get(token, number) != number:
            wrong.append(f"{token} is {vocabulary[token]} in the tokenizer but {number} in the config's `{field}`")
        elif not first <= number < total:
            least = f"`vocab_size` {first}" if first else "0"
            wrong.append(f"`{field}` {number} must be from {least} to {total - 1}")
    if wrong:
        yield Finding(", ".join(wrong), "take the tokenizer that the model was trained with, or correct config.json")


def check_processor(processor: Any, config: Any, family: Family) -> Iterator[Finding]:
    """Compares the settings of the image and of the video processor with the vision config."""
    for name, settings in family.settings(config.vision_config).items():
        found = getattr(processor, name).to_dict()
        for key, value in settings.items():
            if found.get(key) != value:
                yield Finding(
                    f"`{key}` of the {name} is {found.get(key)}, but the vision config has {value}",
                    f"set `{key}` in processor_config.json to {value}",
                )


def check_chat_template(processor: Any) -> Iterator[Finding]:
    """Makes a prompt about a video."""
    if not processor.chat_template:
        yield Finding("chat_template.jinja is missing, and prompts cannot be made", "copy that of the base model")
        return
    content = [{"type": "video"}, {"type": "text", "text": "?"}]
    wrong = "the chat template (chat_template.jinja) makes no prompt about a video"
    try:
        processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    except Exception as error:  # of Jinja, or of what the template reaches for
        yield Finding(f"{wrong} ({reason_of(error)})", "copy that of the base model")
