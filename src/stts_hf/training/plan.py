"""What a run will do, in words and numbers, before it does it."""

import math
from typing import Any

from stts_hf.data.sample_packing import PackedDataset
from stts_hf.training.arguments import STTSTrainingArguments
from stts_hf.training.build import TrainingSetup
from stts_hf.training.parts import ADAPTER, PARTS, is_adapter, part_of


def count_parameters(model: Any) -> dict[str, tuple[int, int]]:
    """Parameters of each part, and how many of them are trained; LoRA weights count as the part `adapter`."""
    counts = dict.fromkeys((*PARTS, ADAPTER), (0, 0))
    for name, parameter in model.named_parameters():
        key = ADAPTER if is_adapter(name) else part_of(name)
        if "original_module" in name.split("."):  # PEFT keeps the untrained module beside the trained copy
            continue
        total, trained = counts[key]
        counts[key] = total + parameter.numel(), trained + parameter.numel() * parameter.requires_grad
    return {part: count for part, count in counts.items() if count[0]}


def rows_of_batch(arguments: STTSTrainingArguments) -> int:
    """Rows that all processes take at once."""
    return arguments.per_device_train_batch_size * arguments.world_size


def rows_of_step(arguments: STTSTrainingArguments) -> int:
    """Rows of an optimizer step, over all processes and accumulated batches."""
    return rows_of_batch(arguments) * arguments.gradient_accumulation_steps


def describe_rates(arguments: STTSTrainingArguments, model: Any) -> dict[str, str]:
    """Peak learning rate of each part that is trained, for reading; an adapter's are its parts', or its own."""
    given: Any = arguments.learning_rates
    rates: dict[str, dict[str, float]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            part, key = part_of(name), ADAPTER if is_adapter(name) else part_of(name)
            rates.setdefault(key, {})[part] = given.get(key, given[part])
    described: dict[str, str] = {}
    for key in (*PARTS, ADAPTER):
        if of_parts := rates.get(key):
            single = len(set(of_parts.values())) == 1
            texts = [f"{of_parts[part]:g}" + ("" if single else f" ({part})") for part in PARTS if part in of_parts]
            described[key] = texts[0] if single else ", ".join(texts)
    return described


def describe_schedule(run: TrainingSetup) -> str:
    """Its name and its warm-up, for reading."""
    scheduler: Any = run.arguments.lr_scheduler_type
    warmup = run.arguments.get_warmup_steps(count_steps(run)[0])
    return f"{getattr(scheduler, 'value', scheduler)}, {warmup} steps of warm-up"


def count_steps(run: TrainingSetup) -> tuple[int, int]:
    """Optimizer steps of the run and of an epoch."""
    arguments, rows, batch = run.arguments, len(run.train_rows), rows_of_batch(run.arguments)
    batches = rows // batch if arguments.dataloader_drop_last else math.ceil(rows / batch)
    epoch = math.ceil(batches / arguments.gradient_accumulation_steps)
    return arguments.max_steps if arguments.max_steps > 0 else math.ceil(arguments.num_train_epochs * epoch), epoch


def check_steps(run: TrainingSetup) -> None:
    """Raises `ConfigError` for a run that would take no step and save what it was given."""
    steps, epoch = count_steps(run)
    if not epoch:
        raise run.config.error(
            "dataloader_drop_last",
            f"leaves nothing of {len(run.train_rows)} rows in batches of {rows_of_batch(run.arguments)}. Take it out, "
            "or make `per_device_train_batch_size` smaller.",
        )
    if not steps:
        raise run.config.error("num_train_epochs", "is 0, so there would be no step. Set it or `max_steps`.")


def describe_run(run: TrainingSetup, model: Any) -> str:
    """A table of model, parts, data and steps, for reading. model: with weights or without."""
    config, arguments, vision = run.config, run.arguments, run.model_config.vision_config
    lines = [
        ("model", f"{config.model.model_name_or_path} ({config.model.dtype})"),
        (
            "pruning",
            f"{vision.pruning_ratio:.0%} after layer {vision.pruning_layer}, {vision.selector}, {vision.packing}; "
            f"temporal loss x {run.model_config.temporal_loss_weight:g}",
        ),
    ]
    rates = describe_rates(arguments, model)
    for part, (total, trained) in count_parameters(model).items():
        if not trained:
            status = "frozen"
        else:
            share = "" if trained == total else f"{_number(trained)} of them "
            status = f"{share}trained at {rates[part]}"
        lines.append((part, f"{_number(total)} parameters, {status}"))
    lines.append(("train", _describe_rows(run.train_rows)))
    if run.eval_rows is not None:
        lines.append(("eval", f"{_describe_rows(run.eval_rows)}, {_describe_evaluations(arguments)}"))
    skipped = [f"{number} rows of {name}" for name, number in run.skipped.items() if number]
    if skipped:
        lines.append(("skipped", f"{', '.join(skipped)} (on_error: skip)"))
    processor = run.processor.video_processor
    rate = f"{processor.max_fps:g} per second, " if processor.max_fps else ""
    lines.append(("frames", f"{rate}at most {processor.num_frames}"))
    steps, epoch = count_steps(run)
    lines.append(
        (
            "steps",
            f"{steps} of {rows_of_step(arguments)} rows ({arguments.per_device_train_batch_size} a process x "
            f"{arguments.world_size} x {arguments.gradient_accumulation_steps} accumulated), "
            f"{steps / epoch:.3g} epochs",
        )
    )
    lines.append(("schedule", describe_schedule(run)))
    lines.append(("output", str(arguments.output_dir)))
    width = max(len(name) for name, _ in lines) + 2
    return "\n".join(f"{name + ':':<{width}}{text}" for name, text in lines)


def _describe_rows(rows: Any) -> str:
    if isinstance(rows, PackedDataset):
        return (
            f"{rows.num_samples} samples in {len(rows)} rows of up to {rows.budget} tokens after pruning "
            f"({rows.num_samples / len(rows):.2f} a row, {rows.fill_rate:.1%} filled)"
        )
    return f"{len(rows)} rows"


def _describe_evaluations(arguments: Any) -> str:
    strategy = getattr(arguments.eval_strategy, "value", arguments.eval_strategy)
    every = {"steps": f"every {arguments.eval_steps:g} steps", "epoch": "every epoch"} if strategy != "no" else {}
    when = f"{every[strategy]} and at the end" if strategy in every else "at the end alone"
    if not arguments.load_best_model_at_end:
        return when
    return f"{when}; the checkpoint with the best {arguments.metric_for_best_model} is what is saved"


def _number(count: int) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)
