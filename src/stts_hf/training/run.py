"""A run from its configuration to the saved checkpoint."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from stts_hf import __version__
from stts_hf.hub.adapter_card import write_adapter_card
from stts_hf.hub.card import inherited_metadata, write_model_card
from stts_hf.modeling.card_stts import base_model_of
from stts_hf.training.build import (
    MODEL_SETTINGS,
    VISION_SETTINGS,
    Run,
    keep_precision,
    load_model,
    make_empty_model,
    make_trainer,
    prepare,
)
from stts_hf.training.checkpointing import last_checkpoint
from stts_hf.training.config import TrainConfig
from stts_hf.training.plan import count_parameters, count_steps, describe_run
from stts_hf.training.strict_yaml import ConfigError
from stts_hf.training.trainer import STTSTrainer

CONFIG_COPY = "train_config.yaml"
MERGED = "merged"
_SHOWN = ("loss", "task_loss", "temporal_loss", "eval_loss", "eval_task_loss", "eval_temporal_loss")


def dry_run(config: TrainConfig) -> str:
    """Checks configuration and rows as a run does, without loading or writing anything; returns the plan."""
    run = prepare(config)
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
    run = prepare(config)
    model = load_model(run)
    keep_precision(run, model)
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
    """Raises `ConfigError` where there is nothing to resume from, and where a run would mix with an earlier one."""
    if output.exists() and not output.is_dir():
        raise config.error("training.output_dir", f"{str(output)!r} is a file, but must be a folder.")
    if isinstance(resume, str) and not Path(resume).is_dir():
        raise ConfigError(f"--resume {resume}: there is no such checkpoint folder.")
    if resume is True and last_checkpoint(output) is None:
        raise ConfigError(f"--resume: {str(output)!r} holds no whole checkpoint to resume from.")
    if resume is False and output.is_dir():
        earlier = [p.name for p in output.iterdir() if re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-\d+", p.name)]
        if earlier:
            raise config.error(
                "training.output_dir",
                f"{str(output)!r} holds {sorted(earlier)[-1]} of an earlier run. Pass --resume to go on with it, or "
                "name another folder.",
            )


def write_config(config: TrainConfig, output: Path) -> None:
    """The configuration that was used, overrides included, into the output folder."""
    text = yaml.safe_dump(config.tree.values, sort_keys=False, allow_unicode=True)
    (output / CONFIG_COPY).write_text(f"# stts-hf {__version__}, of {config.tree.name}\n{text}", encoding="utf-8")


def save(run: Run, trainer: STTSTrainer, output: Path) -> None:
    """Saves the trained model or adapter with its card, and pushes it where `training.push_to_hub` says so."""
    trainer.save_model(_internal_call=True)
    trainer.save_state()
    if trainer.args.push_to_hub:  # writes a card of its own, with the same settings
        trainer.push_to_hub(dataset=run.config.card.datasets or None)
    if not trainer.is_world_process_zero():
        return
    peft = run.config.peft
    if peft is None:
        if not trainer.args.push_to_hub:
            write_card(run, trainer, output)
        return
    write_adapter_card(
        output,
        base_model=run.config.card.base_model or base_model_of(run.config.model.path),
        name=run.config.card.name,
        license=_license(run),
        datasets=run.config.card.datasets,
        training=describe_training(run, trainer),
        figures=final_figures(trainer),
        settings=changed_settings(run),
    )
    if peft.merge:
        merged: Any = adapted_model(run, trainer, output).merge_and_unload()
        merged = merged.to(merged.dtype)  # the scorer was trained in float32, whatever the model's
        merged.save_pretrained(output / MERGED)
        run.processor.save_pretrained(output / MERGED)
        write_card(run, trainer, output / MERGED)


def adapted_model(run: Run, trainer: STTSTrainer, output: Path) -> Any:
    """
    The trained model with its adapter. Where FSDP2 has it in shards, which one process alone cannot merge, its base
    loaded anew with the adapter that was saved into `output`.
    """
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    if not any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
        return model
    from peft import PeftModel

    base = load_model(replace(run, config=replace(run.config, peft=None, freeze=[], compile=False)))
    return PeftModel.from_pretrained(base, output)


def write_card(run: Run, trainer: STTSTrainer, folder: Path) -> None:
    """The card of a whole checkpoint: settings, data, hyperparameters and last losses."""
    card, path = run.config.card, run.config.model.path
    write_model_card(
        folder,
        base_model=card.base_model or base_model_of(path),
        name=card.name,
        license=_license(run),
        datasets=card.datasets,
        training=describe_training(run, trainer),
        figures=final_figures(trainer),
        metadata=inherited_metadata(Path(path)),
    )


def describe_training(run: Run, trainer: STTSTrainer) -> str:
    """What a card says of the training, in Markdown."""
    arguments, config = run.arguments, run.config
    rates: Any = arguments.learning_rates
    counts = count_parameters(trainer.accelerator.unwrap_model(trainer.model))
    trained = [f"{part} at {rates.get(part, rates['language_model']):g}" for part, (_, n) in counts.items() if n]
    batch = arguments.per_device_train_batch_size * arguments.world_size * arguments.gradient_accumulation_steps
    rows = f"{getattr(run.train_rows, 'num_samples', len(run.train_rows))} samples"
    if config.data.pack_to is not None:
        rows += f", packed into {len(run.train_rows)} rows of up to {config.data.pack_to} tokens after pruning"
    scheduler: Any = arguments.lr_scheduler_type
    steps, _ = count_steps(run)
    lines = [
        f"Trained with `stts-hf train` ({__version__}); `{CONFIG_COPY}` holds the whole configuration.\n",
        f"- {trainer.state.global_step} steps of {batch} rows; {rows}",
        f"- peak learning rates: {', '.join(trained)}; {getattr(scheduler, 'value', scheduler)} schedule, "
        f"{arguments.get_warmup_steps(steps)} steps of warm-up",
        f"- loss: task + {run.model_config.temporal_loss_weight:g} x temporal",
        f"- precision: {config.model.dtype} weights"
        + (", bfloat16 autocast" if arguments.bf16 else ", float16 autocast" if arguments.fp16 else ""),
    ]
    if config.card.text:
        lines.insert(0, config.card.text.strip() + "\n")
    return "\n".join(lines)


def final_figures(trainer: STTSTrainer) -> dict[str, str]:
    """The losses that were logged last."""
    found: dict[str, str] = {}
    for entry in trainer.state.log_history:
        found |= {name: f"{entry[name]:.4g} (step {entry['step']})" for name in _SHOWN if name in entry}
    return found


def changed_settings(run: Run) -> dict[str, Any]:
    """The pruning settings of the run, by their path in the model's config."""
    given = {f"vision_config.{name}": value for name, value in run.config.stts.given(VISION_SETTINGS).items()}
    return given | run.config.stts.given(MODEL_SETTINGS)


def _license(run: Run) -> str | None:
    inherited = inherited_metadata(Path(run.config.model.path))
    return run.config.card.license or inherited.get("license") or "apache-2.0"
