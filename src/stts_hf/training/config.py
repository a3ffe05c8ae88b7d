"""What `stts-hf train` reads: one YAML file with sections for model, pruning, data, PEFT and training."""

import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from stts_hf.training.arguments import STTSTrainingArguments
from stts_hf.training.parts import ADAPTER, PARTS, check_parts
from stts_hf.training.strict_yaml import BadValue, ConfigError, Tree, build, check_names, convert

# The text model's linear layers alone: `q_proj` or `all-linear` would hit the vision tower and the connector too.
TEXT_LINEAR = r".*language_model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"


@dataclass
class ModelSection:
    """
    path: folder or Hub id of an STTS or stock Molmo2 checkpoint. dtype: of the weights; with `float32` and
    `training.bf16`, matrix products run in bfloat16 and the optimizer keeps full precision. attn_implementation: one
    name, or one for each of `text_config` and `vision_config`. new_scorer: begin with an untrained scorer, drawn from
    `training.seed`, in place of the checkpoint's.
    """

    path: str
    revision: str | None = None
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32"
    attn_implementation: str | dict[str, str] | None = None
    new_scorer: bool = False


@dataclass
class PruningSection:
    """Settings of `STTSVisionConfig` and `STTSConfig`; what is left out stays the checkpoint's."""

    pruning_ratio: float | None = None
    pruning_layer: int | None = None
    selector: Literal["scorer", "cosine", "random"] | None = None
    selector_seed: int | None = None
    score_rescaling: Literal["row", "frame", "none"] | None = None
    packing: Literal["varlen", "first_fit_descending"] | None = None
    refill_single_frame_bins: bool | None = None
    temporal_loss_weight: float | None = None
    detach_temporal_target: bool | None = None
    pruned_position_ids: Literal["original", "compact"] | None = None

    def __post_init__(self) -> None:
        _check_range(self, "pruning_ratio", 0, 1)
        _check_range(self, "temporal_loss_weight", 0, math.inf)
        _check_range(self, "pruning_layer", 0, math.inf)

    def given(self, names: Sequence[str]) -> dict[str, Any]:
        """Those of the fields `names` that were given."""
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclass
class DataSection:
    """
    train, eval: JSONL or Parquet files, a saved data set's folder, or a Hub data set, one or several. split,
    eval_split: of a Hub data set. media_root: where relative paths of videos and images start, by default each data
    file's folder. on_error: what a bad row does. pack_to: tokens after pruning that several samples may share; without
    it, a row holds one sample. max_samples_per_row: most samples of a packed row. max_length: tokens after pruning that
    an unpacked sample may have. pad_to: tokens after pruning that every row is padded to. num_frames, max_fps: frames
    of a video; what is left out stays the checkpoint's. check_headers: open every video and image file before the first
    step; off saves time where they are many, or far away.
    """

    train: str | list[str]
    eval: str | list[str] | None = None
    split: str | None = None
    eval_split: str | None = None
    revision: str | None = None
    media_root: str | None = None
    on_error: Literal["raise", "skip"] = "raise"
    pack_to: int | None = None
    max_samples_per_row: int | None = None
    max_length: int | None = None
    pad_to: int | None = None
    num_frames: int | None = None
    max_fps: float | None = None
    check_headers: bool = True

    def __post_init__(self) -> None:
        for name in ("pack_to", "max_samples_per_row", "max_length", "pad_to", "num_frames"):
            _check_range(self, name, 1, math.inf)
        if self.max_fps is not None and not 0 < self.max_fps < math.inf:
            raise BadValue("max_fps", f"is {self.max_fps}, but must be a number of frames per second above 0.")
        if self.train == []:
            raise BadValue("train", "is an empty list. Name at least one file.")
        if self.pack_to is not None and self.max_length is not None:
            raise BadValue("max_length", "is for unpacked rows. With `pack_to`, that is the limit; leave it out.")
        if self.max_samples_per_row is not None and self.pack_to is None:
            raise BadValue("max_samples_per_row", "is for packed rows. Set `pack_to`.")
        limit = self.pack_to or self.max_length
        if self.pad_to is not None and limit is not None and limit > self.pad_to:
            raise BadValue("pad_to", f"is {self.pad_to}, less than the {limit} tokens that a row may have.")


