"""Checkpoints to resume from, the names of their weights, and the model saved at the end."""

import contextlib
import copy
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import sort_checkpoints
from transformers.utils import logging

from stts_hf.checkpoints.atomic_folder import flush, move_files
from stts_hf.checkpoints.card import CARD

logger = logging.get_logger(__name__)

STAGE = "_saving"  # `Trainer` pushes nothing that begins with an underscore
SCORER = ".scorer."  # in the names of its weights, which end alike in all files


def last_checkpoint(output_dir: str | os.PathLike) -> str | None:
    """Returns the latest whole checkpoint in `output_dir`, or None. Warns of those that were cut off."""
    for folder in reversed(sort_checkpoints(str(output_dir))):
        missing = missing_from(Path(folder))
        if missing is None:
            return folder
        logger.warning(f"Skipping {folder}: {missing}.")
    return None


def find_checkpoint(output_dir: str | os.PathLike, resume: str | bool | None) -> str | None:
    """Returns the checkpoint to `resume` from, None without. Raises `ValueError` if it is not whole."""
    if resume is True:
        resume = last_checkpoint(output_dir)
        if resume is None:
            raise ValueError(f"`output_dir` {str(output_dir)!r} holds no complete checkpoint. Do not ask to resume.")
    elif resume:
        missing = missing_from(Path(resume))
        if missing is not None:
            raise ValueError(f"`resume_from_checkpoint` {str(resume)!r} is not a complete checkpoint: {missing}.")
    return resume or None


def missing_from(checkpoint: Path) -> str | None:
    """Why a checkpoint cannot be resumed, or None. `Trainer` writes `trainer_state.json` last."""
    if not checkpoint.is_dir():
        return "there is no such folder"
    try:
        TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
    except FileNotFoundError:
        return f"it has no {TRAINER_STATE_NAME}, so its save was cut off"
    except (ValueError, TypeError, RecursionError) as error:
        return f"its {TRAINER_STATE_NAME} cannot be read ({error})"
    # `Trainer` silently continues with a fresh optimizer if none is saved. FSDP's is `optimizer.bin` or a folder
    # `optimizer_0`; DeepSpeed's, a folder `global_step3`, has the scheduler in it or beside it.
    kinds = {"optimizer.pt": "optimizer.pt optimizer.bin optimizer_[0-9]*", "scheduler.pt": "scheduler.pt"}
    for name, patterns in kinds.items():
        if not any(any(checkpoint.glob(pattern)) for pattern in ("global_step*", *patterns.split())):
            return f"it has no {name}, which a run needs to continue unchanged (`save_only_model` leaves it out)"
    return None


@contextlib.contextmanager
def staged(folder: Path, is_writer: bool) -> Iterator[Path]:
    """Yields a folder in `folder` to save into; its files move up at the end, the config last."""
    stage = folder / STAGE
    if not is_writer:
        yield stage
        return
    shutil.rmtree(stage, ignore_errors=True)  # of a run that was killed
    stage.mkdir(parents=True)
    try:
        if (folder / CARD).is_file():
            shutil.copy(folder / CARD, stage)  # PEFT writes its data into the card that is there
        yield stage
        flush(stage)
        config = "adapter_config.json" if (stage / "adapter_config.json").is_file() else "config.json"
        move_files(stage, folder, commit_marker=config)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def accept_saved_names(model: PreTrainedModel) -> None:
    """Makes `load_state_dict` take names of saved files too, which `Trainer` passes, and not strictly."""
    model.register_load_state_dict_pre_hook(_rename_saved)


def _rename_saved(model: PreTrainedModel, state_dict: dict[str, torch.Tensor], prefix: str, *_: Any) -> None:
    own = model.state_dict().keys()
    if prefix or not state_dict.keys() - own:
        return
    found: Any = type(model).from_pretrained(
        None, config=copy.deepcopy(model.config), state_dict=dict(state_dict), output_loading_info=True
    )
    renamed, info = found
    # transformers casts to the model's dtype; a scorer that was trained alone is saved in a higher one.
    scorer = {name.rpartition(SCORER)[2]: tensor for name, tensor in state_dict.items() if SCORER in name}
    state_dict.clear()
    for name, tensor in renamed.state_dict().items():
        if name not in info["missing_keys"]:
            state_dict[name] = scorer[name.rpartition(SCORER)[2]] if SCORER in name else tensor
