"""What a run leaves behind: weights or adapter, the merged model, their cards, and all of it on the Hub."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi

from stts_hf import __version__
from stts_hf.checkpoints.atomic_folder import atomic_folder
from stts_hf.checkpoints.card import base_model_of, inherited_metadata, write_adapter_card, write_model_card
from stts_hf.checkpoints.push import refusals
from stts_hf.modeling.settings_stts import PRUNING_FIELDS, TRAINING_FIELDS
from stts_hf.training.build import TrainingSetup
from stts_hf.training.models import load_model
from stts_hf.training.plan import describe_rates, describe_schedule, rows_of_step
from stts_hf.training.trainer import STTSTrainer

CONFIG_COPY = "train_config.yaml"
MERGED = "merged"
_SHOWN = ("loss", "task_loss", "temporal_loss", "eval_loss", "eval_task_loss", "eval_temporal_loss")
_NOT_PUSHED = ["_*", "checkpoint-*"]  # as `Trainer` has it


def save(run: TrainingSetup, trainer: STTSTrainer, output: Path) -> None:
    """
    Saves the trained model or adapter with its card, and the merged model, into `output`; then pushes the folder as it
    is where `push_to_hub` says so.
    """
    trainer.save_model(_internal_call=True)
    trainer.save_state()
    if not trainer.is_world_process_zero():
        return
    if run.config.model.use_peft:
        write_card_of_adapter(run, trainer, output)
    else:
        write_card(run, trainer, output)
    if run.config.model.merge_adapter:
        merged: Any = adapted_model(run, trainer, output).merge_and_unload()
        merged = merged.to(merged.dtype)  # the scorer was trained in float32, whatever the model's
        with atomic_folder(output / MERGED, overwrite=True) as folder:
            merged.save_pretrained(folder)
            run.processor.save_pretrained(folder)
            write_card(run, trainer, folder)
    if trainer.args.push_to_hub:
        push(trainer, output)


def push(trainer: STTSTrainer, output: Path) -> None:
    """
    Uploads `output` in one commit. `Trainer.push_to_hub` would save the model again, which a merge has changed, and
    write a card of its own. Raises `PushRefused`.
    """
    trainer._finish_current_push()
    trainer.callback_handler.on_push_begin(trainer.args, trainer.state, trainer.control)
    api, repo_id = HfApi(), str(trainer.hub_model_id)
    with refusals(api, repo_id):
        api.upload_folder(
            repo_id=repo_id,
            folder_path=output,
            commit_message="End of training",
            ignore_patterns=_NOT_PUSHED,
            revision=trainer.args.hub_revision,
        )


def write_card_of_adapter(run: TrainingSetup, trainer: STTSTrainer, folder: Path) -> None:
    """The card of an adapter: what it is put on, settings, data, hyperparameters and last losses."""
    write_adapter_card(folder, settings=changed_settings(run), **_details(run, trainer, _inherited(run)))


def adapted_model(run: TrainingSetup, trainer: STTSTrainer, output: Path) -> Any:
    """
    The trained model with its adapter. Where FSDP2 has it in shards, which one process alone cannot merge, its base
    loaded anew with the adapter that was saved into `output`.
    """
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    if not any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
        return model
    from peft import PeftModel

    plain = replace(run.config.model, use_peft=False, merge_adapter=False)
    training = copy.copy(run.arguments)  # made anew, they would reset accelerate's state
    training.freeze = []
    base = load_model(replace(run, config=replace(run.config, model=plain, training=training)))
    return PeftModel.from_pretrained(base, output)


def write_card(run: TrainingSetup, trainer: STTSTrainer, folder: Path) -> None:
    """The card of a whole checkpoint: settings, data, hyperparameters and last losses."""
    inherited = _inherited(run)
    write_model_card(folder, metadata=inherited, **_details(run, trainer, inherited))


def describe_training(run: TrainingSetup, trainer: STTSTrainer) -> str:
    """What a card says of the training, in Markdown."""
    arguments, config = run.arguments, run.config
    rates = describe_rates(arguments, trainer.accelerator.unwrap_model(trainer.model))
    trained = [f"{part} at {rate}" for part, rate in rates.items()]
    rows = f"{getattr(run.train_rows, 'num_samples', len(run.train_rows))} samples"
    if config.data.pack_to is not None:
        rows += f", packed into {len(run.train_rows)} rows of up to {config.data.pack_to} tokens after pruning"
    lines = [
        f"Trained with `stts-hf train` ({__version__}); `{CONFIG_COPY}` holds the whole configuration.\n",
        f"- {trainer.state.global_step} steps of {rows_of_step(arguments)} rows; {rows}",
        f"- peak learning rates: {', '.join(trained)}; schedule: {describe_schedule(run)}",
        f"- loss: task + {run.model_config.temporal_loss_weight:g} x temporal",
        f"- precision: {config.model.dtype} weights"
        + (", bfloat16 autocast" if arguments.bf16 else ", float16 autocast" if arguments.fp16 else ""),
    ]
    if config.card.card_text:
        lines.insert(0, config.card.card_text.strip() + "\n")
    return "\n".join(lines)


def final_figures(trainer: STTSTrainer) -> dict[str, str]:
    """The losses that were logged last."""
    found: dict[str, str] = {}
    for entry in trainer.state.log_history:
        found |= {name: f"{entry[name]:.4g} (step {entry['step']})" for name in _SHOWN if name in entry}
    return found


def changed_settings(run: TrainingSetup) -> dict[str, Any]:
    """The pruning settings of the run, by their path in the model's config."""
    given = {f"vision_config.{name}": value for name, value in run.config.model.given(PRUNING_FIELDS).items()}
    return given | run.config.model.given(TRAINING_FIELDS)


def _details(run: TrainingSetup, trainer: STTSTrainer, inherited: dict[str, Any]) -> dict[str, Any]:
    """What cards of both kinds say."""
    card = run.config.card
    return {
        "base_model": card.card_base_model or base_model_of(run.config.model.model_name_or_path),
        "name": card.card_name,
        "license": card.card_license or inherited.get("license") or "apache-2.0",
        "datasets": card.card_datasets or [],
        "training": describe_training(run, trainer),
        "figures": final_figures(trainer),
    }


def _inherited(run: TrainingSetup) -> dict[str, Any]:
    return inherited_metadata(Path(run.config.model.model_name_or_path))
