"""What must agree in a checkpoint beside its weights: tokenizer, processor settings and model configuration."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .layout import Group
from .original import SPECIAL_TOKENS


@dataclass(frozen=True)
class Problem:
    """What is wrong, and how to mend it, each a phrase for the user."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}: {self.remedy}"


def raise_problems(subject: str, problems: Iterable[Problem]) -> None:
    """Raises one `ValueError` that names every problem, or nothing."""
    listed = list(problems)
    if listed:
        raise ValueError(f"{subject}: {'; '.join(map(str, listed))}.")


def check_vocabulary(vocabulary: Mapping[str, int], config: Any) -> list[Problem]:
    """Compares a tokenizer's token ids (text to id) with the special ids and the vocabulary size of an `STTSConfig`."""
    text = config.text_config
    total = text.vocab_size + text.additional_vocab_size
    problems = []
    missing = [token for token in SPECIAL_TOKENS.values() if token not in vocabulary]
    if missing:
        problems.append(Problem(f"the tokenizer lacks {', '.join(missing)}", "take the tokenizer of a Molmo2 model"))
    largest = max(vocabulary.values(), default=0)
    if largest >= total:
        problems.append(
            Problem(
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
            Problem(", ".join(wrong), "take the tokenizer that the model was trained with, or correct config.json")
        )
    # The LM head has no rows for special tokens, so that they cannot be generated.
    outside = [field for field in SPECIAL_TOKENS if not text.vocab_size <= getattr(config, field) < total]
    if outside and not wrong and largest < total:
        listed = ", ".join(f"`{field}` {getattr(config, field)}" for field in outside)
        problems.append(
            Problem(
                f"{listed} must be from `vocab_size` {text.vocab_size} to {total - 1}",
                "take the tokenizer that the model was trained with",
            )
        )
    return problems


def check_processor(image: Mapping[str, Any], video: Mapping[str, Any], config: Any) -> list[Problem]:
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
                    Problem(
                        f"`{key}` of the {name} is {found}, but the vision config has {expected}",
                        f"set `{key}` in processor_config.json to {expected}",
                    )
                )
    return problems


@dataclass
class WeightProblems:
    """How a checkpoint's tensors differ from the model's, by name."""

    missing: list[str]
    unexpected: list[str]
    wrong_shapes: list[str]

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.wrong_shapes)

    def __str__(self) -> str:
        lines = []
        for what, names in (
            ("missing", self.missing),
            ("unexpected", self.unexpected),
            ("of the wrong shape", self.wrong_shapes),
        ):
            if names:
                more = f" and {len(names) - 4} more" if len(names) > 4 else ""
                lines.append(f"{len(names)} tensors are {what}: {', '.join(names[:4])}{more}")
        return "; ".join(lines)


def check_weights(source: Any, layout: list[Group], declared_layers: int = 0, kept_layers: int = 0) -> WeightProblems:
    """Compares the names and shapes of a `TensorSource` with the model's.

    Args:
        declared_layers: ViT layers from `kept_layers` up to this one may be there; the model has no use for them.
    """
    used: set[str] = set()
    problems = WeightProblems([], [], [])
    for group in layout:
        parts = source.parts(group)
        used |= {part.name for part in parts}
        if not parts:
            problems.missing += [part.name for part in group.saved]
            continue
        expected = next(
            (wanted for wanted in (group.saved, group.native) if {p.name for p in parts} & {w.name for w in wanted}), ()
        )
        absent = [part.name for part in expected if part.name not in used]
        if absent:
            problems.missing += absent
            continue
        rows = sum(part.rows for part in parts)
        if len(expected) == len(parts) == len(group.native) > 1:  # native names: each has a shape of its own
            pairs = [(part, wanted.shape) for part, wanted in zip(parts, group.native, strict=True)]
        elif len(parts) > 1:  # the embedding may be cut anywhere
            pairs = [(part, (part.rows, *group.row_shape)) for part in parts]
        else:
            pairs = [(parts[0], (group.rows, *group.row_shape) if group.native[0].shape else ())]
        for part, shape in pairs:
            if part.shape != shape:
                problems.wrong_shapes.append(f"{part.name} {list(part.shape)} instead of {list(shape)}")
        if len(parts) > 1 and rows != group.rows and pairs[-1][0].shape == pairs[-1][1]:
            names = " and ".join(part.name for part in parts)
            problems.wrong_shapes.append(f"{names} with {rows} rows together instead of {group.rows}")
    unneeded = {f".{layer}." for layer in range(kept_layers, declared_layers)}
    for name in source.shapes:
        is_vision_layer = "resblocks." in name or "vision_tower.layers." in name
        if name not in used and not (is_vision_layer and any(index in name for index in unneeded)):
            problems.unexpected.append(name)
    return problems
