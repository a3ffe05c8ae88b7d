"""A run from its configuration to the saved checkpoint, with its plan, its card and the push to the Hub."""

import glob
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from transformers import PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import sort_checkpoints

from stts_hf.checkpoints.atomic_folder import atomic_folder
from stts_hf.checkpoints.card import base_model_of, inherited_metadata, write_model_card
from stts_hf.checkpoints.checks import empty_model
from stts_hf.checkpoints.files import belongs, check_links, every_file
from stts_hf.checkpoints.push import PushRefused, refusals
from stts_hf.data.rows import ANSWER
from stts_hf.data.sample_packing import PackedDataset
from stts_hf.keeping import in_words
from stts_hf.model_parts import PARTS
from stts_hf.modeling.settings_stts import PRUNING_FIELDS, TRAINING_FIELDS
from stts_hf.training import build
from stts_hf.training.arguments import ADAPTER, DEPLOYED_RATIOS, learns_answers, rate_keys
from stts_hf.training.build import TrainingSetup
from stts_hf.training.checkpointing import find_checkpoint
from stts_hf.training.config import CONFIG_COPY, TrainConfig, check_unchanged, write_config
from stts_hf.training.losses import LOSSES
from stts_hf.training.trainer import STTSTrainer
from stts_hf.versions import __version__
from stts_hf.video import processors as frames
from stts_hf.wording import percent

MERGED = "merged"


def dry_run(config: TrainConfig) -> str:
    """Checks configuration and rows without loading weights or writing; returns the plan, also of a run for GPUs."""
    run = build.prepare(config)
    with torch.device("meta"):
        model = build.adapt(run, empty_model(run.model_config))
    return describe_run(run, model)


def train(
    config: TrainConfig,
    resume: bool | str = False,
    started: Callable[[Any], None] = lambda model: None,
    begun: Callable[[STTSTrainer], Callable[[Path], None]] = lambda trainer: lambda folder: None,
) -> STTSTrainer:
    """
    Trains, and saves a complete checkpoint, or the adapter, into `output_dir`, with its card and the configuration as
    `train_config.yaml`. Returns the trainer.

    resume: True for the last whole checkpoint in the output folder, or a checkpoint's folder. started: gets the model
    as it is loaded. begun: gets the trainer before the first step, and returns what draws the results into the output
    folder, on the main process, once the model is saved. Raises `ConfigError` and `RowError` before that.
    """
    output = Path(str(config.training.output_dir))
    checkpoint = check_output(config, output, resume)
    run = build.prepare(config)
    model = build.load_model(run)
    started(model)
    run = build.answer_unlabelled(run, model)
    trainer = build.make_trainer(run, model)
    if trainer.is_world_process_zero():
        print(describe_run(run, model), flush=True)
        write_config(config, output)
    draw = begun(trainer)
    trainer.train(resume_from_checkpoint=checkpoint)
    if "eval" in run.rows:
        trainer.evaluate()
    save(run, trainer, output, draw)
    return trainer


def check_output(config: TrainConfig, output: Path, resume: bool | str) -> str | None:
    """Returns the checkpoint to resume from, if any. Raises `ConfigError` for a folder that does not fit."""
    with config.blame("output_dir", f"{str(output)!r} cannot be written"):
        output.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=output).close()
    if not config.model.use_peft and (output / "adapter_config.json").is_file():
        raise config.error("output_dir", f"{str(output)!r} holds an adapter, which would be loaded too. Name another.")
    if config.model.merge_adapter and is_deepspeed_zero3_enabled():
        raise config.error("merge_adapter", "is true, which ZeRO-3 cannot do. Merge with PEFT's `merge_and_unload`.")
    with config.blame("--resume", "is not possible"):
        checkpoint = find_checkpoint(output, resume)
    if checkpoint is not None:
        check_unchanged(config, Path(checkpoint).absolute().parent / CONFIG_COPY)
        return checkpoint
    earlier = [folder for folder in map(Path, sort_checkpoints(str(output))) if (folder / TRAINER_STATE_NAME).is_file()]
    if earlier:
        problem = f"{str(output)!r} holds {earlier[-1].name} of an earlier run."
        raise config.error("output_dir", f"{problem} Pass --resume to continue it, or name another folder.")
    return None