@dataclass
class PeftSection:
    """
    method: `lora`, or `dora` (a trained magnitude beside it). target_modules: as in PEFT, a pattern or a list of names;
    by default all linear layers of the text model. modules_to_save: modules trained in full and saved with the adapter.
    merge: also save the merged, whole checkpoint, in `merged` under the output folder.
    """

    method: Literal["lora", "dora"] = "lora"
    r: int = 16
    alpha: int = 32
    dropout: float = 0.05
    target_modules: str | list[str] = TEXT_LINEAR
    modules_to_save: list[str] = field(default_factory=lambda: ["scorer"])
    rslora: bool = False
    merge: bool = False

    def __post_init__(self) -> None:
        _check_range(self, "r", 1, math.inf)
        _check_range(self, "alpha", 1, math.inf)
        if not 0 <= self.dropout < 1:
            raise BadValue("dropout", f"is {self.dropout}, but must be a number from 0 up to, not including, 1.")
        if not self.target_modules:
            raise BadValue("target_modules", "names nothing. Leave it out for the text model's linear layers.")


@dataclass
class CompileSection:
    """
    Which parts `torch.compile` gets, and its backend and mode. Worth it with rows of one shape: `data.pad_to`, and
    videos of as many frames.
    """

    vision: bool = True
    decoder: bool = True
    backend: str = "inductor"
    mode: str | None = None

    def __post_init__(self) -> None:
        if not self.vision and not self.decoder:
            raise BadValue(
                "vision", "and `decoder` are both false, so nothing is left to compile. Write `compile: false`."
            )


@dataclass
class CardSection:
    """
    What the card of the trained checkpoint says: heading, Hub id of the base model, Hub ids of the data, licence (the
    source's by default), and words of your own.
    """

    name: str | None = None
    base_model: str | None = None
    datasets: list[str] = field(default_factory=list)
    license: str | None = None
    text: str | None = None


@dataclass
class TrainConfig:
    """
    A whole run. learning_rates, freeze: of parts of the model (`STTSTrainingArguments`). compile: `true` for vision
    tower and text model, or keys of `CompileSection`. training: every option of `TrainingArguments`; `output_dir` is
    needed.
    """

    model: ModelSection
    data: DataSection
    training: dict[str, Any]
    stts: PruningSection = field(default_factory=PruningSection)
    learning_rates: dict[str, float] = field(default_factory=dict)
    freeze: list[str] = field(default_factory=list)
    peft: PeftSection | None = None
    compile: bool | CompileSection = False
    card: CardSection = field(default_factory=CardSection)
    tree: Tree = field(default_factory=lambda: Tree("the configuration"), repr=False)

    def error(self, path: str, problem: object) -> ConfigError:
        """A `ConfigError` about a key of the file."""
        return self.tree.error(path, str(problem))


# What a run wants and `TrainingArguments` does not do by default.
TRAINING_DEFAULTS = {"report_to": "tensorboard", "logging_steps": 10, "logging_first_step": True}
_OWN_SECTIONS = {
    name: f"It stands at the top of the file, not in `training`: `{name}:`." for name in ("learning_rates", "freeze")
}
_TRAINING_HINTS = _OWN_SECTIONS | {
    "resume_from_checkpoint": "Pass --resume on the command line.",
    "hub_token": "Run `hf auth login`, or set HF_TOKEN: this file is kept beside the weights and pushed with them.",
    "parallelism_config": "It is no YAML; use a configuration of `accelerate launch`.",
    "remove_unused_columns": "Leave it out: the collator needs the rows' own columns.",
    "overwrite_output_dir": "Pass --resume to go on with a run, or name another output_dir.",
    "torch_compile": "Use `compile: true` at the top of the file, which compiles what keeps its shape.",
    "use_liger_kernel": "Liger has no kernels for this type of model and would change nothing.",
    "label_smoothing_factor": "The model computes its losses itself, on the shortened sequence.",
}


