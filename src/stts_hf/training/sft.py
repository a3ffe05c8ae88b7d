"""
`trl.SFTTrainer` for STTS models.

TRL computes the loss itself, from the last hidden states and the caller's labels: of a sequence that lost tokens on
the way these have different lengths, and the temporal loss has no place in it. TRL's own advice for other losses is to
override `compute_loss`, which is what `STTSSFTTrainer` does.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from trl import SFTConfig, SFTTrainer

from stts_hf.data.collator import STTSDataCollator
from stts_hf.training.arguments import STTSTrainingArguments
from stts_hf.training.trainer import STTSTrainer

_AS_THEY_ARE = {"skip_prepare_dataset": True}
_OWN_LENGTH = "Give an `STTSDataCollator(..., max_length=)`, which counts tokens after pruning, as `data_collator`."
_OWN_LABELS = "It learns what the assistant says, and nothing else."
_OWN_TEXT = "Set it in the processor."
_OWN_ROWS = "Prepare the data set before."
# Options of TRL that would do nothing here, and what does.
_NOT_USED = {
    "max_length": _OWN_LENGTH,
    "truncation_mode": "Nothing is ever cut off.",
    "pad_to_multiple_of": "With STTSTrainer, a collator's `pad_to` gives all rows one length.",
    "assistant_only_loss": _OWN_LABELS,
    "completion_only_loss": _OWN_LABELS,
    "eos_token": _OWN_TEXT,
    "pad_token": _OWN_TEXT,
    "chat_template_path": _OWN_TEXT,
    "dataset_text_field": "docs/training_data.md says what rows hold.",
    "dataset_num_proc": _OWN_ROWS,
    "shuffle_dataset": "The sampler shuffles.",
    "packing_strategy": "To pack samples, use STTSTrainer with a PackedDataset.",
    "eval_packing": "To pack samples, use STTSTrainer with a PackedDataset.",
}


@dataclass
class STTSSFTConfig(STTSTrainingArguments, SFTConfig):
    """
    Every option of `trl.SFTConfig` and of `STTSTrainingArguments`, with the latter's defaults. Rows go to the collator
    as they are. Raises `ValueError` for TRL's packing, padding and losses, which know nothing of dropped tokens, and
    for options of its tokenizing, which is left to the collator and the processor.
    """

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [  # type: ignore[misc]
        *SFTConfig._VALID_DICT_FIELDS,
        "learning_rates",
    ]

    def __post_init__(self) -> None:
        super().__post_init__()
        refused = {"packing": False, "padding_free": False, "loss_type": "nll"}
        for name, needed in refused.items():
            if getattr(self, name) != needed:
                raise ValueError(
                    f"`{name}` must be {needed!r}, not {getattr(self, name)!r}: TRL's knows nothing of dropped tokens. "
                    "To pack samples, use STTSTrainer with a PackedDataset."
                )
        defaults = {field.name: field.default for field in fields(SFTConfig)}
        for name, instead in _NOT_USED.items():
            if getattr(self, name) not in (defaults[name], None):
                raise ValueError(
                    f"`{name}` must be left at {defaults[name]!r}, not {getattr(self, name)!r}: rows go to the "
                    f"collator as they are. {instead}"
                )
        if self.dataset_kwargs not in (None, {}, _AS_THEY_ARE):
            raise ValueError(f"`dataset_kwargs` must be {_AS_THEY_ARE}, or left out, not {self.dataset_kwargs!r}.")
        self.dataset_kwargs = dict(_AS_THEY_ARE)


class STTSSFTTrainer(STTSTrainer, SFTTrainer):  # type: ignore[misc]
    """
    `trl.SFTTrainer` with both of STTS's losses, and all that `STTSTrainer` does: rates per part, logs, whole
    checkpoints. Arguments as in `SFTTrainer`, `peft_config` among them; `args` is an `STTSSFTConfig`, the data sets are
    those of `load_rows`. Without a `data_collator`, an `STTSDataCollator` is made of `processing_class`.
    """

    def __init__(self, model: Any = None, args: STTSSFTConfig | None = None, **kwargs: Any) -> None:
        args = STTSSFTConfig(output_dir="tmp_trainer") if args is None else args
        if not isinstance(args, STTSSFTConfig):
            raise TypeError(f"`args` must be an STTSSFTConfig, not a {type(args).__name__}.")
        if kwargs.get("data_collator") is None:
            processor = kwargs.get("processing_class")
            if processor is None:
                raise ValueError("`processing_class` must be the STTSProcessor, or give a `data_collator`.")
            kwargs["data_collator"] = STTSDataCollator(processor, model_config=model.config, return_ids=True)
        super().__init__(model, args, **kwargs)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """As in `STTSTrainer`; TRL also asks for one at every checkpoint, when the output folder has no model yet."""
        if (Path(str(self.args.output_dir)) / "config.json").is_file():
            super().create_model_card(*args, **kwargs)