def describe_run(run: TrainingSetup, model: PreTrainedModel) -> str:
    """The plan of a run as a table for the terminal. model: with or without weights."""
    lines = {"model": run.config.model.model_name_or_path} | describe_training(run, model)
    lines["output"] = str(run.arguments.output_dir)
    width = max(map(len, lines)) + 2
    return "\n".join(f"{name + ':':<{width}}{text}" for name, text in lines.items())


def describe_training(run: TrainingSetup, model: PreTrainedModel) -> dict[str, str]:
    """Precision, pruning, parts, data and steps, for plan and card; it names no folder of this machine."""
    arguments, vision = run.arguments, run.model_config.vision_config
    autocast = ", bfloat16 autocast" if arguments.bf16 else ", float16 autocast" if arguments.fp16 else ""
    lines = {
        "precision": f"{run.config.model.dtype} weights{autocast}",
        "pruning": f"{in_words(run.model_config.keep_rule())} after layer {vision.pruning_layer}, {vision.selector}; "
        f"temporal loss x {run.model_config.temporal_loss_weight:g}",
    }
    low, high = (percent(ratio) for ratio in arguments.pruning_ratio_range or DEPLOYED_RATIOS)
    if learns_answers(run.model_config, arguments):
        often = f"{arguments.mask_rounds} times" if arguments.scorer_only else "in every step"
        lines["target"] = (
            f"what blocks are worth to the answers, from {arguments.num_masks} masks a row, drawn {often}, that "
            f"drop {low} to {high}; loss: {arguments.answer_loss}"
        )
    elif arguments.scorer_only:
        lines["loss"] = f"the temporal loss alone; nothing after layer {vision.pruning_layer} of the ViT runs"
    if arguments.pruning_ratio_range and not arguments.scorer_only:
        lines["ratios"] = f"each video drops {low} to {high}"
    rates: Any = arguments.learning_rates
    for part, (total, trained) in count_parameters(model, rates).items():
        share = "" if trained in (0, total) else f"{trained:,} of them "
        lines[part] = f"{total:,} parameters, {share}" + (f"trained at {rates[part]:g}" if trained else "frozen")
    lines |= {name: _describe_rows(run, name) for name in run.rows}
    skipped = [f"{number} rows of {name}" for name, number in run.skipped.items() if number]
    if skipped:
        lines["skipped"] = f"{', '.join(skipped)} (on_error: skip)"
    shown = frames.get_frames(run.processor.video_processor)
    rate = f"{shown['max_fps']:g} per second, " if shown["max_fps"] else ""
    lines["frames"] = f"{rate}at most {shown['num_frames']}"
    steps, epoch = run.count_steps()
    batch, processes = arguments.per_device_train_batch_size, arguments.world_size
    accumulated = arguments.gradient_accumulation_steps
    lines["steps"] = (
        f"{steps} of {batch * processes * accumulated} rows ({batch} a process x {processes} x {accumulated} "
        f"accumulated), {steps / epoch:.3g} epochs"
    )
    scheduler = getattr(arguments.lr_scheduler_type, "value", arguments.lr_scheduler_type)
    lines["schedule"] = f"{scheduler}, {arguments.get_warmup_steps(steps)} steps of warm-up"
    return lines


def _describe_rows(run: TrainingSetup, name: str) -> str:
    rows, table = run.rows[name], run.tables[name]
    marked = sum(mark is not None for mark in table[ANSWER]) if ANSWER in table.column_names else 0
    how = "answered by the unpruned model" if run.needs_answers else "without an answer"
    answered = f", {marked} of them {how}" if marked else ""
    return f"{rows if isinstance(rows, PackedDataset) else f'{len(rows)} samples'}{answered}"


