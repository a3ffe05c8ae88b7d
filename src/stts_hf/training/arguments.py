"""`TrainingArguments` with STTS's options; learning rates and frozen parts of a model."""

# ruff: noqa: RUF009 -- `setting` makes a `dataclasses.field`

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import TrainingArguments

from stts_hf.model_parts import CONNECTOR, LANGUAGE_MODEL, PARTS, SCORER, VISION_TOWER, parts_of
from stts_hf.selectors import SELECTORS
from stts_hf.training.answer_loss import ANSWER_LOSSES
from stts_hf.wording import did_you_mean

ADAPTER = "adapter"  # LoRA and DoRA weights, in any part

# Paper section 4.1.
PAPER_LEARNING_RATES = {LANGUAGE_MODEL: 1e-5, VISION_TOWER: 5e-6, CONNECTOR: 5e-6, SCORER: 1e-4}

DEPLOYED_RATIOS = (0.5, 0.95)  # of masks, where no `pruning_ratio_range` is given


def setting(default: Any, help: str, choices: Sequence[str] | None = None) -> Any:
    """A dataclass field with a help text for `HfArgumentParser`."""
    return field(default=default, metadata={"help": help} | ({"choices": choices} if choices else {}))


@dataclass
class STTSTrainingArguments(TrainingArguments):
    """
    Every option of `TrainingArguments`, and those below.

    Other defaults: `remove_unused_columns` is off, because the collator needs the rows' own columns;
    `logging_nan_inf_filter` is off, because a loss that is not finite ends the run; `hub_strategy` is "end"; `use_cpu`
    is on if `torchrun` starts processes on a machine without accelerator.

    Attributes:
        learning_rate: the language model's rate.
        learning_rates: rate by part; defaults to the paper's (1e-5 language model, 5e-6 vision tower and connector,
            1e-4 scorer). `adapter` is the rate of LoRA weights, by default that of the part they adapt.
        freeze: parts that are not trained.
        scorer_only: trains the scorer alone, by the model's `scorer_target`: the temporal loss, for which nothing after
            ViT layer `l` runs, or what blocks are worth to the answers (`training/worth.py`).
        pruning_ratio_range: lowest and highest share dropped. Whole training draws a ratio for each video; the masks of
            `scorer_target="answers"` take theirs from it too, by default from 0.5 to 0.95.
        num_masks: keep masks of a row in a round, with `scorer_target="answers"`; whole training draws them in every
            step.
        mask_rounds: how often `scorer_only` draws the masks of a row, from the second time on by the scorer itself.
        state_cache_gb: gigabytes of the host's memory for outputs of ViT layer `l`, with `scorer_only`: layers `0..l`
            then run once for a row, and not in every epoch. 0 for none.
        answer_loss: "divergence" from the unpruned model's answers, or the labels' "cross_entropy".
        log_frame_positions: number of frame positions whose kept share TensorBoard shows; 0 for none.

    Raises:
        ValueError: a part is unknown, or a rate is below 0.
    """

    refused: ClassVar[dict[str, str]] = {
        "enable_jit_checkpoint": "STTSTrainer itself saves and ends on SIGTERM, and the run resumes exactly",
        "label_smoothing_factor": "the model computes its losses itself, on the shortened sequence",
    }
    _VALID_DICT_FIELDS: ClassVar = [*TrainingArguments._VALID_DICT_FIELDS, "learning_rates"]  # type: ignore[misc]

    learning_rate: float = setting(PAPER_LEARNING_RATES[LANGUAGE_MODEL], "The language model's peak learning rate.")
    learning_rates: dict[str, Any] | str | None = setting(
        None, f"Peak learning rate of each part ({', '.join(PARTS)}) and of the LoRA weights ({ADAPTER})."
    )
    freeze: list[str] | None = setting(None, f"Parts not to train: {', '.join(PARTS)}.")
    scorer_only: bool = setting(False, "Train the scorer alone, by `scorer_target`; all other parts are frozen.")
    pruning_ratio_range: list[float] | None = setting(None, "Lowest and highest ratio that a video draws in training.")
    num_masks: int = setting(12, "Keep masks of a row in a round, with `scorer_target: answers`.")
    mask_rounds: int = setting(2, "Draws of a row's masks, with `scorer_only` and `scorer_target: answers`.")
    state_cache_gb: float = setting(0.0, "Memory for outputs of ViT layer `l`, with `scorer_only`, in gigabytes.")
    answer_loss: str = setting("divergence", "What a mask costs, with `scorer_target: answers`.", ANSWER_LOSSES)
    log_frame_positions: int = setting(64, "Number of frame positions whose kept share TensorBoard shows; 0 for none.")
    hub_strategy: Any = setting("end", "When to push; before the end `Trainer` pushes the whole output folder.")
    remove_unused_columns: bool = setting(False, "Whether to drop columns that the model's forward does not name.")
    logging_nan_inf_filter: bool = setting(False, "Off by default, because a loss that is not finite ends the run.")

    def __post_init__(self) -> None:
        if "LOCAL_RANK" in os.environ and not torch.accelerator.is_available():
            self.use_cpu = True  # else accelerate starts one run per process, all in one folder
        super().__post_init__()
        self.learning_rates = self._complete(self.learning_rates or {})
        self.learning_rate = self.learning_rates[LANGUAGE_MODEL]
        if isinstance(self.freeze, str):
            raise ValueError(f"`freeze` must be a list of parts, such as [{self.freeze!r}], not a string.")
        self.freeze = list(self.freeze or ())
        check_parts("freeze", self.freeze, PARTS)
        for name, least in (("log_frame_positions", 0), ("num_masks", 4), ("mask_rounds", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"`{name}` must be at least {least}, not {getattr(self, name)}.")
        if self.answer_loss not in ANSWER_LOSSES:
            raise ValueError(f"`answer_loss` must be one of {', '.join(ANSWER_LOSSES)}, not {self.answer_loss!r}.")
        bounds = self.pruning_ratio_range
        if bounds is not None and not (len(bounds) == 2 and 0 <= bounds[0] <= bounds[1] < 1):
            raise ValueError(f"`pruning_ratio_range` must be two ratios, such as [0.1, 0.95], not {bounds!r}.")
        for name, reason in self.refused.items():
            value, default = getattr(self, name), type(self).__dataclass_fields__[name].default
            if value not in (default, None):
                raise ValueError(f"`{name}` must be left at {default!r}, not {value!r}: {reason}.")

    def _complete(self, given: Any) -> dict[str, float]:
        """The given rates, checked, and the paper's for all other parts."""
        if not isinstance(given, dict):
            raise ValueError(f"`learning_rates` must map parts to rates, such as {{'scorer': 1e-4}}, not {given!r}.")
        check_parts("learning_rates", given, (*PARTS, ADAPTER))
        for part, rate in given.items():
            if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 <= rate < math.inf:
                raise ValueError(f"`learning_rates` gives {part!r} the rate {rate!r}; it must be a number >= 0.")
        rates = PAPER_LEARNING_RATES | {LANGUAGE_MODEL: self.learning_rate} | given
        if self.learning_rate not in (PAPER_LEARNING_RATES[LANGUAGE_MODEL], rates[LANGUAGE_MODEL]):
            raise ValueError(
                f"`learning_rate` is {self.learning_rate}, but `learning_rates` gives the language model "
                f"{rates[LANGUAGE_MODEL]}. Give one of the two."
            )
        return rates


def check_parts(argument: str, names: Iterable[str], valid: tuple[str, ...]) -> None:
    """Raises `ValueError` that lists the `valid` parts if `argument` names another."""
    for name in names:
        if name not in valid:
            advice = did_you_mean(str(name), valid, f"Parts: {', '.join(valid)}.")
            raise ValueError(f"`{argument}` names {name!r}, which is no part of the model. {advice}")


def is_adapter(name: str) -> bool:
    """Whether the parameter `name` is a LoRA matrix or a DoRA magnitude."""
    return any(word.startswith("lora_") for word in name.split("."))


def rate_keys(model: nn.Module, learning_rates: Mapping[str, object]) -> dict[str, str]:
    """The key of `learning_rates` for each parameter's name: its part, or `adapter` if adapters have a rate."""
    with_adapter = ADAPTER in learning_rates
    return {name: ADAPTER if with_adapter and is_adapter(name) else part for name, part in parts_of(model).items()}


def trained_parts(model: nn.Module) -> set[str]:
    """The parts of which some parameter requires a gradient."""
    parts = parts_of(model)
    return {parts[name] for name, parameter in model.named_parameters() if parameter.requires_grad}


def learns_answers(config: Any, arguments: STTSTrainingArguments) -> bool:
    """Whether a run fits the scorer to answers, for which it measures masks: by its target, unless it is frozen."""
    return config.scorer_target == "answers" and SCORER not in (arguments.freeze or ())


def prepare_parts(model: Any, arguments: STTSTrainingArguments) -> None:
    """Turns off gradients of frozen parts. Raises `ValueError` for what does not fit the model."""
    keys = parts_of(model)
    frozen = {*(arguments.freeze or ()), *({*PARTS} - {SCORER} if arguments.scorer_only else ())}
    for name, parameter in model.named_parameters():
        if keys[name] in frozen:
            if parameter.requires_grad and (is_adapter(name) or "modules_to_save" in name.split(".")):
                setting = "`scorer_only`" if arguments.scorer_only else "`freeze`"
                raise ValueError(
                    f"{setting} freezes {keys[name]!r}, but PEFT trains {name!r} in it. Change {setting}, or take its "
                    "modules out of the PEFT config's `target_modules` and `modules_to_save`."
                )
            parameter.requires_grad_(False)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not trained:
        raise ValueError(f"Frozen: {sorted(frozen)}, which leaves nothing to train. Change `freeze` or `scorer_only`.")
    if ADAPTER in (arguments.learning_rates or {}) and not any(map(is_adapter, trained)):
        raise ValueError(f"`learning_rates` names {ADAPTER!r}, but no LoRA is trained. Add one, or leave it out.")
    config, vision = model.config, model.config.vision_config
    learns_answers = config.scorer_target == "answers"
    if learns_answers and not SELECTORS[vision.selector].is_learned:
        raise ValueError(f"`scorer_target` is 'answers', but `selector` is {vision.selector!r}. Use 'scorer'.")
    if learns_answers and not arguments.scorer_only and config.worth_unit is None:
        raise ValueError(
            "`scorer_target` is 'answers', but the scorer was never fitted to them. Train it with `scorer_only` first."
        )
    learns = SELECTORS[vision.selector].is_learned and (config.temporal_loss_weight or learns_answers)
    if arguments.scorer_only and not learns:
        raise ValueError(
            f"`scorer_only` is true, but `selector` is {vision.selector!r} and `temporal_loss_weight` is "
            f"{config.temporal_loss_weight!r}, with which the scorer learns nothing. Change one of them."
        )


def split_groups(
    optimizer: torch.optim.Optimizer, model: nn.Module, learning_rates: dict[str, float]
) -> list[dict[str, object]]:
    """The optimizer's groups, split by part with the part's rate; `Trainer` logs the first, the language model's."""
    rates = rate_keys(model, learning_rates)
    keys = {id(parameter): rates[name] for name, parameter in model.named_parameters()}
    groups: list[dict[str, object]] = []
    for key in (*PARTS, ADAPTER):
        for group in optimizer.param_groups:
            params = [parameter for parameter in group["params"] if keys[id(parameter)] == key]
            if params:
                groups.append({**group, "params": params, "lr": learning_rates[key]})
    return groups
