"""A run from its configuration to the saved checkpoint."""

import os
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from stts_hf import __version__
from stts_hf.training.build import make_trainer, prepare
from stts_hf.training.checkpointing import checkpoints_in, last_checkpoint, what_is_missing
from stts_hf.training.config import TrainConfig
from stts_hf.training.export import CONFIG_COPY, save
from stts_hf.training.models import load_model, make_empty_model, upcast_trainable
from stts_hf.training.plan import check_steps, describe_run
from stts_hf.training.resuming import check_unchanged
from stts_hf.training.strict_yaml import ConfigError
from stts_hf.training.trainer import STTSTrainer


def dry_run(config: TrainConfig) -> str:
    """
    Checks configuration and rows as a run does, without loading or writing anything; returns the plan. A configuration
    for GPUs is checked without one.
    """
    run = prepare(config, need_gpu=False)
    check_steps(run)
    return describe_run(run, make_empty_model(run))


def train(config: TrainConfig, resume: bool | str = False) -> STTSTrainer:
    """
    Trains, and saves a complete checkpoint, or the adapter, into `training.output_dir`, with its card and the
    configuration as `train_config.yaml`. Returns the trainer.

    resume: True for the last whole checkpoint in the output folder, or a checkpoint's folder. Raises `ConfigError` and
    `RowError` before the first step for what is known by then.
    """
    output = Path(config.training["output_dir"])
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
        raise config.error("training.output_dir", f"{str(output)!r} is a file, but must be a folder.")
    there = next(folder for folder in (output.absolute(), *output.absolute().parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise config.error(
            "training.output_dir",
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
            "training.output_dir",
            f"{str(output)!r} holds {earlier[-1].name} of an earlier run. Pass --resume to go on with it, or name "
            "another folder.",
        )


def write_config(config: TrainConfig, output: Path) -> None:
    """The configuration that was used, overrides included, into the output folder."""
    text = yaml.safe_dump(config.tree.values, sort_keys=False, allow_unicode=True)
    (output / CONFIG_COPY).write_text(f"# stts-hf {__version__}, of {config.tree.name}\n{text}", encoding="utf-8")
