"""The card of a LoRA or DoRA adapter's folder: what it changes, and how it gets back onto its base."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from stts_hf.checkpoints.card import read_json
from stts_hf.modeling.card_stts import CARD, CITATION, METHOD, TAGS, training_sections

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
    Writes `README.md` into an adapter's folder, in place of PEFT's, which lacks `pipeline_tag` and says nothing of
    loading. Method and modules are read from `adapter_config.json`.

    base_model: Hub id of the base; None where it has none. repo_id: of the adapter, for the usage section. datasets,
    training, figures: as in `write_model_card`. settings: of the model's config in training that are not the base's, by
    path, such as `{"vision_config.pruning_ratio": 0.3}`; an adapter does not keep them. Raises
    `ValueError` for a folder without `adapter_config.json`.
    """
    folder = Path(folder)
    adapter = read_json(folder / "adapter_config.json")
    if adapter is None:
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
    full = adapter.get("modules_to_save") or []
    on = f" of [{base_model}](https://huggingface.co/{base_model})" if base_model else ""
    parts = [
        f"---\n{data.to_yaml()}\n---\n",
        f"# {name or f'{method} adapter for STTS'}\n",
        METHOD.lstrip("\n"),
        f"A {method} adapter (rank {adapter['r']}, alpha {adapter['lora_alpha']}){on}"
        + (
            f"; trained in full and saved with it: {', '.join(f'`{module}`' for module in sorted(full))}."
            if full
            else "."
        )
        + "\n",
        RELOAD.format(
            base=base_model or NO_BASE,
            adapter=repo_id or NO_ADAPTER,
            settings="".join(f"model.config.{path} = {value!r}\n" for path, value in (settings or {}).items()),
            processor="adapter" if (folder / "processor_config.json").is_file() else "base",
        ).lstrip("\n"),
    ]
    parts += [*training_sections(training, datasets, figures), CITATION.lstrip("\n")]
    ModelCard("\n".join(parts)).save(folder / CARD)
