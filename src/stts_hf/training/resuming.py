"""Whether a configuration is that of the run it would go on with."""

from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

from transformers.utils import logging

from stts_hf.training.arguments import PAPER_LEARNING_RATES, STTSTrainingArguments
from stts_hf.training.config import TRAINING_DEFAULTS, TrainConfig, load_config
from stts_hf.training.strict_yaml import ConfigError

logger = logging.get_logger(__name__)

# What a run may change on its way, beside `card` and `compile`: its length, logs, saves, evaluations and speed.
_FREE = {
    "data.eval",
    "data.eval_split",
    "data.media_root",
    "model.attn_implementation",
    "peft.merge",
    "training.bf16_full_eval",
    "training.fp16_full_eval",
    "training.disable_tqdm",
    "training.do_eval",
    "training.do_predict",
    "training.do_train",
    "training.fsdp",
    "training.fsdp_config",
    "training.deepspeed",
    "training.gradient_checkpointing",
    "training.gradient_checkpointing_kwargs",
    "training.greater_is_better",
    "training.load_best_model_at_end",
    "training.max_steps",
    "training.metric_for_best_model",
    "training.num_train_epochs",
    "training.output_dir",
    "training.per_device_eval_batch_size",
    "training.prediction_loss_only",
    "training.project",
    "training.push_to_hub",
    "training.report_to",
    "training.run_name",
    "training.skip_memory_metrics",
    "training.torch_empty_cache_steps",
    "training.use_cpu",
}
_FREE_BEGINNINGS = (
    "training.batch_eval_",
    "training.dataloader_num_workers",
    "training.dataloader_persistent_",
    "training.dataloader_pin_",
    "training.dataloader_prefetch_",
    "training.ddp_",
    "training.eval_",
    "training.hub_",
    "training.include_",
    "training.log_",
    "training.logging_",
    "training.save_",
    "training.trackio_",
)


def check_unchanged(config: TrainConfig, earlier: Path) -> None:
    """
    Raises `ConfigError` that names the keys in which `config` differs from the run that wrote the file `earlier`, those
    apart that concern its length, its logs, saves and evaluations, and its speed. A restored optimizer would ignore
    them, or other data would pass for the rest of the same epoch. Warns where there is no such file.
    """
    if not earlier.is_file():
        logger.warning(f"There is no {earlier}: whether the run is resumed with its own configuration is not known.")
        return
    try:
        old = settings_of(load_config(earlier))
    except ConfigError as error:
        raise ConfigError(f"--resume: the configuration of the earlier run cannot be compared: {error}") from error
    new = settings_of(config)
    changed = [
        key
        for key in new | old
        if key not in _FREE and not key.startswith(_FREE_BEGINNINGS) and new.get(key) != old.get(key)
    ]
    if changed:
        details = ", ".join(f"`{key}` is {new.get(key)!r} and was {old.get(key)!r}" for key in changed)
        raise ConfigError(
            f"{config.tree.where(changed[0])}{details}, but a resumed run goes on with what it began with ({earlier}). "
            "Put that back, or begin a new run in another output_dir."
        )


def settings_of(config: TrainConfig) -> dict[str, Any]:
    """Every setting by its path, defaults included, so that one that is spelled out equals one that is left out."""
    found: dict[str, Any] = {"peft": config.peft is not None, "freeze": sorted(config.freeze)}
    for name in ("model", "data", "stts", "peft"):
        section = getattr(config, name)
        found |= {f"{name}.{key}": value for key, value in (asdict(section) if section else {}).items()}
    rates = PAPER_LEARNING_RATES | config.learning_rates
    found |= {f"learning_rates.{part}": rate for part, rate in rates.items()}
    defaults = {
        item.name: item.default if item.default is not MISSING else None for item in fields(STTSTrainingArguments)
    }
    training = defaults | TRAINING_DEFAULTS | config.training
    return found | {f"training.{key}": value for key, value in training.items()}
