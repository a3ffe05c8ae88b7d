"""A run from its configuration to the saved checkpoint."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from transformers.utils import logging

from stts_hf import __version__
from stts_hf.training.arguments import PAPER_LEARNING_RATES
from stts_hf.training.build import make_trainer, prepare
from stts_hf.training.checkpointing import checkpoints_in, last_checkpoint, what_is_missing
from stts_hf.training.config import (
    KINDS,
    TRAINING_DEFAULTS,
    ConfigError,
    DataArguments,
    ModelArguments,
    TrainConfig,
    read_settings,
)
from stts_hf.training.export import CONFIG_COPY, save
from stts_hf.training.models import load_model, make_empty_model, upcast_trainable
from stts_hf.training.parts import LANGUAGE_MODEL
from stts_hf.training.plan import check_steps, describe_run
from stts_hf.training.trainer import STTSTrainer

logger = logging.get_logger(__name__)

# What a resumed run must share with the one before: what the restored optimizer and schedule would ignore, and what
# makes the rows ahead those of the same epoch. Of model and data that is all but `_FREE`.
_KEPT = {
    "average_tokens_across_devices",
    "bf16",
    "data_seed",
    "dataloader_drop_last",
    "fp16",
    "freeze",
    "gradient_accumulation_steps",
    "length_column_name",
    "max_grad_norm",
    "neftune_noise_alpha",
    "per_device_train_batch_size",
    "seed",
    "train_sampling_strategy",
    "weight_decay",
}
_KEPT_BEGINNINGS = ("adam_", "learning_rate", "lr_scheduler_", "optim", "warmup_")
_FREE = {"allow_urls", "attn_implementation", "check_headers", "eval_data", "eval_split", "media_root", "merge_adapter"}


def dry_run(config: TrainConfig) -> str:
    """
    Checks configuration and rows as a run does, without loading or writing anything; returns the plan. A configuration
    that was loaded with `need_gpu=False` may be one for GPUs.
    """
    run = prepare(config)
    check_steps(run)
    return describe_run(run, make_empty_model(run))


def train(config: TrainConfig, resume: bool | str = False) -> STTSTrainer:
    """
    Trains, and saves a complete checkpoint, or the adapter, into `output_dir`, with its card and the
    configuration as `train_config.yaml`. Returns the trainer.

    resume: True for the last whole checkpoint in the output folder, or a checkpoint's folder. Raises `ConfigError` and
    `RowError` before the first step for what is known by then.
    """
    output = Path(str(config.training.output_dir))
    check_output(config, output, resume)
    if resume:
        check_unchanged(config, (output if resume is True else Path(resume).absolute().parent) / CONFIG_COPY)
    run = prepare(config)
    check_steps(run)
    model = load_model(run)
    upcast_trainable(run, model)
    trainer = make_trainer(run, model)
    if trainer.is_world_process_zero():
        print(describe_run(run, model), flush=True)
        output.mkdir(parents=True, exist_ok=True)
        write_config(config, output)
    trainer.train(resume_from_checkpoint=resume or None)
    if run.eval_rows is not None:
        trainer.evaluate()
    save(run, trainer, output)
    return trainer


def check_output(config: TrainConfig, output: Path, resume: bool | str) -> None:
    """
    Raises `ConfigError` for a folder that cannot be written, where there is nothing to resume from, and where a run
    would mix with an earlier one.
    """
    if output.exists() and not output.is_dir():
        raise config.error("output_dir", f"{str(output)!r} is a file, but must be a folder.")
    there = next(folder for folder in (output.absolute(), *output.absolute().parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise config.error(
            "output_dir",
            f"{str(output)!r} cannot be written: {str(there)!r} {'forbids it' if there.is_dir() else 'is a file'}.",
        )
    if isinstance(resume, str):
        if not Path(resume).is_dir():
            raise ConfigError(f"--resume {resume}: there is no such checkpoint folder.")
        missing = what_is_missing(Path(resume))
        if missing is not None:
            raise ConfigError(f"--resume {resume}: it is no checkpoint to resume from; {missing}.")
    if resume is True and last_checkpoint(output) is None:
        raise ConfigError(f"--resume: {str(output)!r} holds no whole checkpoint to resume from.")
    earlier = list(checkpoints_in(output).values())
    if resume is False and earlier:
        raise config.error(
            "output_dir",
            f"{str(output)!r} holds {earlier[-1].name} of an earlier run. Pass --resume to continue it, or name "
            "another folder.",
        )


def check_unchanged(config: TrainConfig, earlier: Path) -> None:
    """
    Raises `ConfigError` that names the settings of model, data, optimizer and schedule in which `config` differs from
    the run that wrote the file `earlier`. Warns where there is no such file.
    """
    if not earlier.is_file() or not earlier.stat().st_size:  # a full disk leaves an empty one
        logger.warning(f"{earlier} is missing: whether the run is resumed with its own configuration is not known.")
        return
    try:
        old = _with_defaults(read_settings(earlier))
    except ConfigError as error:
        raise ConfigError(f"--resume: the configuration of the earlier run cannot be compared: {error}") from error
    new = _with_defaults(config.given)
    of_rows = {item.name for kind in (ModelArguments, DataArguments) for item in dataclasses.fields(kind)} - _FREE
    kept = [name for name in new if name in of_rows | _KEPT or name.startswith(_KEPT_BEGINNINGS)]
    changed = [name for name in kept if new[name] != old[name]]
    if changed:
        details = ", ".join(f"`{name}` is {new[name]!r} and was {old[name]!r}" for name in changed)
        raise ConfigError(
            f"{config.source}: {details}, but a resumed run keeps the settings it began with ({earlier}). Put that "
            "back, or begin a new run in another output_dir."
        )


def _with_defaults(given: dict[str, Any]) -> dict[str, Any]:
    """Every setting, so that one that is spelled out equals one that is left out."""
    defaults: dict[str, Any] = {
        item.name: item.default for kind in KINDS for item in dataclasses.fields(kind) if item.init
    }
    settings = defaults | TRAINING_DEFAULTS | given
    rates = PAPER_LEARNING_RATES | {LANGUAGE_MODEL: settings["learning_rate"]}
    return settings | {
        "learning_rates": rates | (settings["learning_rates"] or {}),
        "freeze": sorted(settings["freeze"] or ()),
    }


def write_config(config: TrainConfig, output: Path) -> None:
    """The settings that were used, overrides included, into the output folder: whole, or not at all."""
    text = yaml.safe_dump(config.given, sort_keys=False, allow_unicode=True)
    partial = output / f"_{CONFIG_COPY}"  # `Trainer` pushes nothing that begins with an underscore
    try:
        partial.write_text(f"# stts-hf {__version__}, of {config.source}\n{text}", encoding="utf-8")
        partial.replace(output / CONFIG_COPY)
    finally:
        partial.unlink(missing_ok=True)
