"""The model card (`README.md`) of a checkpoint, and the mixin that keeps transformers' stock card off the Hub."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard, ModelCardData

CARD = "README.md"
# Stands for the repository in the usage section until it is known; `stts-hf push` puts its name there.
UNNAMED = "path/to/this/checkpoint"
SCORE_LAYER = "model.vision_tower.scorer.score_layer"
TAGS = ("stts", "molmo2", "video", "token-pruning", "custom_code")
# A sentence of the card that transformers writes where a repository has none.
STOCK_SENTENCE = "This model card has been automatically generated."
WITHOUT_MODEL = "<!-- Written with the processor; saving or pushing the model adds its settings. -->"

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


def model_card(
    config: Mapping[str, Any] | None,
    *,
    name: str = "STTS",
    checkpoint: str = UNNAMED,
    base_model: str | None = None,
    license: str = "apache-2.0",
    tags: Sequence[str] = (),
    datasets: Sequence[str] = (),
    training: str | None = None,
    figures: Mapping[str, Any] | None = None,
    frames: tuple[int, float | None] | None = None,
    scorer_trained: bool | None = None,
) -> ModelCard:
    """
    Returns the card of a checkpoint.

    config: contents of its `config.json`; None leaves the settings out. checkpoint: repository or folder for the usage
    section. base_model: Hub id of the model it was made from. datasets: Hub ids of its training data. training: prose
    about its training. figures: measured results, name to value. frames: most frames the processor takes and its rate
    per second (None: no rate). scorer_trained: False adds a warning.
    """
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="video-text-to-text",
        license=license,
        base_model=base_model,
        datasets=list(datasets) or None,
        tags=[*TAGS, *(tag for tag in tags if tag not in TAGS)],
    )
    parts = [f"---\n{data.to_yaml()}\n---\n", f"# {name}\n"]
    if config is None:
        parts.append(WITHOUT_MODEL + "\n")
    parts.append(METHOD.lstrip("\n"))
    if base_model is not None:
        parts.append(f"Made from [{base_model}](https://huggingface.co/{base_model}).\n")
    if scorer_trained is False:
        parts.append(UNTRAINED.lstrip("\n"))
    if config is not None:
        parts.append(_table("Pruning settings", ("setting", "value"), _settings(config, frames)))
    parts.append(USAGE.format(checkpoint=checkpoint).lstrip("\n"))
    parts += training_sections(training, datasets, figures)
    parts.append(CITATION.lstrip("\n"))
    return ModelCard("\n".join(parts))


def training_sections(training: str | None, datasets: Sequence[str], figures: Mapping[str, Any] | None) -> list[str]:
    """The sections about training and measured results, each where there is something to say."""
    listed = [f"- [{dataset}](https://huggingface.co/datasets/{dataset})" for dataset in datasets]
    sections = []
    if training or listed:
        sections.append("## Training\n\n" + "\n".join([*([training, ""] if training else []), *listed]).strip() + "\n")
    if figures:
        sections.append(_table("Measured", ("what", "result"), figures))
    return sections


def _settings(config: Mapping[str, Any], frames: tuple[int, float | None] | None) -> dict[str, str]:
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
    if frames is not None:
        number, rate = frames
        settings["frames"] = f"{rate:g} per second, at most {number}" if rate else f"{number} over the whole video"
    return settings


def _table(title: str, head: tuple[str, str], rows: Mapping[str, Any]) -> str:
    lines = [f"## {title}\n", f"| {head[0]} | {head[1]} |", "|---|---|"]
    return "\n".join([*lines, *(f"| {key} | {value} |" for key, value in rows.items())]) + "\n"


def base_model_of(name_or_path: str | None) -> str | None:
    """The Hub id that a model was loaded from, or that the card of its folder names; None where neither says."""
    if not name_or_path:
        return None
    if not os.path.isdir(name_or_path):
        return name_or_path if name_or_path.count("/") == 1 and not os.path.isabs(name_or_path) else None
    if not os.path.isfile(os.path.join(name_or_path, CARD)):
        return None
    try:
        base_model = ModelCard.load(os.path.join(name_or_path, CARD), ignore_metadata_errors=True).data.base_model
    except ValueError:  # someone's README without readable metadata
        return None
    return base_model if isinstance(base_model, str) else None


def card_of_saved(config: Path) -> ModelCard | None:
    """The card of the STTS model whose `config.json` this is; None where it is none or tells too little."""
    try:
        contents = json.loads(config.read_text(encoding="utf-8"))
        return model_card(contents) if contents["model_type"] == "stts" else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def is_provisional(card: Path) -> bool:
    """Whether a card is none, transformers' stock text or one written without the model's settings."""
    if not card.is_file():
        return True
    text = card.read_text(encoding="utf-8")
    return STOCK_SENTENCE in text or WITHOUT_MODEL in text


class ModelCardMixin:
    """Goes before `PreTrainedModel` or `ProcessorMixin`: what is pushed has a card, and never the stock one."""

    def make_card(self, tags: Sequence[str] = (), state_dict: dict[str, Any] | None = None) -> ModelCard:
        """
        The card of this model, with what the model itself can know; of a processor, one without settings. state_dict:
        the weights the card is for, where they are not the model's own, as when those are shards of them.
        """
        config: Any = getattr(self, "config", None)
        if config is None:
            return model_card(None, tags=tags)
        source = getattr(config, "_name_or_path", None)
        return model_card(
            config.to_dict(),
            base_model=base_model_of(source),
            tags=tags,
            scorer_trained=self._is_scorer_trained(state_dict),
        )

    def _is_scorer_trained(self, state_dict: dict[str, Any] | None = None) -> bool | None:
        """False where the scorer's last layer is still zero; None where its weights are not at hand."""
        config: Any = self.config  # type: ignore[attr-defined]
        weight = (state_dict or {}).get(f"{SCORE_LAYER}.weight")
        if weight is None:
            weight = self.get_submodule(SCORE_LAYER).weight  # type: ignore[attr-defined]
        # Reading a shard (FSDP2) would wait for the other processes, which are not here; of ZeRO-3 it is empty.
        sharded = hasattr(weight, "full_tensor") or weight.numel() == 0
        if config.vision_config.selector != "scorer" or weight.is_meta or sharded:
            return None
        return bool(weight.any())

    def _upload_modified_files(self, working_dir, repo_id, *args, **kwargs):
        # transformers calls this at the end of every push, after it has put its stock card into a folder to push.
        card = Path(working_dir) / CARD
        if card.is_file() and is_provisional(card):
            tags = ModelCard.load(card, ignore_metadata_errors=True).data.tags or ()
            self.make_card(tags).save(card)
        elif hasattr(self, "config") and not (
            card.is_file() or HfApi().file_exists(repo_id, CARD, token=kwargs.get("token"))
        ):
            self.make_card().save(card)
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)  # type: ignore[misc]
