"""The configuration of `stts-hf train`: a flat YAML file, whose settings the command line may replace."""

# ruff: noqa: RUF009 -- `setting` makes a `dataclasses.field`

import argparse
import contextlib
import dataclasses
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, NoReturn, get_args

import torch
import yaml  # type: ignore[import-untyped]
from huggingface_hub.errors import StrictDataclassError
from transformers import HfArgumentParser
from transformers.utils import logging

from stts_hf.checkpoints.atomic_folder import atomic_file
from stts_hf.checkpoints.files import reason_of
from stts_hf.modeling.configuration_stts import Packing
from stts_hf.modeling.settings_stts import PositionRule, ScoreRescaling, ScorerTarget
from stts_hf.selectors import SELECTORS
from stts_hf.training.arguments import LANGUAGE_MODEL, PAPER_LEARNING_RATES, STTSTrainingArguments, setting
from stts_hf.versions import __version__
from stts_hf.wording import did_you_mean, share

logger = logging.get_logger(__name__)

CONFIG_COPY = "train_config.yaml"  # in the output folder
# The text model's linear layers alone: `q_proj` or `all-linear` would hit the vision tower and the connector too.
TEXT_LINEAR = (
    r".*(language|text)_model\.layers\.\d+\."
    r"(self_attn\.[qkvo]_proj|linear_attn\.(in_proj_\w+|out_proj)|mlp\.(shared_expert\.)?(gate|up|down)_proj)"
)


class ConfigError(ValueError):
    """A setting of a training run is wrong; the message names it."""