def count_parameters(model: PreTrainedModel, learning_rates: Mapping[str, float]) -> dict[str, tuple[int, int]]:
    """Numbers of all and of trained parameters, by the key of their learning rate."""
    total, trained, keys = Counter[str](), Counter[str](), rate_keys(model, learning_rates)
    for name, parameter in model.named_parameters():
        if "original_module" not in name.split("."):  # PEFT keeps the untrained module beside the trained copy
            total[keys[name]] += parameter.numel()
            trained[keys[name]] += parameter.numel() * parameter.requires_grad
    return {part: (total[part], trained[part]) for part in (*PARTS, ADAPTER) if total[part]}


def save(run: TrainingSetup, trainer: STTSTrainer, output: Path, draw: Callable[[Path], None]) -> None:
    """Saves the trained model or adapter with its card, and the merged model; with `push_to_hub`, pushes them."""
    trainer.save_model(_internal_call=True)
    trainer.save_state()
    if not trainer.is_world_process_zero():
        return
    draw(output)
    write_card(run, trainer, output)
    if run.config.model.use_peft and run.config.model.merge_adapter:
        merge(run, trainer, output)
    if trainer.args.push_to_hub:
        with run.config.blame("push_to_hub", f"could not be done, but the run is saved in {str(output)!r}"):
            push(trainer, output)


def merge(run: TrainingSetup, trainer: STTSTrainer, output: Path) -> None:
    """Saves the base with the adapter merged into it. Reads both anew: the trained model may be sharded."""
    from peft import PeftModel

    merged = PeftModel.from_pretrained(build.load_weights(run), output).merge_and_unload()
    merged = merged.to(merged.dtype)  # the scorer was trained in float32 even if the model has another dtype
    with atomic_folder(output / MERGED, overwrite=True) as folder:
        merged.save_pretrained(folder)
        run.processor.save_pretrained(folder)
        write_card(run, trainer, folder)


def push(trainer: STTSTrainer, output: Path) -> None:
    """Uploads all that belongs to a run in one commit, as `Trainer.push_to_hub` does not. Raises `PushRefused`."""
    trainer._finish_current_push()
    trainer.callback_handler.on_push_begin(trainer.args, trainer.state, trainer.control)
    api, repo_id = HfApi(), str(trainer.hub_model_id)
    others = {CONFIG_COPY, "adapter_config.json"}
    files = {
        name: path
        for name, path in every_file(output).items()
        if name in others or "events.out.tfevents." in name or belongs(name.removeprefix(f"{MERGED}/"))
    }
    if astray := next(check_links(output, files), None):
        raise PushRefused(f"{output} is not pushed: {astray}")
    with refusals(api, repo_id):
        api.upload_folder(
            repo_id=repo_id,
            folder_path=output,
            commit_message="End of training",
            allow_patterns=[glob.escape(name) for name in files],
            revision=trainer.args.hub_revision,
        )


def write_card(run: TrainingSetup, trainer: STTSTrainer, folder: Path) -> None:
    """Writes the card of the checkpoint or adapter in `folder`: base, settings, data, hyperparameters, last losses."""
    card, model = run.config.card, run.config.model
    inherited = inherited_metadata(Path(model.model_name_or_path))
    shown = [f"{kind}{name}" for name in ("loss", *LOSSES) for kind in ("", "eval_")]
    history = trainer.state.log_history
    losses = {name: f"{log[name]:.4g} (step {log['step']})" for log in history for name in shown if name in log}
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
    settings = {f"vision_config.{name}": value for name, value in model.given(PRUNING_FIELDS).items()}
    write_model_card(folder, metadata=inherited, settings=settings | model.given(TRAINING_FIELDS), **details)
