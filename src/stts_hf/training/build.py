"""Settings, processor, data and trainer from a `TrainConfig`, each checked; its weights are `models.py`'s."""

import copy
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from huggingface_hub.utils import httpx

from stts_hf import register_auto_classes
from stts_hf.checkpoints.push import explain
from stts_hf.data.collator import STTSDataCollator
from stts_hf.data.lengths import measure_lengths
from stts_hf.data.loading import accepts_option, check_rows, load_rows
from stts_hf.data.rows import RowError
from stts_hf.data.sample_packing import PackedDataset
from stts_hf.modeling.configuration_stts import STTSConfig
from stts_hf.modeling.processing_stts import STTSProcessor
from stts_hf.training.arguments import STTSTrainingArguments
from stts_hf.training.config import TRAINING_DEFAULTS, TrainConfig
from stts_hf.training.strict_yaml import ConfigError
from stts_hf.training.trainer import STTSTrainer

VISION_SETTINGS = (  # in the order in which they can be changed one by one
    "selector",
    "selector_seed",
    "pruning_ratio",
    "pruning_layer",
    "score_rescaling",
    "packing",
    "refill_single_frame_bins",
)
MODEL_SETTINGS = ("temporal_loss_weight", "detach_temporal_target", "pruned_position_ids")


@dataclass
class TrainingSetup:
    """All of a run but its weights; `train_rows` and `eval_rows` are data sets for `collator` and `eval_collator`."""

    config: TrainConfig
    arguments: STTSTrainingArguments
    model_config: STTSConfig
    processor: STTSProcessor
    collator: STTSDataCollator
    eval_collator: STTSDataCollator
    train_rows: Any
    eval_rows: Any | None
    skipped: dict[str, int]


def prepare(config: TrainConfig, *, progress: bool = True, need_gpu: bool = True) -> TrainingSetup:
    """
    Everything that can be known before weights are loaded: settings that fit the model, all rows looked at, lengths
    measured where rows are packed. Raises `ConfigError` that names the key, and `RowError` that names the rows.

    need_gpu: False takes settings that only a GPU can carry out where there is none, for plans.
    """
    register_auto_classes()
    arguments = make_arguments(config, need_gpu=need_gpu)
    progress = progress and arguments.process_index == 0
    model_config = load_model_config(config)
    processor = load_processor(config, model_config)
    sources = ["train"] if config.data.eval is None else ["train", "eval"]
    with arguments.main_process_first(desc="reading the data"):  # one process downloads, the others find it
        opened = {name: open_rows(config, name) for name in sources}
    made = {
        name: make_rows(config, name, rows, arguments.seed, model_config, processor, progress)
        for name, rows in opened.items()
    }
    train_rows, eval_rows = made["train"][0], made["eval"][0] if "eval" in made else None
    check_sampling(config, arguments, train_rows)
    skipped = {name: number for name, (_, number) in made.items()}
    data = config.data
    collator = STTSDataCollator(
        processor,
        model_config=model_config,
        on_error=data.on_error,
        replacements=train_rows if data.on_error == "skip" else None,
        max_length=data.pack_to or data.max_length,
        pad_to=data.pad_to,
        return_ids=True,
        always_video=arguments.world_size > 1,
    )
    eval_collator = copy.copy(collator)
    eval_collator.replacements = eval_rows if data.on_error == "skip" else None
    return TrainingSetup(
        config, arguments, model_config, processor, collator, eval_collator, train_rows, eval_rows, skipped
    )


def check_sampling(config: TrainConfig, arguments: STTSTrainingArguments, rows: Any) -> None:
    """Raises `ConfigError` for an order by lengths that the rows do not have: `Trainer` would look for `input_ids`."""
    strategy, column = arguments.train_sampling_strategy, arguments.length_column_name
    by_length = strategy in ("group_by_length", "batch_rebalance")
    if by_length and column not in (getattr(rows, "column_names", None) or ()):
        raise config.error(
            "training.train_sampling_strategy",
            f"is {strategy!r}, but the rows have no column {column!r}. `data.pack_to` fills rows by measured lengths.",
        )


def make_arguments(config: TrainConfig, *, need_gpu: bool = True) -> STTSTrainingArguments:
    """Raises `ConfigError` for what `TrainingArguments` refuses; need_gpu as in `prepare`."""
    given: dict[str, Any] = TRAINING_DEFAULTS | config.training
    if "per_device_train_batch_size" in given:  # rows are as long as they are in training
        given.setdefault("per_device_eval_batch_size", given["per_device_train_batch_size"])
    if not need_gpu and not torch.accelerator.is_available():
        given["use_cpu"] = True
    try:
        arguments = STTSTrainingArguments(
            **given, learning_rates=dict(config.learning_rates) or None, freeze=list(config.freeze)
        )
    except (ValueError, TypeError, ImportError) as error:
        raise ConfigError(f"{config.tree.where('training')}`training`: {error}") from error
    if arguments.eval_strategy != "no" and config.data.eval is None:
        raise config.error("training.eval_strategy", f"is {given['eval_strategy']!r}, but `data.eval` names no rows.")
    return arguments