@dataclass
class ModelArguments:
    """Checkpoint, pruning and adapter. Checkpoint and adapter settings have the names of TRL's `ModelConfig`."""

    model_name_or_path: str = setting(MISSING, "Folder or Hub id of an STTS checkpoint, or a stock one.")
    model_revision: str = setting("main", "Branch, tag or commit of a checkpoint on the Hub.")
    dtype: str = setting(
        "float32",
        "Weights' dtype. With float32 and bf16, matrix products run in bfloat16, the optimizer in full precision.",
        ("float32", "bfloat16", "float16", "auto"),
    )
    attn_implementation: dict[str, str] | str | None = setting(
        None, "Attention kernel: one name, or one for each of text_config and vision_config."
    )
    new_scorer: bool = setting(False, "Whether to start from an untrained scorer, drawn from `seed`.")
    # Of the model's config and its vision config; by default the checkpoint's.
    pruning_ratio: float | None = setting(None, "Share of a video's blocks to drop, from 0 to 1.")
    score_threshold: float | None = setting(None, "In place of a share: lowest score with which a block stays.")
    min_pruning_ratio: float | None = setting(None, "Least share that a threshold drops.")
    max_pruning_ratio: float | None = setting(None, "Largest share that a threshold drops.")
    video_token_budget: int | None = setting(None, "Most tokens that a video keeps.")
    pruning_layer: int | None = setting(None, "Last ViT layer that sees every patch.")
    selector: str | None = setting(None, "Ranking of the blocks.", tuple(SELECTORS))
    selector_seed: int | None = setting(None, "Seed of the random selector.")
    score_rescaling: str | None = setting(None, "Rescaling of scores for the attention bias.", get_args(ScoreRescaling))
    score_bias: bool | None = setting(None, "Whether scores bias the attention of the layer after `pruning_layer`.")
    packing: str | None = setting(None, "Layout of the kept patches in the ViT.", get_args(Packing))
    refill_single_frame_bins: bool | None = setting(None, "Detail of the released code; first_fit_descending only.")
    temporal_loss_weight: float | None = setting(None, "Weight of the temporal loss beside the task loss.")
    detach_temporal_target: bool | None = setting(None, "Whether the targets of the temporal loss are detached.")
    scorer_target: str | None = setting(
        None,
        "What the scorer learns: change between frames, or what blocks are worth to the answers.",
        get_args(ScorerTarget),
    )
    worth_unit: float | None = setting(None, "Nats that raise a score's logit by 1; by default measured on the rows.")
    pruned_position_ids: str | None = setting(None, "RoPE positions of tokens that are kept.", get_args(PositionRule))
    use_peft: bool = setting(False, "Whether to train a LoRA or DoRA adapter.")
    use_dora: bool = setting(False, "Whether the adapter is DoRA, which trains a magnitude beside the matrices.")
    use_rslora: bool = setting(False, "Whether adapters are scaled by alpha / sqrt(r).")
    lora_r: int = setting(16, "Rank of the adapter.")
    lora_alpha: int = setting(32, "Scale of the adapter, times r.")
    lora_dropout: float = setting(0.05, "Dropout before the adapter.")
    lora_target_modules: list[str] | None = setting(None, "Names or a pattern; by default the text's linear layers.")
    lora_modules_to_save: list[str] | None = setting(None, "Modules trained in full; by default the scorer.")
    merge_adapter: bool = setting(False, "Whether to save the merged model too, in OUTPUT_DIR/merged.")

    def __post_init__(self) -> None:
        if self.lora_modules_to_save is None:
            self.lora_modules_to_save = ["scorer"]

    def given(self, names: Sequence[str]) -> dict[str, Any]:
        """The values of the fields `names` that are not None."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@dataclass
class DataArguments:
    """Rows, their videos, and how they become batches."""

    train_data: list[str] = setting(MISSING, "JSONL or Parquet files, saved data sets, or Hub data sets.")
    eval_data: list[str] | None = setting(None, "Evaluation data, in the same forms.")
    train_split: str | None = setting(None, "Split of a Hub data set, by default train.")
    eval_split: str | None = setting(None, "Split of a Hub data set, by default train.")
    data_revision: str | None = setting(None, "Branch, tag or commit of data on the Hub.")
    media_root: str | None = setting(None, "Folder that relative paths start from; by default each data file's.")
    allow_urls: bool = setting(False, "Whether videos and images may be fetched from http(s) URLs in the rows.")
    on_error: str = setting("raise", "Handling of a bad row.", ("raise", "skip"))
    pack_to: int | None = setting(None, "Length of packed rows, in tokens after pruning; by default no packing.")
    max_samples_per_row: int | None = setting(None, "Maximum number of samples in a packed row.")
    max_length: int | None = setting(None, "Maximum length of an unpacked row, in tokens after pruning.")
    pad_to: int | None = setting(None, "Length that every row is padded to, in tokens after pruning.")
    num_frames: int | None = setting(None, "Maximum number of frames of a video; by default the checkpoint's.")
    max_fps: float | None = setting(None, "Maximum number of frames per second; by default the checkpoint's.")
    check_headers: bool = setting(True, "Whether to open every video and image before the first step.")
    # With `scorer_only` and `scorer_target: answers`, the unpruned model answers rows that have no answer.
    default_question: str = setting("Describe this video.", "Question about clips that come without one.")
    max_answer_tokens: int = setting(128, "Maximum length of an answer that the model writes itself, in tokens.")

    def __post_init__(self) -> None:
        if self.pack_to is not None and self.max_length is not None:
            raise ValueError("`max_length` is for unpacked rows. With `pack_to`, that is the limit; leave it out.")
        limit = self.pack_to or self.max_length
        if self.pad_to is not None and limit is not None and limit > self.pad_to:
            raise ValueError(f"`pad_to` is {self.pad_to}, but a row may have {limit} tokens. Raise it to that.")


@dataclass
class CardArguments:
    """Contents of the trained checkpoint's card."""

    card_name: str | None = setting(None, "Heading.")
    card_base_model: str | None = setting(None, "Hub id of the base model.")
    card_datasets: list[str] | None = setting(None, "Hub ids of the data.")
    card_license: str | None = setting(None, "Licence; by default the base model's.")
    card_text: str | None = setting(None, "Additional text.")


