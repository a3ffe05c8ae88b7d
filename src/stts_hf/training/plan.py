"""What a run will do, in words and numbers, before it does it; what its card says afterwards."""

import math
from collections import Counter
from typing import Any

from stts_hf import __version__
from stts_hf.data.sample_packing import PackedDataset
from stts_hf.training.arguments import STTSTrainingArguments
from stts_hf.training.build import TrainingSetup
from stts_hf.training.config import CONFIG_COPY
from stts_hf.training.parts import ADAPTER, PARTS, rate_of


def count_parameters(model: Any, learning_rates: Any) -> dict[str, tuple[int, int]]:
    """
    Parameters of each part, and how many of them are trained. LoRA weights are a part of their own, `adapter`, where
    they have a rate of their own, and else belong to the part they adapt.
    """
    total, trained = Counter[str](), Counter[str]()
    for name, parameter in model.named_parameters():
        if "original_module" not in name.split("."):  # PEFT keeps the untrained module beside the trained copy
            key = rate_of(name, learning_rates)
            total[key] += parameter.numel()
            trained[key] += parameter.numel() * parameter.requires_grad
    return {part: (total[part], trained[part]) for part in (*PARTS, ADAPTER) if total[part]}


def rows_of_batch(arguments: STTSTrainingArguments) -> int:
    """Rows that all processes take at once."""
    return arguments.per_device_train_batch_size * arguments.world_size


def count_steps(run: TrainingSetup) -> tuple[int, int]:
    """
    Optimizer steps of the run and of an epoch. Raises `ConfigError` for a run that would take no step and save what it
    was given.
    """
    arguments, rows, batch = run.arguments, len(run.train_rows), rows_of_batch(run.arguments)
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


def describe_run(run: TrainingSetup, model: Any) -> str:
    """A table of model, parts, data and steps, for reading. model: with weights or without."""
    config, arguments, vision = run.config, run.arguments, run.model_config.vision_config
    lines = {
        "model": f"{config.model.model_name_or_path} ({config.model.dtype})",
        "pruning": f"{vision.pruning_ratio:.0%} after layer {vision.pruning_layer}, {vision.selector}, "
        f"{vision.packing}; temporal loss x {run.model_config.temporal_loss_weight:g}",
    }
    rates: Any = arguments.learning_rates
    for part, (total, trained) in count_parameters(model, rates).items():
        share = "" if trained in (0, total) else f"{trained:,} of them "
        lines[part] = f"{total:,} parameters, {share}" + (f"trained at {rates[part]:g}" if trained else "frozen")
    lines["train"] = _describe_rows(run.train_rows)
    if run.eval_rows is not None:
        strategy = getattr(arguments.eval_strategy, "value", arguments.eval_strategy)
        during = {"steps": f"every {arguments.eval_steps} steps and ", "epoch": "every epoch and "}
        lines["eval"] = f"{_describe_rows(run.eval_rows)}, {during.get(strategy, '')}at the end"
    skipped = [f"{number} rows of {name}" for name, number in run.skipped.items() if number]
    if skipped:
        lines["skipped"] = f"{', '.join(skipped)} (on_error: skip)"
    processor = run.processor.video_processor
    rate = f"{processor.max_fps:g} per second, " if processor.max_fps else ""
    lines["frames"] = f"{rate}at most {processor.num_frames}"
    steps, epoch = count_steps(run)
    lines["steps"] = (
        f"{steps} of {rows_of_batch(arguments) * arguments.gradient_accumulation_steps} rows "
        f"({arguments.per_device_train_batch_size} a process x {arguments.world_size} x "
        f"{arguments.gradient_accumulation_steps} accumulated), {steps / epoch:.3g} epochs"
    )
    lines["schedule"] = _describe_schedule(run)
    lines["output"] = str(arguments.output_dir)
    width = max(map(len, lines)) + 2
    return "\n".join(f"{name + ':':<{width}}{text}" for name, text in lines.items())


def describe_training(run: TrainingSetup, model: Any, steps: int) -> str:
    """What the card of a `model` that was trained for `steps` says of that, in Markdown."""
    config, arguments = run.config, run.arguments
    rates: Any = arguments.learning_rates
    trained = [part for part, (_, number) in count_parameters(model, rates).items() if number]
    autocast = ", bfloat16 autocast" if arguments.bf16 else ", float16 autocast" if arguments.fp16 else ""
    lines = [
        f"Trained with `stts-hf train` ({__version__}); `{CONFIG_COPY}` holds the whole configuration.\n",
        f"- {steps} steps of {rows_of_batch(arguments) * arguments.gradient_accumulation_steps} rows; "
        f"{_describe_rows(run.train_rows)}",
        f"- peak learning rates: {', '.join(f'{part} at {rates[part]:g}' for part in trained)}; schedule: "
        f"{_describe_schedule(run)}",
        f"- loss: task + {run.model_config.temporal_loss_weight:g} x temporal",
        f"- precision: {config.model.dtype} weights{autocast}",
    ]
    if config.card.card_text:
        lines.insert(0, config.card.card_text.strip() + "\n")
    return "\n".join(lines)


def _describe_rows(rows: Any) -> str:
    if isinstance(rows, PackedDataset):
        return (
            f"{rows.num_samples} samples in {len(rows)} rows of up to {rows.budget} tokens after pruning "
            f"({rows.num_samples / len(rows):.2f} a row, {rows.fill_rate:.1%} filled)"
        )
    return f"{len(rows)} samples"


def _describe_schedule(run: TrainingSetup) -> str:
    scheduler: Any = run.arguments.lr_scheduler_type
    warmup = run.arguments.get_warmup_steps(count_steps(run)[0])
    return f"{getattr(scheduler, 'value', scheduler)}, {warmup} steps of warm-up"
