"""What must agree in a checkpoint beside its weights: tokenizer, processor, sizes."""

from collections.abc import Mapping
from typing import Any

from .links import Finding
from .original import SPECIAL_TOKENS

_SIZES = (
    "vocab_size",
    "additional_vocab_size",
    "hidden_size",
    "intermediate_size",
    "text_hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_position_embeddings",
)


def check_sizes(config: Any, shapes: Mapping[str, tuple[int, ...]]) -> list[Finding]:
    """Compares the sizes in an `STTSConfig` with tensors' shapes, before a model of such sizes is built."""
    largest = max((side for shape in shapes.values() for side in shape), default=0)
    findings = []
    for section in ("text_config", "vision_config", "adapter_config"):
        part = getattr(config, section)
        limits = {"num_hidden_layers": len(shapes), **dict.fromkeys(_SIZES, 4 * largest)}
        for name, limit in limits.items():
            value = getattr(part, name, None)
            if isinstance(value, int) and value > limit:
                findings.append(
                    Finding(
                        f"`{section}.{name}` is {value}, which is far more than the weights have ({len(shapes)} "
                        f"tensors, {largest} rows at most)",
                        "correct it in the configuration, or copy that again",
                    )
                )
    return findings


def check_vocabulary(vocabulary: Mapping[str, int], config: Any) -> list[Finding]:
    """Compares a tokenizer's token ids (text to id) with the special ids and the vocabulary size of an `STTSConfig`."""
    text = config.text_config
    total = text.vocab_size + text.additional_vocab_size
    problems = []
    missing = [token for token in SPECIAL_TOKENS.values() if token not in vocabulary]
    if missing:
        problems.append(Finding(f"the tokenizer lacks {', '.join(missing)}", "take the tokenizer of a Molmo2 model"))
    largest = max(vocabulary.values(), default=0)
    if largest >= total:
        problems.append(
            Finding(
                f"the tokenizer has ids up to {largest}, but the model embeds {total} tokens "
                f"(`vocab_size` {text.vocab_size} and `additional_vocab_size` {text.additional_vocab_size})",
                "take the tokenizer that the model was trained with",
            )
        )
    wrong = [
        f"{token} is {vocabulary[token]} in the tokenizer but {getattr(config, field)} in the config's `{field}`"
        for field, token in SPECIAL_TOKENS.items()
        if vocabulary.get(token) not in (None, getattr(config, field))
    ]
    if wrong:
        problems.append(
            Finding(", ".join(wrong), "take the tokenizer that the model was trained with, or correct config.json")
        )
    # The LM head has no rows for special tokens, so that they cannot be generated.
    outside = [field for field in SPECIAL_TOKENS if not text.vocab_size <= getattr(config, field) < total]
    if outside and not wrong and largest < total:
        listed = ", ".join(f"`{field}` {getattr(config, field)}" for field in outside)
        problems.append(
            Finding(
                f"{listed} must be from `vocab_size` {text.vocab_size} to {total - 1}",
                "take the tokenizer that the model was trained with",
            )
        )
    return problems


def check_processor(image: Mapping[str, Any], video: Mapping[str, Any], config: Any) -> list[Finding]:
    """Compares the settings of the image and of the video processor with the vision config."""
    vision = config.vision_config
    problems = []
    for name, settings in (("image_processor", image), ("video_processor", video)):
        size = settings.get("size") or {}
        if isinstance(size, Mapping):
            size = [size.get("height"), size.get("width")]
        pairs = [
            ("patch_size", settings.get("patch_size"), vision.patch_size),
            ("size", size, list(vision.image_size)),
        ]
        if name == "video_processor":
            pooling = settings.get("pooling_size")
            pooling = list(pooling) if isinstance(pooling, list | tuple) else pooling
            pairs.append(("pooling_size", pooling, list(vision.pooling_size)))
        for key, found, expected in pairs:
            if found != expected:
                problems.append(
                    Finding(
                        f"`{key}` of the {name} is {found}, but the vision config has {expected}",
                        f"set `{key}` in processor_config.json to {expected}",
                    )
                )
    return problems
