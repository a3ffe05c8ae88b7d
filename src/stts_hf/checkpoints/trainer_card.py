"""The card of a model that `transformers.Trainer` trained: the checkpoint's own, with the trainer's record in it."""

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from stts_hf.checkpoints.adapter_card import write_adapter_card
from stts_hf.checkpoints.card import write_model_card
from stts_hf.modeling.card_stts import base_model_of

RECORD = "### Training hyperparameters"


class ModelCardTrainerMixin:
    """
    Goes before `Trainer` in a trainer's bases. `push_to_hub` and `create_model_card` then write the card of an STTS
    checkpoint, or of an adapter's folder, in place of the trainer's draft, whose metadata lack `pipeline_tag`, and take
    over the draft's tags, hyperparameters and results, and the data sets of `dataset_tags`.
    """

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """As in `Trainer`; writes `README.md` into the output folder, on the main process only."""
        super().create_model_card(*args, **kwargs)  # type: ignore[misc]
        if not self.is_world_process_zero():  # type: ignore[attr-defined]
            return
        folder = Path(self.args.output_dir)  # type: ignore[attr-defined]
        draft = ModelCard.load(folder / "README.md", ignore_metadata_errors=True)
        record = draft.text[draft.text.index(RECORD) :] if RECORD in draft.text else None
        datasets = draft.data.get("datasets") or []
        known: dict[str, Any] = {
            "name": kwargs.get("model_name"),
            "base_model": base_model_of(getattr(self.model.config, "_name_or_path", None)),  # type: ignore[attr-defined]
            "license": draft.data.get("license") or "apache-2.0",
            "datasets": [datasets] if isinstance(datasets, str) else datasets,
            "training": record,
        }
        if hasattr(self.accelerator.unwrap_model(self.model), "peft_config"):  # type: ignore[attr-defined]
            write_adapter_card(folder, **known)
        else:
            write_model_card(folder, tags=draft.data.get("tags") or (), **known)
