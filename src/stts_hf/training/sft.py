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
# Options of TRL that know nothing of dropped tokens, or would do nothing here; and why.
_NOT_USED = {
    ("packing", "padding_free", "packing_strategy", "eval_packing"): "to pack, use STTSTrainer with a PackedDataset",
    ("loss_type", "assistant_only_loss", "completion_only_loss"): "the model itself computes the losses of the answers",
    ("max_length", "truncation_mode", "pad_to_multiple_of"): "an STTSDataCollator's `max_length` is after pruning",
    ("eos_token", "pad_token", "chat_template_path"): "it is the processor's",
    ("dataset_text_field", "dataset_num_proc", "shuffle_dataset"): "rows go to the collator as they are",
}


@dataclass
class STTSSFTConfig(STTSTrainingArguments, SFTConfig):
    """
    Every option of `trl.SFTConfig` and of `STTSTrainingArguments`, with the latter's defaults. Rows go to the collator
    as they are. Raises `ValueError` for TRL's packing, padding and losses, which know nothing of dropped tokens, and
    for options of its tokenizing, which is left to the collator and the processor.
    """

    _VALID_DICT_FIELDS: ClassVar = [*SFTConfig._VALID_DICT_FIELDS, "learning_rates"]  # type: ignore[misc]

    def __post_init__(self) -> None:
        super().__post_init__()
        defaults = {field.name: field.default for field in fields(SFTConfig)}
        for names, reason in _NOT_USED.items():
            for name in names:
                value, default = getattr(self, name), defaults[name]
                if value not in (default, None):
                    raise ValueError(f"`{name}` must be left at {default!r}, not {value!r}: {reason}.")
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
                raise ValueError("`processing_class` must be the checkpoint's processor, or give a `data_collator`.")
            kwargs["data_collator"] = STTSDataCollator(processor, model_config=model.config, return_ids=True)
        super().__init__(model, args, **kwargs)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """As in `STTSTrainer`; TRL also asks for one at every checkpoint, when the output folder has no model yet."""
        if (Path(str(self.args.output_dir)) / "config.json").is_file():
            super().create_model_card(*args, **kwargs)
