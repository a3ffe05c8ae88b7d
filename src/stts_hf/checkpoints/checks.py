"""What must agree in a checkpoint: configuration, weights, tokenizer, processor."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from .files import Finding
from .layout import Group
from .original import SPECIAL_TOKENS
from .tensors import StoredTensor

_OTHER_TOKENIZER = "take the tokenizer that the model was trained with"


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
        found = {name: tensors[name].shape for name in wanted}
        if wanted is group.native:
            wrong = [name for name, shape in found.items() if shape != wanted[name]]
            wrong_shapes += [f"{name} {list(found[name])} instead of {list(wanted[name])}" for name in wrong]
        elif (  # released checkpoints cut the embedding elsewhere, so that its parts need only add up
            not all(shape and shape[1:] == group.shape[1:] for shape in found.values())
            or sum(shape[0] for shape in found.values()) != group.shape[0]
        ):
            listed = " and ".join(f"{name} {list(shape)}" for name, shape in found.items())
            together = " together" if len(found) > 1 else ""
            wrong_shapes.append(f"{listed} instead of {list(group.shape)}{together}")
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
    if missing := [token for token in SPECIAL_TOKENS.values() if token not in vocabulary]:
        yield Finding(f"the tokenizer lacks {', '.join(missing)}", "take the tokenizer of a Molmo2 model")
    if largest >= total:
        yield Finding(
            f"the tokenizer has ids up to {largest}, but the model embeds {total} tokens "
            f"(`vocab_size` {text.vocab_size} and `additional_vocab_size` {text.additional_vocab_size})",
            _OTHER_TOKENIZER,
        )
    ids = {field: getattr(config, field) for field in SPECIAL_TOKENS}
    wrong = [
        f"{token} is {vocabulary[token]} in the tokenizer but {ids[field]} in the config's `{field}`"
        for field, token in SPECIAL_TOKENS.items()
        if vocabulary.get(token) not in (None, ids[field])
    ]
    # The LM head has no rows for special tokens, so that they cannot be generated.
    outside = [f"`{field}` {number}" for field, number in ids.items() if not text.vocab_size <= number < total]
    if wrong:
        yield Finding(", ".join(wrong), f"{_OTHER_TOKENIZER}, or correct config.json")
    elif outside and largest < total:
        yield Finding(
            f"{', '.join(outside)} must be from `vocab_size` {text.vocab_size} to {total - 1}", _OTHER_TOKENIZER
        )


def check_processor(processor: Any, config: Any) -> Iterator[Finding]:
    """Compares the settings of the image and of the video processor with the vision config."""
    vision = config.vision_config
    image, video = processor.image_processor, processor.video_processor
    for name, part, key, expected in (
        ("image_processor", image, "patch_size", vision.patch_size),
        ("image_processor", image, "size", list(vision.image_size)),
        ("video_processor", video, "patch_size", vision.patch_size),
        ("video_processor", video, "size", list(vision.image_size)),
        ("video_processor", video, "pooling_size", list(vision.pooling_size)),
    ):
        found = part.to_dict().get(key)
        if key == "size" and isinstance(found, Mapping):
            found = [found.get("height"), found.get("width")]
        if (list(found) if isinstance(found, tuple) else found) != expected:
            yield Finding(
                f"`{key}` of the {name} is {found}, but the vision config has {expected}",
                f"set `{key}` in processor_config.json to {expected}",
            )
