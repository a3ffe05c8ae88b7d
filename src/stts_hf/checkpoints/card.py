"""The model cards (`README.md`) of a checkpoint folder and of an adapter's folder."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from huggingface_hub import ModelCard, ModelCardData

from .families import OWN, Family, own_family
from .files import read_json

CARD = "README.md"
RESULTS = "results.png"  # of `stts-hf train`
# Pictures that a card shows where they lie in its folder, as our commands name them.
PICTURES = {
    RESULTS: "Losses of the training, and what the model keeps of two clips before and after it",
    "comparison.png": "What the model keeps of a clip, by selector",
    "contact_sheet.png": "What the model keeps of a clip: dropped blocks are dimmed",
}
# Stands for the repository in the usage section until it is known; `stts-hf push` puts its name there.
UNNAMED = "path/to/this/checkpoint"
# A sentence of the card that transformers writes where a repository has none.
STOCK_SENTENCE = "This model card has been automatically generated."

_TEMPLATE = str(Path(__file__).with_suffix(".md"))
NO_BASE = "path/to/the/base/model"
NO_ADAPTER = "path/to/this/adapter"


def model_card(
    folder: str | Path,
    *,
    base_model: str | None = None,
    name: str | None = None,
    repo_id: str | None = None,
    license: str | None = "apache-2.0",
    tags: Sequence[str] = (),
    datasets: Sequence[str] = (),
    training: str | None = None,
    figures: Mapping[str, Any] | None = None,
    scorer_trained: bool | None = None,
    metadata: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> ModelCard:
    """
    Returns a new card for a checkpoint folder, with the settings of its `config.json` and `processor_config.json`, or
    for the folder of a LoRA or DoRA adapter; and with the folder's `PICTURES`. PEFT's own card of an adapter lacks
    `pipeline_tag` and instructions.

    base_model: Hub id of the model it was made from. name: heading, "STTS on <base model>" by default. repo_id: for the
    usage section; a push fills it in later. datasets: Hub ids of its training data. training: prose about its training.
    figures: measured results, name to value. scorer_trained: False adds a warning. metadata: more of it, as
    `inherited_metadata` returns it, where no other argument gives it. settings: of the model's config in an adapter's
    training that are not the base's, by path, such as `{"vision_config.pruning_ratio": 0.3}`; an adapter does not keep
    them. Raises `ValueError` for a folder without an STTS `config.json` or an `adapter_config.json`.
    """
    folder = Path(folder)
    config, adapter = (read_json(folder / file) for file in ("config.json", "adapter_config.json"))
    family, method = _family_of(folder, adapter), "DoRA" if adapter.get("use_dora") else "LoRA"
    own_tags = family.tags if family else ["stts", "video", "token-pruning"]
    own_tags = [*(tag for tag in own_tags if tag != "custom_code"), method.lower()] if adapter else own_tags
    data = ModelCardData(
        library_name="peft" if adapter else "transformers",
        pipeline_tag="video-text-to-text",
        license=license,
        base_model=base_model,
        datasets=list(datasets) or None,
        tags=[*own_tags, *(tag for tag in tags if tag not in own_tags)],
    )
    for key, value in (metadata or {}).items():
        if data.get(key) is None:
            data[key] = [value] if key == "datasets" and isinstance(value, str) else value
    if adapter and data.base_model:
        data["base_model_relation"] = "adapter"
    return ModelCard.from_template(
        data,
        template_path=_TEMPLATE,
        name=name,
        method=method,
        adapter=adapter,
        base=data.base_model if isinstance(data.base_model, str) else NO_BASE,
        checkpoint=repo_id or (NO_ADAPTER if adapter else UNNAMED),
        config=config,
        family=family,
        settings=settings or {},
        processor=read_json(folder / "processor_config.json"),
        scorer_trained=scorer_trained,
        training=training,
        figures=figures,
        pictures={name: what for name, what in PICTURES.items() if (folder / name).is_file()},
    )


def write_model_card(folder: str | Path, **details: Any) -> None:
    """Writes `README.md` into a checkpoint's or an adapter's folder. details: arguments of `model_card`."""
    model_card(folder, **details).save(Path(folder) / CARD)


def _family_of(folder: Path, adapter: Mapping[str, Any]) -> Family | None:
    if not adapter:
        return own_family(folder)
    named = (adapter.get("auto_mapping") or {}).get("base_model_class")  # none where the adapter has a `task_type`
    return next((one for one in OWN.values() if one.model.__name__ == named), None)


def checkpoint_card(folder: str | Path, *, repo_id: str) -> ModelCard:
    """The card to push: the folder's with what it lacks and `repo_id`, or a new one. Raises `ValueError`."""
    file = Path(folder) / CARD
    text = file.read_text(encoding="utf-8") if file.is_file() else STOCK_SENTENCE
    if STOCK_SENTENCE in text:
        return model_card(folder, repo_id=repo_id)
    try:
        card = ModelCard(text.replace(UNNAMED, repo_id), ignore_metadata_errors=False)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"README.md has metadata that the Hub refuses; correct its head: {error}") from error
    for key, value in (("library_name", "transformers"), ("pipeline_tag", "video-text-to-text")):
        if card.data.get(key) is None:
            card.data[key] = value
    tags, family = card.data.get("tags") or [], OWN.get(str(read_json(Path(folder) / "config.json").get("model_type")))
    card.data["tags"] = [*tags, *(tag for tag in (family.tags if family else ()) if tag not in tags)]
    return card


def inherited_metadata(*folders: Path) -> dict[str, Any]:
    """Returns licence, base model and data sets that the cards of `folders` name, each from the first that does."""
    found: dict[str, Any] = {}
    for folder in folders:
        data = _metadata(folder)
        for keys in (("license", "license_name", "license_link"), ("base_model",), ("datasets",)):
            if found.get(keys[0]) is None:
                found |= {key: data[key] for key in keys if data.get(key)}
    return found


def base_model_of(name_or_path: str | None) -> str | None:
    """The Hub id that a model was loaded from, or that the card of its folder names; None where neither says."""
    if not name_or_path:
        return None
    if os.path.isdir(name_or_path):
        base_model = _metadata(Path(name_or_path)).get("base_model")
        return base_model if isinstance(base_model, str) else None
    return name_or_path if name_or_path.count("/") == 1 and not os.path.isabs(name_or_path) else None


def _metadata(folder: Path) -> dict[str, Any]:
    try:
        return ModelCard.load(folder / CARD, ignore_metadata_errors=True).data.to_dict()
    except (ValueError, OSError, yaml.YAMLError):  # no card, or someone's README without readable metadata
        return {}
