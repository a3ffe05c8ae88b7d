"""A run from its configuration to the saved checkpoint, with its plan, its card and the push to the Hub."""

import glob
import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from transformers import PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import sort_checkpoints

from stts_hf.checkpoints.atomic_folder import atomic_folder
from stts_hf.checkpoints.card import base_model_of, inherited_metadata, write_adapter_card, write_model_card
from stts_hf.checkpoints.files import belongs, check_links, every_file
from stts_hf.checkpoints.push import PushRefused, refusals
from stts_hf.data.rows import ANSWER
from stts_hf.data.sample_packing import PackedDataset
from stts_hf.model_parts import PARTS
from stts_hf.modeling.settings_stts import PRUNING_FIELDS, TRAINING_FIELDS
from stts_hf.training.arguments import ADAPTER, rates_of
from stts_hf.training.build import (
    TrainingSetup,
    answer_unlabelled,
    load_model,
    load_weights,
    make_empty_model,
    make_trainer,
    prepare,
    table_of,
)
from stts_hf.training.checkpointing import find_checkpoint
from stts_hf.training.config import CONFIG_COPY, ConfigError, TrainConfig, check_unchanged, write_config
from stts_hf.training.losses import LOSSES
from stts_hf.training.trainer import STTSTrainer
from stts_hf.versions import __version__
from stts_hf.video import processors as frames
from stts_hf.wording import percent

MERGED = "merged"
_SHOWN = [f"{prefix}{name}" for prefix in ("", "eval_") for name in ("loss", *LOSSES)]


def dry_run(config: TrainConfig) -> str:
    """
    Checks configuration and rows as a run does, without loading or writing anything; returns the plan. A configuration
    that was loaded with `need_gpu=False` may be one for GPUs.
    """
    run = prepare(config)
    return describe_run(run, make_empty_model(run))


def train(config: TrainConfig, resume: bool | str = False) -> STTSTrainer:
    """
    Trains, and saves a complete checkpoint, or the adapter, into `output_dir`, with its card and the
    configuration as `train_config.yaml`. Returns the trainer.

    resume: True for the last whole checkpoint in the output folder, or a checkpoint's folder. Raises `ConfigError` and
    `RowError` before the first step for what is known by then.
    """
    output = Path(str(config.training.output_dir))
    checkpoint = check_output(config, output, resume)
    run = prepare(config)
    count_steps(run)
    model = load_model(run)
    trainer = make_trainer(run, model)
    run = answer_unlabelled(run, trainer)
    count_steps(run)
    if trainer.is_world_process_zero():
        print(describe_run(run, model), flush=True)
        output.mkdir(parents=True, exist_ok=True)
        write_config(config, output)
    trainer.train(resume_from_checkpoint=checkpoint)
    if run.eval_rows is not None:
        trainer.evaluate()
    save(run, trainer, output)
    return trainer


