"""The model cards (`README.md`) of a checkpoint folder and of an adapter's folder."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from huggingface_hub import ModelCard, ModelCardData

from .json_files import read_json

CARD = "README.md"
# Stands for the repository in the usage section until it is known; `stts-hf push` puts its name there.
UNNAMED = "path/to/this/checkpoint"
TAGS = ("stts", "molmo2", "video", "token-pruning", "custom_code")
# A sentence of the card that transformers writes where a repository has none.
STOCK_SENTENCE = "This model card has been automatically generated."

METHOD = """
[STTS](https://arxiv.org/abs/2603.18004) (Spatio-Temporal Token Scoring) rates the blocks of a video's frames inside the
vision tower and drops the least of them from the remaining ViT layers, the connector and the language model. Images
are never touched.
"""
UNTRAINED = """
**The scorer of this checkpoint is untrained**: what it drops means nothing. Train it, load the model with
`selector="cosine"` in the vision config (it needs no training), or pass `pruning_ratio=0`.
"""
USAGE = """
## Use

```python
from transformers import AutoModelForMultimodalLM, AutoProcessor

checkpoint = "{checkpoint}"
processor = AutoProcessor.from_pretrained(checkpoint, trust_remote_code=True)
model = AutoModelForMultimodalLM.from_pretrained(
    checkpoint, trust_remote_code=True, dtype="auto", device_map="auto"  # device_map needs `pip install accelerate`
)
content = [{{"type": "video", "video": "clip.mp4"}}, {{"type": "text", "text": "What happens?"}}]
inputs = processor.apply_chat_template(
    [{{"role": "user", "content": content}}],
    add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt",
).to(model.device, model.dtype)
output = model.generate(**inputs, max_new_tokens=64)  # pruning_ratio=... for another share in this call
print(processor.decode(output[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))
```

Needs transformers 5.20 or newer, and PyAV (`pip install av`) to read video files.
"""
CITATION = """
## Citation

```bibtex
@article{zhang2026unified,
  title={Unified Spatio-Temporal Token Scoring for Efficient Video VLMs},
  author={Zhang, Jianrui and Yang, Yue and Tripathi, Rohun and Han, Winson and Krishna, Ranjay and Clark, Christopher
    and Lee, Yong Jae and Lee, Sangho},
  journal={arXiv preprint arXiv:2603.18004},
  year={2026}
}
```
"""
NO_BASE = "path/to/the/base/model"
NO_ADAPTER = "path/to/this/adapter"

RELOAD = """
## Use

The folder holds no weights of the base model. Load that first (`AutoPeftModel` cannot load custom code):

```python
from peft import PeftModel
from transformers import AutoModelForMultimodalLM, AutoProcessor

base, adapter = "{base}", "{adapter}"
model = AutoModelForMultimodalLM.from_pretrained(base, trust_remote_code=True, dtype="auto")
{settings}model = PeftModel.from_pretrained(model, adapter).eval()
processor = AutoProcessor.from_pretrained({processor}, trust_remote_code=True)

# One checkpoint of its own, which needs neither PEFT nor the base any more:
model.merge_and_unload().save_pretrained("merged")
processor.save_pretrained("merged")
```

Where the base is a stock Molmo2 checkpoint, load it with
`stts_hf.STTSForConditionalGeneration.from_pretrained(base)` and `stts_hf.STTSProcessor.from_pretrained(base)`.
"""


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
) -> ModelCard:
    """
    Returns a new card for a checkpoint folder, with the settings of its `config.json` and `processor_config.json`.

    base_model: Hub id of the model it was made from. name: heading, "STTS on <base model>" by default. repo_id: for the
    usage section; a push fills it in later. datasets: Hub ids of its training data. training: prose about its training.
    figures: measured results, name to value. scorer_trained: False adds a warning. metadata: more of it, as
    `inherited_metadata` returns it, where no other argument gives it. Raises `ValueError` for a folder without an STTS
    `config.json`.
    """
    folder = Path(folder)
    config = read_json(folder / "config.json")
    if config.get("model_type") != "stts":
        found = f"has `model_type` {config.get('model_type')!r}" if config else "holds no config.json"
        raise ValueError(f"`folder` {folder} {found}, but must be a checkpoint folder of `model_type` 'stts'.")
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="video-text-to-text",
        license=license,
        base_model=base_model,
        datasets=list(datasets) or None,
        tags=[*TAGS, *(tag for tag in tags if tag not in TAGS)],
    )
    for key, value in (metadata or {}).items():
        if data.get(key) is None:
            data[key] = value
    name = name or (f"STTS on {base_model.split('/')[-1]}" if base_model else "STTS")
    made_from = f"Made from [{base_model}](https://huggingface.co/{base_model}).\n" if base_model else ""
    settings = _settings(config, read_json(folder / "processor_config.json").get("video_processor") or {})
    parts = [
        METHOD,
        made_from,
        UNTRAINED if scorer_trained is False else "",
        _table("Pruning settings", ("setting", "value"), settings),
        USAGE.format(checkpoint=repo_id or UNNAMED),
        *_training_sections(training, datasets, figures),
        CITATION,
    ]
    return _assemble(data, name, parts)


def write_model_card(folder: str | Path, **details: Any) -> None:
    """Writes `README.md` into a checkpoint folder, over one that is there. details: arguments of `model_card`."""
    model_card(folder, **details).save(Path(folder) / CARD)


def write_adapter_card(
    folder: str | Path,
    *,
    base_model: str | None = None,
    name: str | None = None,
    repo_id: str | None = None,
    license: str | None = "apache-2.0",
    datasets: Sequence[str] = (),
    training: str | None = None,
    figures: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """
    Writes `README.md` into the folder of a LoRA or DoRA adapter, in place of PEFT's, which lacks `pipeline_tag` and
    says nothing of loading. Method and modules are those of `adapter_config.json`.

    base_model: Hub id of the base; None where it has none. repo_id: of the adapter, for the usage section. datasets,
    training, figures: as in `write_model_card`. settings: of the model's config in training that are not the base's, by
    path, such as `{"vision_config.pruning_ratio": 0.3}`; an adapter does not keep them. Raises `ValueError` for a
    folder without `adapter_config.json`.
    """
    folder = Path(folder)
    adapter = read_json(folder / "adapter_config.json")
    if not adapter:
        raise ValueError(f"`folder` {folder} holds no adapter_config.json, but must be a saved PEFT adapter.")
    method = "DoRA" if adapter.get("use_dora") else "LoRA"
    data = ModelCardData(
        library_name="peft",
        pipeline_tag="video-text-to-text",
        license=license,
        base_model=base_model,
        base_model_relation="adapter" if base_model else None,
        datasets=list(datasets) or None,
        tags=[*(tag for tag in TAGS if tag != "custom_code"), method.lower()],
    )
    base = f" of [{base_model}](https://huggingface.co/{base_model})" if base_model else ""
    modules = ", ".join(f"`{module}`" for module in sorted(adapter.get("modules_to_save") or []))
    in_full = f"; trained in full and saved with it: {modules}" if modules else ""
    parts = [
        METHOD,
        f"A {method} adapter (rank {adapter['r']}, alpha {adapter['lora_alpha']}){base}{in_full}.\n",
        RELOAD.format(
            base=base_model or NO_BASE,
            adapter=repo_id or NO_ADAPTER,
            settings="".join(f"model.config.{path} = {value!r}\n" for path, value in (settings or {}).items()),
            processor="adapter" if (folder / "processor_config.json").is_file() else "base",
        ),
        *_training_sections(training, datasets, figures),
        CITATION,
    ]
    _assemble(data, name or f"{method} adapter for STTS", parts).save(folder / CARD)


def checkpoint_card(folder: str | Path, *, repo_id: str) -> ModelCard:
    """
    Returns the card to push with a checkpoint folder: its `README.md` with the metadata it lacks, or a new one where
    that is missing or transformers' stock text. `repo_id` takes its place in the usage section. Raises `ValueError`
    where the metadata is no YAML.
    """
    file = Path(folder) / CARD
    text = file.read_text(encoding="utf-8") if file.is_file() else STOCK_SENTENCE
    if STOCK_SENTENCE in text:
        return model_card(folder, repo_id=repo_id)
    try:
        card = ModelCard(text.replace(UNNAMED, repo_id), ignore_metadata_errors=False)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"Invalid metadata in README.md: {error}") from error
    for key, value in (("library_name", "transformers"), ("pipeline_tag", "video-text-to-text")):
        if card.data.get(key) is None:
            card.data[key] = value
    tags = card.data.get("tags") or []
    card.data["tags"] = [*tags, *(tag for tag in TAGS if tag not in tags)]
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


def _assemble(data: ModelCardData, name: str, parts: Sequence[str]) -> ModelCard:
    head = f"---\n{data.to_yaml()}\n---\n\n# {name}\n\n"
    return ModelCard(head + "\n".join(part.lstrip("\n") for part in parts if part))


def _training_sections(training: str | None, datasets: Sequence[str], figures: Mapping[str, Any] | None) -> list[str]:
    """The sections about training and measured results, each where there is something to say."""
    listed = [f"- [{dataset}](https://huggingface.co/datasets/{dataset})" for dataset in datasets]
    sections = []
    if training or listed:
        sections.append("## Training\n\n" + "\n".join([*([training, ""] if training else []), *listed]).strip() + "\n")
    if figures:
        sections.append(_table("Measured", ("what", "result"), figures))
    return sections


def _settings(config: Mapping[str, Any], video_processor: Mapping[str, Any]) -> dict[str, str]:
    vision = config["vision_config"]
    layer = vision["pruning_layer"]
    settings = {
        "`pruning_ratio`": f"{vision['pruning_ratio']:g}, the share of blocks dropped; each call may override it",
        "`pruning_layer`": f"{layer} (zero-based: layers 0 to {layer} see every patch)",
        "`selector`": f"`{vision['selector']}`",
        "`score_rescaling`": f"`{vision['score_rescaling']}`",
        "`packing`": f"`{vision['packing']}`" + (" with refill" if vision["refill_single_frame_bins"] else ""),
        "`pruned_position_ids`": f"`{config['pruned_position_ids']}`",
    }
    if number := video_processor.get("num_frames"):
        rate = video_processor.get("max_fps")
        settings["frames"] = f"{rate:g} per second, at most {number}" if rate else f"{number} over the whole video"
    return settings


def _table(title: str, head: tuple[str, str], rows: Mapping[str, Any]) -> str:
    lines = [f"## {title}\n", f"| {head[0]} | {head[1]} |", "|---|---|"]
    return "\n".join([*lines, *(f"| {key} | {value} |" for key, value in rows.items())]) + "\n"