def load_config(file: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """
    Reads and checks a configuration file; nothing of what it names is opened.

    overrides: `key.path=value` each, in place of what the file says. Raises `ConfigError`, a `ValueError`, that names
    file, line and key.
    """
    tree = Tree.read(file)
    for assignment in overrides:
        tree.set(assignment)
    return parse_config(tree)


def parse_config(tree: Tree) -> TrainConfig:
    """The same for a tree that was read."""
    values = dict(tree.values)
    if "peft" in values and values["peft"] is None and not tree.where("peft").startswith("--set"):
        raise tree.error("peft", "is empty. Write `method: lora` in the line below, or take the key out.")
    for name, value in tree.values.items():
        if value is None and name in ("model", "data", "training"):  # all of it is commented out
            values[name] = {}
        elif value is None and name in ("stts", "learning_rates", "freeze", "card"):
            del values[name]
    _refuse_other_models(tree, values)
    values.setdefault("training", {})
    training = values.pop("training")
    known = [item.name for item in fields(TrainConfig) if item.name != "tree"]
    check_names(tree, "", values, known, dict.fromkeys(training_types(), "It belongs to `training:`."))
    config: TrainConfig = build(TrainConfig, tree, values | {"training": {}})
    config.training = _read_training(tree, training)
    config.tree = tree
    _check_parts(config)
    return config


def training_types() -> dict[str, Any]:
    """Type of every option that `training` may hold."""
    types_of = typing.get_type_hints(STTSTrainingArguments)
    return {
        item.name: types_of[item.name]
        for item in fields(STTSTrainingArguments)
        if item.init and item.name not in _TRAINING_HINTS
    }


def _read_training(tree: Tree, given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise tree.error("training", f"must hold keys and values, not {given!r}.")
    known = training_types()
    check_names(tree, "training", given, list(known), _TRAINING_HINTS)
    if not given.get("output_dir"):
        raise tree.error("training", "must have the key `output_dir`.")
    options = {name: convert(tree, f"training.{name}", value, known[name]) for name, value in given.items()}
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
        if options.get(name, 1) < 1:
            raise tree.error(f"training.{name}", f"is {options[name]}, but must be at least 1.")
    return options


def _refuse_other_models(tree: Tree, values: Mapping[str, Any]) -> None:
    """A configuration of another model or trainer is not a file with many typing errors."""
    kind = values.get("model_type")
    if kind is not None:
        raise tree.error(
            "model_type", f"is {kind!r}: this is the configuration of a model, not of a training. See examples/configs."
        )
    if isinstance(values.get("model"), str):
        raise tree.error(
            "model", f"is {values['model']!r}, but must hold keys: `model:` with `path:` in the line below."
        )


def _check_parts(config: TrainConfig) -> None:
    try:
        check_parts("learning_rates", config.learning_rates, (*PARTS, ADAPTER))
        check_parts("freeze", config.freeze, PARTS)
    except ValueError as error:
        name = "freeze" if str(error).startswith("`freeze`") else "learning_rates"
        raise ConfigError(f"{config.tree.where(name)}{error}") from None
    for part, rate in config.learning_rates.items():
        if not 0 <= rate < math.inf:
            raise config.error(f"learning_rates.{part}", f"is {rate}, but must be a number of at least 0.")
    if config.peft is None and ADAPTER in config.learning_rates:
        raise config.error(f"learning_rates.{ADAPTER}", "is the rate of LoRA weights, but there is no `peft` section.")


def _check_range(section: Any, name: str, low: float, high: float) -> None:
    value = getattr(section, name)
    if value is None or low <= value <= high < math.inf or low <= value < high:
        return
    limits = f"from {low} to {high}" if high < math.inf else f"at least {low} and below inf"
    raise BadValue(name, f"is {value}, but must be {limits}.")