def check_output(config: TrainConfig, output: Path, resume: bool | str) -> str | None:
    """
    The checkpoint to resume from, if any. Raises `ConfigError` if the folder cannot be written, there is nothing to
    resume from, or the run would mix with an earlier one.
    """
    there = next(folder for folder in (output.absolute(), *output.absolute().parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        problem = "forbids it" if there.is_dir() else "is a file"
        raise config.error("output_dir", f"{str(output)!r} cannot be written: {str(there)!r} {problem}.")
    try:
        checkpoint = find_checkpoint(output, resume)
    except ValueError as error:
        raise ConfigError(f"--resume: {error}") from error
    if not config.model.use_peft and (output / "adapter_config.json").is_file():
        raise config.error("output_dir", f"{str(output)!r} holds an adapter, which would be loaded too. Name another.")
    if config.model.merge_adapter and is_deepspeed_zero3_enabled():
        raise config.error("merge_adapter", "is true, which ZeRO-3 cannot do. Merge with PEFT's `merge_and_unload`.")
    earlier = [folder for folder in map(Path, sort_checkpoints(str(output))) if (folder / TRAINER_STATE_NAME).is_file()]
    if checkpoint is not None:
        check_unchanged(config, Path(checkpoint).absolute().parent / CONFIG_COPY)
    elif earlier:
        raise config.error(
            "output_dir",
            f"{str(output)!r} holds {earlier[-1].name} of an earlier run. Pass --resume to continue it, or name "
            "another folder.",
        )
    return checkpoint


def count_steps(run: TrainingSetup) -> tuple[int, int]:
    """
    Optimizer steps of the run and of an epoch. Raises `ConfigError` if there would be none.
    """
    arguments, rows = run.arguments, len(run.train_rows)
    batch = arguments.per_device_train_batch_size * arguments.world_size
    batches = rows // batch if arguments.dataloader_drop_last else math.ceil(rows / batch)
    if not batches:
        raise run.config.error(
            "dataloader_drop_last",
            f"leaves nothing of {rows} rows in batches of {batch}. Take it out, or make `per_device_train_batch_size` "
            "smaller.",
        )
    epoch = math.ceil(batches / arguments.gradient_accumulation_steps)
    steps = arguments.max_steps if arguments.max_steps > 0 else math.ceil(arguments.num_train_epochs * epoch)
    if not steps:
        raise run.config.error("num_train_epochs", "is 0, so there would be no step. Set it or `max_steps`.")
    return steps, epoch


def describe_run(run: TrainingSetup, model: PreTrainedModel) -> str:
    """A table of what the run does and where, for reading. model: with weights or without."""
    lines = {"model": run.config.model.model_name_or_path} | describe_training(run, model)
    lines["output"] = str(run.arguments.output_dir)
    width = max(map(len, lines)) + 2
    return "\n".join(f"{name + ':':<{width}}{text}" for name, text in lines.items())


def describe_training(run: TrainingSetup, model: PreTrainedModel) -> dict[str, str]:
    """Precision, pruning, parts, data and steps, in words; no folder of this machine is among them."""
    arguments, vision = run.arguments, run.model_config.vision_config
    autocast = ", bfloat16 autocast" if arguments.bf16 else ", float16 autocast" if arguments.fp16 else ""
    lines = {
        "precision": f"{run.config.model.dtype} weights{autocast}",
        "pruning": f"{percent(vision.pruning_ratio)} after layer {vision.pruning_layer}, {vision.selector}, "
        f"{vision.packing}; temporal loss x {run.model_config.temporal_loss_weight:g}",
    }
    if arguments.distillation_weight:
        lines["matching"] = (
            f"the unpruned model's outputs x {arguments.distillation_weight:g}, "
            f"temperature {arguments.distillation_temperature:g}"
        )
    if arguments.temporal_loss_only:
        lines["loss"] = f"the temporal loss alone; nothing after layer {vision.pruning_layer} of the ViT runs"
    rates: Any = arguments.learning_rates
    for part, (total, trained) in count_parameters(model, rates).items():
        share = "" if trained in (0, total) else f"{trained:,} of them "
        lines[part] = f"{total:,} parameters, {share}" + (f"trained at {rates[part]:g}" if trained else "frozen")
    lines["train"] = _describe_rows(run, run.train_rows)
    if run.eval_rows is not None:
        strategy = getattr(arguments.eval_strategy, "value", arguments.eval_strategy)
        during = {"steps": f"every {arguments.eval_steps} steps and ", "epoch": "every epoch and "}
        lines["eval"] = f"{_describe_rows(run, run.eval_rows)}, {during.get(strategy, '')}at the end"
    skipped = [f"{number} rows of {name}" for name, number in run.skipped.items() if number]
    if skipped:
        lines["skipped"] = f"{', '.join(skipped)} (on_error: skip)"
    shown = frames.get_frames(run.processor.video_processor)
    rate = f"{shown['max_fps']:g} per second, " if shown["max_fps"] else ""
    lines["frames"] = f"{rate}at most {shown['num_frames']}"
    steps, epoch = count_steps(run)
    batch, processes = arguments.per_device_train_batch_size, arguments.world_size
    accumulated = arguments.gradient_accumulation_steps
    lines["steps"] = (
        f"{steps} of {batch * processes * accumulated} rows ({batch} a process x {processes} x {accumulated} "
        f"accumulated), {steps / epoch:.3g} epochs"
    )
    scheduler = getattr(arguments.lr_scheduler_type, "value", arguments.lr_scheduler_type)
    lines["schedule"] = f"{scheduler}, {arguments.get_warmup_steps(steps)} steps of warm-up"
    return lines


def _describe_rows(run: TrainingSetup, rows: Any) -> str:
    table = table_of(rows)
    own = sum(mark is not None for mark in table[ANSWER]) if ANSWER in table.column_names else 0
    how = "without an answer" if run.arguments.temporal_loss_only else "answered by the unpruned model"
    answered = f", {own} of them {how}" if own else ""
    return f"{rows if isinstance(rows, PackedDataset) else f'{len(rows)} samples'}{answered}"


def count_parameters(model: PreTrainedModel, learning_rates: Any) -> dict[str, tuple[int, int]]:
    """
    Numbers of all and of trained parameters, by part. LoRA weights are the part `adapter` if that has a rate, and else
    belong to the part they adapt.
    """
    total, trained, keys = Counter[str](), Counter[str](), rates_of(model, learning_rates)
    for name, parameter in model.named_parameters():
        if "original_module" not in name.split("."):  # PEFT keeps the untrained module beside the trained copy
            total[keys[name]] += parameter.numel()
            trained[keys[name]] += parameter.numel() * parameter.requires_grad
    return {part: (total[part], trained[part]) for part in (*PARTS, ADAPTER) if total[part]}


def save(run: TrainingSetup, trainer: STTSTrainer, output: Path) -> None:
    """
    Saves the trained model or adapter with its card, and the merged model, into `output`; then pushes the folder as it
    is where `push_to_hub` says so.
    """
    trainer.save_model(_internal_call=True)
    trainer.save_state()
    if not trainer.is_world_process_zero():
        return
    write_card(run, trainer, output)
    if run.config.model.merge_adapter:
        merge(run, trainer, output)
    if trainer.args.push_to_hub:
        push(trainer, output)


def merge(run: TrainingSetup, trainer: STTSTrainer, output: Path) -> None:
    """
    Saves the base with the adapter in `output` merged into it. Both are read anew: the trained model may lie in shards
    on several processes, and stays as it is.
    """
    from peft import PeftModel

    merged: Any = PeftModel.from_pretrained(load_weights(run), output).merge_and_unload()
    merged = merged.to(merged.dtype)  # the scorer was trained in float32, whatever the model's
    with atomic_folder(output / MERGED, overwrite=True) as folder:
        merged.save_pretrained(folder)
        run.processor.save_pretrained(folder)
        write_card(run, trainer, folder)


def push(trainer: STTSTrainer, output: Path) -> None:
    """
    Uploads the model or adapter in `output`, the merged model, the configuration and TensorBoard's logs in one commit,
    with the card; `Trainer.push_to_hub` would save the model again, write another card, and push whatever else lies in
    the folder. Raises `PushRefused`.
    """
    trainer._finish_current_push()
    trainer.callback_handler.on_push_begin(trainer.args, trainer.state, trainer.control)
    api, repo_id = HfApi(), str(trainer.hub_model_id)
    goes = {name: path for name, path in every_file(output).items() if _goes_to_hub(name)}
    if astray := next(check_links(output, goes), None):
        raise PushRefused(f"{output} is not pushed: {astray}")
    with refusals(api, repo_id):
        api.upload_folder(
            repo_id=repo_id,
            folder_path=output,
            commit_message="End of training",
            allow_patterns=[glob.escape(name) for name in goes],
            revision=trainer.args.hub_revision,
        )


def _goes_to_hub(name: str) -> bool:
    """Whether `push` uploads the file of this path in the output folder."""
    own = (CONFIG_COPY, "adapter_config.json")
    return name in own or "events.out.tfevents." in name or belongs(name.removeprefix(f"{MERGED}/"))


def write_card(run: TrainingSetup, trainer: STTSTrainer, folder: Path) -> None:
    """The card of the checkpoint or adapter in `folder`: base, settings, data, hyperparameters and last losses."""
    card, model = run.config.card, run.config.model
    inherited = inherited_metadata(Path(model.model_name_or_path))
    losses: dict[str, str] = {}
    for entry in trainer.state.log_history:
        losses |= {name: f"{entry[name]:.4g} (step {entry['step']})" for name in _SHOWN if name in entry}
    plan = describe_training(run, trainer.accelerator.unwrap_model(trainer.model))
    training = [f"Trained with `stts-hf train` ({__version__}); `{CONFIG_COPY}` holds the whole configuration.", ""]
    if card.card_text:
        training = [card.card_text.strip(), "", *training]
    details: dict[str, Any] = {
        "base_model": card.card_base_model or base_model_of(model.model_name_or_path),
        "name": card.card_name,
        "license": card.card_license or inherited.get("license") or "apache-2.0",
        "datasets": card.card_datasets or [],
        "training": "\n".join([*training, *(f"- {name}: {text}" for name, text in plan.items())]),
        "figures": losses,
    }
    if (folder / "adapter_config.json").is_file():
        settings = {f"vision_config.{name}": value for name, value in model.given(PRUNING_FIELDS).items()}
        write_adapter_card(folder, settings=settings | model.given(TRAINING_FIELDS), **details)
    else:
        write_model_card(folder, metadata=inherited, **details)