@dataclass
class TrainConfig:
    """A run's configuration. given: settings from file and command line, without defaults. source: the file."""

    model: ModelArguments
    data: DataArguments
    card: CardArguments
    training: STTSTrainingArguments
    given: dict[str, Any]
    source: str

    def __post_init__(self) -> None:
        for name, value in (vars(self.model) | vars(self.data) | vars(self.training)).items():
            if name in AT_LEAST_ONE and value is not None and value < 1:
                raise ValueError(f"`{name}` is {value}, but must be at least 1.")
        if self.training.eval_strategy != "no" and not self.data.eval_data:
            raise ValueError(f"`eval_strategy` is {self.given['eval_strategy']!r}, but `eval_data` is empty: set it.")

    def error(self, name: str, problem: object) -> ConfigError:
        """A `ConfigError` about a setting."""
        return ConfigError(f"{self.source}: `{name}` {problem}")

    @contextlib.contextmanager
    def blame(self, name: str, problem: str) -> Iterator[None]:
        """Turns a library's errors in the block into a `ConfigError` about a setting."""
        try:
            yield
        except (ValueError, OSError, StrictDataclassError) as error:
            raise self.error(name, f"{problem}: {reason_of(error)}.") from error


ARGUMENT_CLASSES: tuple[Any, ...] = (ModelArguments, DataArguments, CardArguments, STTSTrainingArguments)
MAPPINGS = {"attn_implementation", *STTSTrainingArguments._VALID_DICT_FIELDS}
# May be written 50% or 0,5.
SHARES = {"pruning_ratio", "pruning_ratio_range", "min_pruning_ratio", "max_pruning_ratio"}
# Defaults of a run that differ from those of `TrainingArguments`.
TRAINING_DEFAULTS = {"report_to": "tensorboard", "logging_steps": 10, "logging_first_step": True}
AT_LEAST_ONE = {
    *("pack_to", "max_samples_per_row", "max_length", "pad_to", "max_answer_tokens"),
    *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
}
REFUSED = {
    "resume_from_checkpoint": "Pass --resume on the command line.",
    "hub_token": "Run `hf auth login`, or set HF_TOKEN: settings are kept beside the weights and pushed with them.",
    "remove_unused_columns": "Leave it out: the collator needs the rows' own columns.",
}
# Settings that a resumed run must share with the earlier one: a restored optimizer and schedule would ignore them, or
# the order of the rows depends on them.
_KEPT_ON_RESUME = {
    *("per_device_train_batch_size", "gradient_accumulation_steps", "dataloader_drop_last", "seed", "data_seed"),
    *("train_sampling_strategy", "length_column_name", "average_tokens_across_devices", "bf16", "fp16", "freeze"),
    *("max_grad_norm", "neftune_noise_alpha", "scorer_only", "pruning_ratio_range", "num_masks"),
    *("mask_rounds", "answer_loss"),
    *(item.name for kind in (ModelArguments, DataArguments) for item in dataclasses.fields(kind)),
} - {"allow_urls", "attn_implementation", "check_headers", "eval_data", "eval_split", "media_root", "merge_adapter"}
_OPTIMIZER = ("adam_", "learning_rate", "lr_scheduler_", "optim", "warmup_", "weight_decay")  # beginnings of names


