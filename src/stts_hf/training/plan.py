"""What a run does, in words and numbers: shown before it begins, and in its card."""

import math
from collections import Counter
from typing import Any

from stts_hf.data.sample_packing import PackedDataset
from stts_hf.training.arguments import STTSTrainingArguments
from stts_hf.training.build import TrainingSetup
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
    """A table of what the run does and where, for reading. model: with weights or without."""
    lines = {"model": run.config.model.model_name_or_path} | describe_training(run, model)
    lines["output"] = str(run.arguments.output_dir)
    width = max(map(len, lines)) + 2
    return "\n".join(f"{name + ':':<{width}}{text}" for name, text in lines.items())


def describe_training(run: TrainingSetup, model: Any) -> dict[str, str]:
    """Precision, pruning, parts, data and steps, in words; no folder of this machine is among them."""
    arguments, vision = run.arguments, run.model_config.vision_config
    autocast = ", bfloat16 autocast" if arguments.bf16 else ", float16 autocast" if arguments.fp16 else ""
    lines = {
        "precision": f"{run.config.model.dtype} weights{autocast}",
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
    scheduler = getattr(arguments.lr_scheduler_type, "value", arguments.lr_scheduler_type)
    lines["schedule"] = f"{scheduler}, {arguments.get_warmup_steps(steps)} steps of warm-up"
    return lines


def _describe_rows(rows: Any) -> str:
    return str(rows) if isinstance(rows, PackedDataset) else f"{len(rows)} samples"
