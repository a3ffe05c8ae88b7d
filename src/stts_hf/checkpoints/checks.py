"""What must agree in a checkpoint: configuration, weights, tokenizer, processor."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from .files import Finding
from .layout import Group
from .original import SPECIAL_TOKENS
from .tensors import StoredTensor


def check_sizes(config: Any, tensors: Mapping[str, StoredTensor]) -> Iterator[Finding]:
    """Compares the sizes in an `STTSConfig` with those of tensors, before a model of such sizes is built."""
    largest = max((side for tensor in tensors.values() for side in tensor.shape), default=0)
    for section in ("text_config", "vision_config", "adapter_config"):
        for name, value in getattr(config, section).to_dict().items():
            is_side = name.endswith(("_size", "_heads", "head_dim", "num_position_embeddings"))
            limit = len(tensors) if name == "num_hidden_layers" else 4 * largest if is_side else math.inf
            if isinstance(value, int) and value > limit:
                yield Finding(
                    f"`{section}.{name}` is {value}, which is far more than the weights have ({len(tensors)} tensors, "
                    f"{largest} rows at most)",
                    "correct it in the configuration, or copy that again",
                )


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
        # Released checkpoints cut the embedding, which alone is saved as several tensors, at another row.
        found = [tensors[name].shape for name in wanted]
        same_width = all(shape[1:] == group.shape[1:] for shape in found)
        if len(group.saved) > 1 and same_width and sum(shape[0] for shape in found) == group.shape[0]:
            continue
        wrong_shapes += [
            f"{name} {list(tensors[name].shape)} instead of {list(shape)}"
            for name, shape in wanted.items()
            if tensors[name].shape != shape
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


def check_vocabulary(vocabulary: Mapping[str, int], config: Any) -> Iterator[Finding]:
    """Compares a tokenizer's token ids (text to id) with the special ids and the vocabulary size of an `STTSConfig`."""
    text = config.text_config
    total, largest = text.vocab_size + text.additional_vocab_size, max(vocabulary.values(), default=0)
    if largest >= total:
        yield Finding(
            f"the tokenizer has ids up to {largest}, but the model embeds {total} tokens "
            f"(`vocab_size` {text.vocab_size} and `additional_vocab_size` {text.additional_vocab_size})",
            "take the tokenizer that the model was trained with",
        )
        return
    wrong = []
    for field, token in SPECIAL_TOKENS.items():
        number = getattr(config, field)
        if vocabulary.get(token, number) != number:
            wrong.append(f"{token} is {vocabulary[token]} in the tokenizer but {number} in the config's `{field}`")
        elif not text.vocab_size <= number < total:  # elsewhere the LM head has rows, so that it could be generated
            wrong.append(f"`{field}` {number} must be from `vocab_size` {text.vocab_size} to {total - 1}")
    if wrong:
        yield Finding(", ".join(wrong), "take the tokenizer that the model was trained with, or correct config.json")


def check_processor(processor: Any, config: Any) -> Iterator[Finding]:
    """Compares the settings of the image and of the video processor with the vision config."""
    vision = config.vision_config
    height, width = vision.image_size
    shared = {"patch_size": vision.patch_size, "size": {"height": height, "width": width}}
    expected = {"image_processor": shared, "video_processor": shared | {"pooling_size": vision.pooling_size}}
    for name, settings in expected.items():
        found = getattr(processor, name).to_dict()
        for key, value in settings.items():
            if found.get(key) != value:
                yield Finding(
                    f"`{key}` of the {name} is {found.get(key)}, but the vision config has {value}",
                    f"set `{key}` in processor_config.json to {value}",
                )
