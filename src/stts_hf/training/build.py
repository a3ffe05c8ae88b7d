"""Settings, processor, data and trainer from a `TrainConfig`, each checked; its weights are `models.py`'s."""

import copy
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import StrictDataclassError
from huggingface_hub.utils import httpx

from stts_hf import register_auto_classes
from stts_hf.checkpoints.push import explain
from stts_hf.data.collator import STTSDataCollator
from stts_hf.data.loading import accepts_option, load_rows
from stts_hf.data.preparing import LENGTH, prepare_rows
from stts_hf.data.rows import RowError
from stts_hf.data.sample_packing import PackedDataset
from stts_hf.modeling.configuration_stts import STTSConfig
from stts_hf.modeling.processing_stts import STTSProcessor
from stts_hf.modeling.settings_stts import PRUNING_FIELDS, TRAINING_FIELDS
from stts_hf.training.arguments import STTSTrainingArguments
from stts_hf.training.config import ConfigError, TrainConfig
from stts_hf.training.trainer import STTSTrainer


@dataclass
class TrainingSetup:
    """All of a run but its weights; `train_rows` and `eval_rows` are data sets for `collator` and `eval_collator`."""

    config: TrainConfig
    model_config: STTSConfig
    processor: STTSProcessor
    collator: STTSDataCollator
    eval_collator: STTSDataCollator
    train_rows: Any
    eval_rows: Any | None
    skipped: dict[str, int]

    @property
    def arguments(self) -> STTSTrainingArguments:
        return self.config.training


def prepare(config: TrainConfig, *, progress: bool = True) -> TrainingSetup:
    """
    Everything that can be known before weights are loaded: settings that fit the model, all rows read, lengths measured
    where rows are packed. Raises `ConfigError` that names the setting, and `RowError` that names the rows.
    """
    register_auto_classes()
    arguments = config.training
    progress = progress and arguments.process_index == 0
    model_config = load_model_config(config)
    processor = load_processor(config, model_config)
    sources = ["train"] if not config.data.eval_data else ["train", "eval"]
    with arguments.main_process_first(desc="reading the data"):  # one process downloads, the others find it
        opened = {name: open_rows(config, name) for name in sources}
    made = {name: make_rows(config, name, rows, model_config, processor, progress) for name, rows in opened.items()}
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
        allow_urls=data.allow_urls,
    )
    eval_collator = copy.copy(collator)
    eval_collator.replacements = eval_rows if data.on_error == "skip" else None
    return TrainingSetup(config, model_config, processor, collator, eval_collator, train_rows, eval_rows, skipped)


def check_sampling(config: TrainConfig, arguments: STTSTrainingArguments, rows: Any) -> None:
    """Raises `ConfigError` for an order by lengths that the rows do not have: `Trainer` would look for `input_ids`."""
    strategy, column = arguments.train_sampling_strategy, arguments.length_column_name
    by_length = strategy in ("group_by_length", "batch_rebalance")
    if by_length and column not in (getattr(rows, "column_names", None) or ()):
        raise config.error(
            "train_sampling_strategy",
            f"is {strategy!r}, but the rows have no column {column!r}. `max_length` measures them.",
        )


def load_model_config(config: TrainConfig) -> STTSConfig:
    """The checkpoint's configuration with the run's settings in it. Raises `ConfigError`, for other models' too."""
    path = config.model.model_name_or_path
    if not Path(path).exists() and not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", path):
        raise config.error(
            "model_name_or_path", f"is {path!r}: there is no such folder, and no Hub id looks like that."
        )
    settings = config.model.given((*PRUNING_FIELDS, *TRAINING_FIELDS))
    try:
        return STTSConfig.from_pretrained(path, revision=config.model.model_revision, **settings)
    except (ValueError, OSError, StrictDataclassError) as error:
        raise config.error("model_name_or_path", f"cannot be trained with these settings: {error}") from error


def load_processor(config: TrainConfig, model_config: STTSConfig) -> STTSProcessor:
    """The checkpoint's processor with the run's frames. Raises `ConfigError`."""
    model, data = config.model, config.data
    try:
        processor = STTSProcessor.from_pretrained(model.model_name_or_path, revision=model.model_revision)
    except (ValueError, OSError, TypeError) as error:
        raise config.error(
            "model_name_or_path", f"{model.model_name_or_path!r} has no usable processor: {error}"
        ) from error
    for name in ("num_frames", "max_fps"):
        value = getattr(data, name)
        if value is not None:
            setattr(processor.video_processor, name, value)
    ratio = model_config.vision_config.pruning_ratio
    if ratio < 1:
        processor.video_processor.pruning_ratio = ratio  # what its `test_time_scaling` counts with
    return processor


def open_rows(config: TrainConfig, name: str) -> Any:
    """The rows of `train_data` or `eval_data` as they are. Raises `ConfigError` where they cannot be loaded."""
    data = config.data
    sources, others = (data.train_data, data.eval_data) if name == "train" else (data.eval_data, data.train_data)
    options = {} if data.data_revision is None else {"revision": data.data_revision}
    if others and accepts_option(others, "revision") and not accepts_option(sources, "revision"):
        options = {}  # it is the other one's
    split = data.train_split if name == "train" else data.eval_split
    try:
        return load_rows(sources or [], split=split, media_root=data.media_root, **options)
    except RowError:
        raise
    except (ValueError, OSError) as error:
        raise config.error(f"{name}_data", f"cannot be loaded: {error}") from error


def make_rows(
    config: TrainConfig, name: str, rows: Any, model_config: STTSConfig, processor: STTSProcessor, progress: bool
) -> tuple[Any, int]:
    """
    The rows of `train_data` or `eval_data`, read and rendered and, with `pack_to`, packed; and how many were left out.
    Raises `ConfigError` where none is left and `RowError` where rows are bad.
    """
    data = config.data
    limit = data.pack_to or data.max_length or data.pad_to
    good = prepare_rows(
        rows,
        processor,
        model_config=model_config if limit else None,
        max_length=limit,
        on_error=data.on_error,
        headers=data.check_headers,
        allow_urls=data.allow_urls,
        progress=progress,
    )
    skipped = len(rows) - len(good)
    if not len(good):
        most = f" of at most {limit} tokens after pruning" if limit else ""
        raise config.error(f"{name}_data", f"holds no row that can be used{most}.")
    if data.pack_to is None:
        return good, skipped
    seed, most_samples = config.training.seed, data.max_samples_per_row
    return PackedDataset(good, good[LENGTH], data.pack_to, seed=seed, max_samples=most_samples), skipped


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
            raise run.config.error("push_to_hub", f"cannot be done: {hub}.") from error
        raise ConfigError(f"{run.config.source}: {' '.join(str(error).split())}") from error
    return trainer
