"""`TrainingArguments` with what STTS adds: learning rates per part, frozen parts, logs per frame."""

import os
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from transformers import TrainingArguments

from stts_hf.training.parts import ADAPTER, CONNECTOR, LANGUAGE_MODEL, PARTS, SCORER, VISION_TOWER, check_parts

# Paper section 4.1.
PAPER_LEARNING_RATES = {LANGUAGE_MODEL: 1e-5, VISION_TOWER: 5e-6, CONNECTOR: 5e-6, SCORER: 1e-4}


@dataclass
class STTSTrainingArguments(TrainingArguments):
    """
    Every option of `TrainingArguments`, and:

    learning_rates: rate of each part; parts left out keep the paper's (1e-5 language model, 5e-6 vision tower and
        connector, 1e-4 scorer). `adapter` is the rate of LoRA weights, which otherwise take their part's.
        `learning_rate` is the language model's rate.
    freeze: parts that are not trained.
    log_frame_positions: how many frame positions get a curve of their own share kept in TensorBoard; 0 for none.

    `remove_unused_columns` is off, because the collator needs the rows' own columns, and `logging_nan_inf_filter` too,
    because a loss that is not finite ends the run. `use_cpu` is on where `torchrun` starts processes on a machine
    without accelerator: they are one run then. Raises `ValueError` for unknown parts and rates below 0.
    """

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [  # type: ignore[misc]
        *TrainingArguments._VALID_DICT_FIELDS,
        "learning_rates",
    ]

    learning_rate: float = field(
        default=PAPER_LEARNING_RATES[LANGUAGE_MODEL], metadata={"help": "The language model's peak learning rate."}
    )
    learning_rates: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": f"Peak learning rate of each part ({', '.join(PARTS)}) and of the LoRA weights ({ADAPTER})."},
    )
    freeze: list[str] | None = field(default=None, metadata={"help": f"Parts not to train: {', '.join(PARTS)}."})
    log_frame_positions: int = field(
        default=64, metadata={"help": "Frame positions whose share of blocks kept goes to TensorBoard; 0 for none."}
    )
    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Whether to drop columns that the model's forward does not name."}
    )
    logging_nan_inf_filter: bool = field(
        default=False, metadata={"help": "Has no use here: a loss that is not finite ends the run."}
    )

    def __post_init__(self) -> None:
        if "LOCAL_RANK" in os.environ and not torch.accelerator.is_available():
            self.use_cpu = True  # else accelerate makes every process a run of its own, all in one folder
        super().__post_init__()
        self.learning_rates = self._complete(self.learning_rates)
        self.learning_rate = self.learning_rates[LANGUAGE_MODEL]
        if isinstance(self.freeze, str):
            raise ValueError(f"`freeze` must be a list of parts, such as [{self.freeze!r}], not a string.")
        self.freeze = list(self.freeze or ())
        check_parts("freeze", self.freeze, PARTS)
        if self.log_frame_positions < 0:
            raise ValueError(f"`log_frame_positions` must be 0 or more, not {self.log_frame_positions}.")
        off = {
            "enable_jit_checkpoint": "STTSTrainer itself saves and ends on SIGTERM, and the run resumes exactly",
            "label_smoothing_factor": "the model computes its losses itself, on the shortened sequence",
        }
        for name, reason in off.items():
            if getattr(self, name):
                raise ValueError(f"`{name}` is {getattr(self, name)}, but must be left out: {reason}.")

    def _complete(self, given: Any) -> dict[str, float]:
        """The given rates, checked, and the paper's for all other parts."""
        given = given or {}
        if not isinstance(given, dict):
            raise ValueError(f"`learning_rates` must map parts to rates, such as {{'scorer': 1e-4}}, not {given!r}.")
        check_parts("learning_rates", given, (*PARTS, ADAPTER))
        for part, rate in given.items():
            if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 <= rate < float("inf"):
                raise ValueError(f"`learning_rates` gives {part!r} the rate {rate!r}; it must be a number >= 0.")
        rates = PAPER_LEARNING_RATES | {LANGUAGE_MODEL: self.learning_rate} | given
        if self.learning_rate not in (PAPER_LEARNING_RATES[LANGUAGE_MODEL], rates[LANGUAGE_MODEL]):
            raise ValueError(
                f"`learning_rate` is {self.learning_rate}, but `learning_rates` gives the language model "
                f"{rates[LANGUAGE_MODEL]}. Give one of the two."
            )
        return rates
