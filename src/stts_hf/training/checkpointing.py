"""Checkpoints, and the model saved at the end, that appear whole or not at all.

`Trainer` writes into `checkpoint-N`, and into the output folder itself, file by file. Here everything is written under
`_saving/` in the output folder, and moves to its place when it is whole. The next run removes what a kill leaves.
"""

import os
import re
import shutil
from pathlib import Path
from typing import Any

from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints
from transformers.utils import logging

from stts_hf.checkpoints.atomic_folder import atomic_folder, flush, move_files, recover
from stts_hf.checkpoints.card import CARD
from stts_hf.checkpoints.tensors import shard_files

logger = logging.get_logger(__name__)

STAGE = "_saving"  # `Trainer` pushes nothing that begins with an underscore
STATE = "trainer_state.json"


class AtomicCheckpointMixin:
    """Goes before `Trainer`: a kill amid the writing of a save leaves what was saved before it loadable."""

    _stage: Path | None = None

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)  # type: ignore[misc]
        return folder if self._stage is None else str(self._stage)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        trainer: Any = self
        run = Path(self._get_output_dir(trial))
        name = f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
        if trainer.args.should_save:
            clear_leftovers(run)
        trainer.accelerator.wait_for_everyone()
        self._stage = run / STAGE
        try:
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
        finally:
            self._stage = None
        staged, final = run / STAGE / name, run / name
        if trainer.state.best_model_checkpoint == str(staged):
            trainer.state.best_model_checkpoint = str(final)
            if trainer.args.should_save:
                trainer.state.save_to_json(str(staged / STATE))
        trainer.accelerator.wait_for_everyone()  # until all processes have written their part
        if trainer.args.should_save:
            publish(staged, final)
            best = trainer.state.best_model_checkpoint
            rotate_checkpoints(str(run), trainer.args.save_total_limit, best, use_mtime=True)
        trainer.accelerator.wait_for_everyone()
        if trainer.args.push_to_hub:
            self._push_from_checkpoint(str(final))

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """The model, into a folder that may hold checkpoints and logs; last its config, without which it is none."""
        trainer: Any = self
        if self._stage is not None or not trainer.args.should_save:
            super()._save(output_dir, state_dict)  # type: ignore[misc]
            return
        folder = Path(output_dir or trainer.args.output_dir)
        clear_leftovers(folder)
        staged = folder / STAGE / "model"
        staged.mkdir(parents=True)
        try:
            if (folder / CARD).is_file():
                shutil.copy(folder / CARD, staged)  # PEFT writes its data into the card that is there
            super()._save(str(staged), state_dict)  # type: ignore[misc]
            flush(staged)
        except BaseException:
            shutil.rmtree(staged.parent, ignore_errors=True)
            raise
        config = "adapter_config.json" if (staged / "adapter_config.json").is_file() else "config.json"
        move_files(staged, folder, commit_marker=config)  # after an error in it, what is left stays there
        shutil.rmtree(staged.parent, ignore_errors=True)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._stage is None:  # else the upload would run on while the folder moves
            super()._push_from_checkpoint(checkpoint_folder)  # type: ignore[misc]


def publish(staged: Path, final: Path) -> None:
    """Moves a whole checkpoint to its place; an earlier one of the same step makes room."""
    with atomic_folder(final, overwrite=True) as folder:
        folder.rmdir()
        os.rename(staged, folder)
    shutil.rmtree(staged.parent, ignore_errors=True)


def clear_leftovers(run: Path) -> None:
    """Removes what a killed run left unfinished in the folder `run`, and puts back what it was replacing."""
    for left in run.glob(f".{PREFIX_CHECKPOINT_DIR}-*.*"):
        recover(run / left.name[1:].partition(".")[0])
    stage = run / STAGE
    for path in stage.iterdir() if stage.is_dir() else ():
        logger.warning(f"Removing {path}, which a killed run left unfinished.")
    shutil.rmtree(stage, ignore_errors=True)


def checkpoints_in(run: Path) -> list[Path]:
    """Checkpoints in the folder `run`, whole or not, by their step; none where there is no such folder."""
    pattern = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-\d+")
    found = [path for path in run.glob("*") if pattern.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


def last_checkpoint(output_dir: str | os.PathLike) -> str | None:
    """
    Path of the latest whole checkpoint in `output_dir`, None where there is none. One that was cut off, as plain
    `Trainer` may leave it, is passed over with a warning.
    """
    for folder in reversed(checkpoints_in(Path(output_dir))):
        missing = what_is_missing(folder)
        if missing is None:
            return str(folder)
        logger.warning(f"Passing over {folder}: {missing}.")
    return None


def find_checkpoint(output_dir: str | os.PathLike, resume: str | bool | None) -> str | None:
    """
    The checkpoint to `resume` from: a named one, or with True the last whole one in `output_dir`; None for neither.
    Raises `ValueError` where it is not whole or not there.
    """
    if resume is True:
        resume = last_checkpoint(output_dir)
        if resume is None:
            raise ValueError(f"`output_dir` {str(output_dir)!r} holds no whole checkpoint to resume from.")
    elif resume:
        missing = what_is_missing(Path(resume))
        if missing is not None:
            raise ValueError(f"`resume_from_checkpoint` {str(resume)!r} is no whole checkpoint: {missing}.")
    return resume or None


def what_is_missing(checkpoint: Path) -> str | None:
    """Why a checkpoint cannot be resumed from, None if it can. `trainer_state.json` is written last."""
    if not checkpoint.is_dir():
        return "there is no such folder"
    try:
        TrainerState.load_from_json(str(checkpoint / STATE))
    except FileNotFoundError:
        return f"it has no {STATE}, so its save was cut off"
    except (ValueError, TypeError, RecursionError) as error:
        return f"its {STATE} cannot be read ({error})"
    for index in checkpoint.glob("*.index.json"):
        try:
            shard_files(index)
        except (ValueError, OSError) as error:
            return f"its weights cannot be read ({error})"
    # `Trainer` silently continues with a fresh optimizer where none is saved. FSDP's is `optimizer.bin` or a folder
    # `optimizer_0`; DeepSpeed's, a folder `global_step3`, has the scheduler in it or beside it.
    kinds = {"optimizer.pt": "optimizer.pt optimizer.bin optimizer_[0-9]*", "scheduler.pt": "scheduler.pt"}
    for name, patterns in kinds.items():
        if not any(any(checkpoint.glob(pattern)) for pattern in ("global_step*", *patterns.split())):
            return f"it has no {name}, which a run needs to continue unchanged (`save_only_model` leaves it out)"
    return None