def load_model_config(config: TrainConfig) -> STTSConfig:
    """The checkpoint's configuration with the run's settings in it. Raises `ConfigError`, for other models' too."""
    model = config.model
    if not Path(model.path).exists() and not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", model.path):
        raise config.error("model.path", f"is {model.path!r}: there is no such folder, and no Hub id looks like that.")
    try:
        found = STTSConfig.from_pretrained(model.path, revision=model.revision or "main")
    except (ValueError, OSError) as error:
        raise config.error("model.path", f"cannot be trained: {error}") from error
    if config.stts.refill_single_frame_bins is False:
        found.vision_config.refill_single_frame_bins = False
    for target, names in ((found.vision_config, VISION_SETTINGS), (found, MODEL_SETTINGS)):
        for name, value in config.stts.given(names).items():
            try:
                setattr(target, name, value)
            except ValueError as error:
                raise config.error(f"stts.{name}", f"does not fit the model: {error}") from error
    return found


def load_processor(config: TrainConfig, model_config: STTSConfig) -> STTSProcessor:
    """The checkpoint's processor with the run's frames. Raises `ConfigError`."""
    model, data = config.model, config.data
    try:
        processor = STTSProcessor.from_pretrained(model.path, revision=model.revision or "main")
    except (ValueError, OSError, TypeError) as error:
        raise config.error("model.path", f"{model.path!r} has no processor that can be used: {error}") from error
    for name in ("num_frames", "max_fps"):
        value = getattr(data, name)
        if value is not None:
            setattr(processor.video_processor, name, value)
    ratio = model_config.vision_config.pruning_ratio
    if ratio < 1:
        processor.video_processor.pruning_ratio = ratio  # what its `test_time_scaling` counts with
    return processor


def open_rows(config: TrainConfig, name: str) -> Any:
    """The rows of `data.<name>` as they are. Raises `ConfigError` where they cannot be loaded."""
    data = config.data
    options = {} if data.revision is None else {"revision": data.revision}
    other = data.train if name == "eval" else data.eval
    if accepts_option(other, "revision") and not accepts_option(getattr(data, name), "revision"):
        options = {}  # it is the other one's
    split = data.eval_split if name == "eval" else data.split
    try:
        return load_rows(getattr(data, name), split=split, media_root=data.media_root, **options)
    except RowError:
        raise
    except (ValueError, OSError) as error:
        raise config.error(f"data.{name}", f"cannot be loaded: {error}") from error


def make_rows(
    config: TrainConfig,
    name: str,
    rows: Any,
    seed: int,
    model_config: STTSConfig,
    processor: STTSProcessor,
    progress: bool = False,
) -> tuple[Any, int]:
    """
    The rows of `data.<name>`, checked and, with `pack_to`, packed; and how many were left out. Raises `ConfigError`
    where none is left and `RowError` where rows are bad.
    """
    data = config.data
    limit = data.pack_to or data.max_length or data.pad_to
    headers = data.check_headers and limit is None  # else `measure_lengths` reads them
    good = check_rows(rows, processor, on_error=data.on_error, headers=headers, progress=progress)
    if not good:
        raise config.error(f"data.{name}", "holds no row that can be used.")
    skipped = len(rows) - len(good)
    if skipped:
        rows = rows.select(good)
    if limit is None:
        return rows, skipped
    lengths = measure_lengths(
        rows, processor, model_config=model_config, max_length=limit, on_error=data.on_error, progress=progress
    )
    usable = [index for index, length in enumerate(lengths) if length is not None]
    if not usable:
        raise config.error(f"data.{name}", f"holds no row of at most {limit} tokens after pruning.")
    skipped += len(rows) - len(usable)
    if data.pack_to is None:
        return rows.select(usable) if len(usable) < len(rows) else rows, skipped
    packed = PackedDataset(
        rows, lengths, data.pack_to, seed=seed, max_samples=data.max_samples_per_row, on_error=data.on_error
    )
    return packed, skipped


def make_trainer(run: TrainingSetup, model: Any) -> STTSTrainer:
    """Raises `ConfigError` for settings that do not fit each other, this machine, its packages or the Hub."""
    try:
        trainer = STTSTrainer(
            model,
            run.arguments,
            data_collator=run.collator,
            eval_collator=run.eval_collator,
            train_dataset=run.train_rows,
            eval_dataset=run.eval_rows,
            processing_class=run.processor,
        )
        trainer.get_optimizer_cls_and_kwargs(run.arguments, model)  # else its package is missed at the first step
    except (ValueError, ImportError, OSError, RuntimeError, httpx.HTTPError) as error:
        api = HfApi()
        hub = explain(error, api, run.arguments.hub_model_id or "the repository") if run.arguments.push_to_hub else None
        if hub is not None:
            raise run.config.error("training.push_to_hub", f"cannot be done: {hub}.") from error
        raise ConfigError(f"{run.config.tree.where('training')}{' '.join(str(error).split())}") from error
    return trainer
