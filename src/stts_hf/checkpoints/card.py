"""The model card of a checkpoint folder."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from huggingface_hub import ModelCard

from stts_hf.modeling.card_stts import CARD, TAGS, UNNAMED, is_provisional, model_card


def write_model_card(
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
) -> None:
    """
    Writes `README.md` into a checkpoint folder, over one that is there. Settings are read from its `config.json` and
    `processor_config.json`, everything else is as in `stts_hf.modeling.card_stts.model_card`.

    base_model: Hub id of the model it was made from. name: heading, "STTS on <base model>" by default. repo_id: for the
    usage section; a push fills it in later. datasets, training, figures: training data, prose, and measured results,
    where known. scorer_trained: False adds a warning. metadata: more of it, as `inherited_metadata` returns it, where
    no other argument gives it. Raises `ValueError` for a folder without an STTS `config.json`.
    """
    folder = Path(folder)
    card = _new_card(
        folder,
        name=name,
        repo_id=repo_id,
        base_model=base_model,
        license=license,
        tags=tags,
        datasets=datasets,
        training=training,
        figures=figures,
        scorer_trained=scorer_trained,
    )
    for key, value in (metadata or {}).items():
        if card.data.get(key) is None:
            card.data[key] = value
    card.save(folder / CARD)


def inherited_metadata(*folders: Path) -> dict[str, Any]:
    """Returns licence, base model and data sets that the cards of `folders` name, each from the first that does."""
    found: dict[str, Any] = {}
    for folder in folders:
        try:
            data = ModelCard.load(folder / CARD, ignore_metadata_errors=True).data if (folder / CARD).is_file() else {}
        except (ValueError, OSError, yaml.YAMLError):  # someone's README without readable metadata
            continue
        for keys in (("license", "license_name", "license_link"), ("base_model",), ("datasets",)):
            if found.get(keys[0]) is None:
                found |= {key: data.get(key) for key in keys if data.get(key)}
    return found


def checkpoint_card(folder: str | Path, *, repo_id: str) -> ModelCard:
    """
    Returns the card to push with a checkpoint folder: its `README.md` with the metadata it lacks, or a new one where
    there is none. `repo_id` takes its place in the usage section. Raises `ValueError` where the metadata is no YAML.
    """
    file = Path(folder) / CARD
    if is_provisional(file):
        return _new_card(Path(folder), repo_id=repo_id)
    try:
        card = ModelCard(file.read_text(encoding="utf-8").replace(UNNAMED, repo_id), ignore_metadata_errors=False)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"Invalid metadata in README.md: {error}") from error
    for key, value in (("library_name", "transformers"), ("pipeline_tag", "video-text-to-text")):
        if card.data.get(key) is None:
            card.data[key] = value
    tags = card.data.get("tags") or []
    card.data["tags"] = [*tags, *(tag for tag in TAGS if tag not in tags)]
    return card


def _new_card(
    folder: Path,
    *,
    name: str | None = None,
    repo_id: str | None = None,
    base_model: str | None = None,
    **details: Any,
) -> ModelCard:
    config = read_json(folder / "config.json")
    if config is None or config.get("model_type") != "stts":
        found = "holds no config.json" if config is None else f"has `model_type` {config.get('model_type')!r}"
        raise ValueError(f"`folder` {folder} {found}, but must be a checkpoint folder of `model_type` 'stts'.")
    if name is None:
        name = f"STTS on {base_model.split('/')[-1]}" if base_model else "STTS"
    return model_card(
        config,
        name=name,
        checkpoint=repo_id or UNNAMED,
        base_model=base_model,
        frames=_frames(read_json(folder / "processor_config.json")),
        **details,
    )


def read_json(file: Path) -> dict[str, Any] | None:
    """Returns the contents of a JSON file, None where there is no such file."""
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def _frames(processor: dict[str, Any] | None) -> tuple[int, float | None] | None:
    settings = (processor or {}).get("video_processor", {})
    return (settings["num_frames"], settings.get("max_fps")) if settings.get("num_frames") else None
