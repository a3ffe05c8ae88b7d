"""
`trl.SFTTrainer` for STTS models. TRL computes the loss from hidden states and labels of one length and has no place for
the temporal loss, so `STTSSFTTrainer` overrides `compute_loss`, as TRL's documentation advises.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from trl import SFTConfig, SFTTrainer

from stts_hf.data.collator import STTSDataCollator
from stts_hf.training.arguments import STTSTrainingArguments
from stts_hf.training.trainer import STTSTrainer


@dataclass
class STTSSFTConfig(STTSTrainingArguments, SFTConfig):
    """Options of `trl.SFTConfig` and `STTSTrainingArguments`. Raises `ValueError` for TRL's packing and losses."""

    # Options of TRL that would compute a wrong loss, because they do not account for dropped tokens; and the remedy.
    refused: ClassVar = STTSTrainingArguments.refused | {
        "packing": "use STTSTrainer with a PackedDataset",
        "padding_free": "use STTSTrainer with a PackedDataset",
        "loss_type": "the model computes its losses itself",
    }
    _VALID_DICT_FIELDS: ClassVar = [*SFTConfig._VALID_DICT_FIELDS, "learning_rates"]  # type: ignore[misc]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.dataset_kwargs = {"skip_prepare_dataset": True}


class STTSSFTTrainer(STTSTrainer, SFTTrainer):  # type: ignore[misc]
    """
    `trl.SFTTrainer` with STTS's losses and the features of `STTSTrainer`. Arguments as in `SFTTrainer`, `peft_config`
    included; `args` is an `STTSSFTConfig`, data sets come from `load_rows`. Without a `data_collator`, it makes an
    `STTSDataCollator` of `processing_class`.
    """

    arguments_class = STTSSFTConfig

    def __init__(self, model: Any = None, args: STTSSFTConfig | None = None, **kwargs: Any) -> None:
        if kwargs.get("data_collator") is None:
            processor = kwargs.get("processing_class")
            if processor is None:
                raise ValueError("`processing_class` must be the checkpoint's processor, or give a `data_collator`.")
            kwargs["data_collator"] = STTSDataCollator(processor, model_config=model.config, return_ids=True)
        super().__init__(model, args, **kwargs)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """As in `STTSTrainer`; TRL also asks for one at every checkpoint, when the output folder has no model yet."""
        if (Path(str(self.args.output_dir)) / "config.json").is_file():
            super().create_model_card(*args, **kwargs)