class _Loader(yaml.SafeLoader):
    """Reads `1e-5` as a number, as YAML 1.2 does; PyYAML reads text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


class _Parser(HfArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def words_of(file: Path) -> list[str]:
    """Turns a flat YAML file into the words of the same command line. Raises `ConfigError`."""
    words: list[str] = []
    try:
        loader = _Loader(file.read_text(encoding="utf-8"))
        root = loader.get_single_node()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read: {error}.") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"is not YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError("must hold settings, such as `model_name_or_path: ...`.")
    names = [key.value for key, _ in root.value]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"`{twice[0]}` is given twice. Delete one.")
    for name, (_, node) in zip(names, root.value, strict=True):
        if isinstance(node, yaml.MappingNode):
            words.append(f"--{name}={json.dumps(loader.construct_object(node, deep=True))}")
        elif isinstance(node, yaml.SequenceNode):
            words += [f"--{name}", *([str(item.value) for item in node.value] or ["[]"])]
        elif node.tag != "tag:yaml.org,2002:null":
            words.append(f"--{name}={node.value}")
    return words


def read_settings(file: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the file's settings, replaced by those of `overrides`, words of a command line. Raises `ConfigError`."""
    known = {item.name for kind in ARGUMENT_CLASSES for item in dataclasses.fields(kind)}
    prog = "stts-hf train CONFIG"
    parser = _Parser(ARGUMENT_CLASSES, prog=prog, allow_abbrev=False, formatter_class=argparse.HelpFormatter)
    parser.set_defaults(**dict.fromkeys(known))
    for action in parser._actions:  # noqa: SLF001
        if action.dest in SHARES:
            action.type = share
    try:
        found, unknown = parser.parse_known_args([*words_of(Path(file)), *overrides])
        given = {name: value for name, value in vars(found).items() if value not in (None, "null", ["null"])}
        for name in [*given, *(re.sub(r"^--|=.*", "", word).replace("-", "_") for word in unknown[:1])]:
            if name in REFUSED or name not in known:
                advice = did_you_mean(name, known - REFUSED.keys(), "`stts-hf train CONFIG --help` lists them all.")
                raise ConfigError(f"unknown setting `{name}`. {REFUSED.get(name, advice)}")
        for name, value in given.items():
            if value == ["[]"]:
                given[name] = []
            elif name in MAPPINGS and value.startswith("{"):
                given[name] = yaml.load(value, _Loader)  # noqa: S506 - a `SafeLoader`; reads JSON too
    except (ConfigError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: {' '.join(str(error).split())}") from error
    return given


def load_config(file: str | Path, overrides: Sequence[str] = (), *, need_gpu: bool = True) -> TrainConfig:
    """Reads and checks a file, replaced by `overrides`, words. need_gpu: False for plans. Raises `ConfigError`."""
    given = read_settings(file, overrides)
    settings = TRAINING_DEFAULTS | {"disable_tqdm": not sys.stderr.isatty()} | given
    if "per_device_train_batch_size" in settings:  # evaluation rows are as long
        settings.setdefault("per_device_eval_batch_size", settings["per_device_train_batch_size"])
    if not need_gpu and not torch.accelerator.is_available():
        settings["use_cpu"] = True
    try:
        model, data, card, training = HfArgumentParser(ARGUMENT_CLASSES).parse_dict(settings)
        return TrainConfig(model, data, card, training, given, str(file))
    except (ValueError, TypeError, ImportError) as error:
        raise ConfigError(f"{file}: {error}") from error


def check_unchanged(config: TrainConfig, earlier: Path) -> None:
    """Raises `ConfigError` if a setting that a run keeps differs from the file `earlier`; warns without such a file."""
    if not earlier.is_file() or not earlier.stat().st_size:  # a full disk leaves an empty one
        logger.warning(f"{earlier} is missing, so the settings of the earlier run are not checked.")
        return
    try:
        old = _with_defaults(read_settings(earlier))
    except ConfigError as error:
        raise ConfigError(f"--resume: the configuration of the earlier run cannot be read: {error}") from error
    new = _with_defaults(config.given)
    changed = [
        name for name in new if new[name] != old[name] and (name in _KEPT_ON_RESUME or name.startswith(_OPTIMIZER))
    ]
    if changed:
        details = ", ".join(f"`{name}` is {new[name]!r} and was {old[name]!r}" for name in changed)
        raise ConfigError(
            f"{config.source}: {details}, but a resumed run keeps the settings it began with ({earlier}). Put that "
            "back, or begin a new run in another output_dir."
        )


def _with_defaults(given: dict[str, Any]) -> dict[str, Any]:
    """All settings with their defaults filled in, for comparison."""
    defaults = {item.name: item.default for kind in ARGUMENT_CLASSES for item in dataclasses.fields(kind) if item.init}
    settings: dict[str, Any] = defaults | TRAINING_DEFAULTS | given
    rates = PAPER_LEARNING_RATES | {LANGUAGE_MODEL: settings["learning_rate"]} | (settings["learning_rates"] or {})
    return settings | {"learning_rates": rates, "freeze": sorted(settings["freeze"] or ())}


def write_config(config: TrainConfig, output: Path) -> None:
    """Writes the settings, overrides included, to `train_config.yaml` in the output folder, atomically."""
    text = yaml.safe_dump(config.given, sort_keys=False, allow_unicode=True)
    with atomic_file(output / CONFIG_COPY) as file:
        file.write_text(f"# stts-hf {__version__}, of {config.source}\n{text}", encoding="utf-8")
