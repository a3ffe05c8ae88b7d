"""The card of a model that `transformers.Trainer` trained: the checkpoint's own, with the trainer's record in it."""

import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from transformers import Trainer

from .card import CARD, base_model_of, write_model_card

RECORD = "### Training hyperparameters"


class ModelCardTrainerMixin(Trainer):
    """
    Goes before `Trainer` in a trainer's bases. `push_to_hub` and `create_model_card` then write the card of an STTS
    checkpoint, or of an adapter's folder, in place of the trainer's draft, whose metadata lack `pipeline_tag`, and take
    over the draft's tags, hyperparameters and results, and the data sets of `dataset_tags`. A whole checkpoint that is
    saved where no card is gets one.
    """

    args: Any
    model: Any

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, state_dict)
        folder = Path(output_dir or self.args.output_dir)
        has_model = (folder / "config.json").is_file() and not (folder / "adapter_config.json").is_file()
        if self.args.should_save and has_model and not (folder / CARD).exists():
            write_model_card(folder, base_model=self._base_model())

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        card, pushed = Path(checkpoint_folder) / CARD, Path(self.args.output_dir) / CARD
        if self.is_world_process_zero() and card.is_file() and not pushed.exists():
            shutil.copy(card, pushed)
        super()._push_from_checkpoint(checkpoint_folder)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """As in `Trainer`; writes `README.md` into the output folder, on the main process only."""
        super().create_model_card(*args, **kwargs)
        if not self.is_world_process_zero():
            return
        folder = Path(self.args.output_dir)
        draft = ModelCard.load(folder / CARD, ignore_metadata_errors=True)
        datasets = draft.data.get("datasets") or []
        write_model_card(
            folder,
            name=kwargs.get("model_name"),
            base_model=self._base_model(),
            license=draft.data.get("license") or "apache-2.0",
            tags=[tag for tag in draft.data.get("tags") or () if not tag.startswith("base_model:")],  # PEFT's are paths
            datasets=[datasets] if isinstance(datasets, str) else datasets,
            training=draft.text[draft.text.index(RECORD) :] if RECORD in draft.text else None,
        )

    def _base_model(self) -> str | None:
        return base_model_of(getattr(self.model.config, "_name_or_path", None))
