"""Checkpoints that are there whole or not at all.

`Trainer` writes into `checkpoint-N` file by file. Here everything is written under `_saving/` in the output folder, and
the folder moves to its place when it is whole. What a kill leaves under `_saving/` the next run finishes or removes.
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints
from transformers.utils import logging

logger = logging.get_logger(__name__)

STAGE = "_saving"  # `Trainer` pushes nothing that begins with an underscore
WHOLE = "whole-"
STATE = "trainer_state.json"


class AtomicCheckpointMixin:
    """Goes before `Trainer`: a kill at any moment leaves the last checkpoint loadable."""

    _stage: Path | None = None
    _push_later = False

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)  # type: ignore[misc]
        return folder if self._stage is None else str(self._stage)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        trainer: Any = self
        run = Path(self._get_output_dir(trial))
        name = f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
        if trainer.args.should_save:
            finish_or_clear(run)
        trainer.accelerator.wait_for_everyone()
        self._stage, self._push_later = run / STAGE, False
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
        if self._push_later:
            self._push_from_checkpoint(str(final))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._stage is not None:  # the upload runs on while the folder moves
            self._push_later = True
        else:
            super()._push_from_checkpoint(checkpoint_folder)  # type: ignore[misc]


def publish(staged: Path, final: Path) -> None:
    """Moves a whole checkpoint to its place; an earlier one of the same step makes room."""
    whole = staged.with_name(WHOLE + staged.name)
    os.rename(staged, whole)  # from here on, a kill leaves something to finish
    move_in(whole, final)


def move_in(whole: Path, final: Path) -> None:
    """Second half of `publish`, which may be done again after a kill at any point of it."""
    if final.exists():
        os.rename(final, whole.with_name(f"old-{final.name}"))
    os.rename(whole, final)
    shutil.rmtree(whole.parent, ignore_errors=True)


def finish_or_clear(run: Path) -> None:
    """Moves in the whole checkpoints that a killed run left in the folder `run`, and removes what was not whole."""
    stage = run / STAGE
    if not stage.is_dir():
        return
    left = sorted(path.name for path in stage.iterdir())
    for name in left:
        if name.startswith(WHOLE):
            logger.warning(f"Finishing the save of {name.removeprefix(WHOLE)}, which was killed when it was whole.")
            shutil.rmtree(stage / f"old-{name.removeprefix(WHOLE)}", ignore_errors=True)
            move_in(stage / name, run / name.removeprefix(WHOLE))
        elif not name.startswith("old-"):
            logger.warning(f"Removing {stage / name}, which a killed run left unfinished.")
    shutil.rmtree(stage, ignore_errors=True)


def checkpoints_in(run: Path) -> dict[int, Path]:
    """Checkpoints in the folder `run`, whole or not, by their step, in order; none where there is no such folder."""
    steps = {}
    for path in run.iterdir() if run.is_dir() else ():
        found = re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", path.name)
        if found and path.is_dir():
            steps[int(found[1])] = path
    return dict(sorted(steps.items()))


def last_checkpoint(output_dir: str | os.PathLike) -> str | None:
    """
    Path of the latest whole checkpoint in `output_dir`, None where there is none. One that was cut off, as plain
    `Trainer` may leave it, is passed over with a warning.
    """
    for folder in reversed(checkpoints_in(Path(output_dir)).values()):
        missing = what_is_missing(folder)
        if missing is None:
            return str(folder)
        logger.warning(f"Passing over {folder}: {missing}.")
    return None


def what_is_missing(checkpoint: Path) -> str | None:
    """Why a checkpoint cannot be resumed from, None if it can. `trainer_state.json` is written last."""
    try:
        TrainerState.load_from_json(str(checkpoint / STATE))
    except FileNotFoundError:
        return f"it has no {STATE}, so its save was cut off"
    except (ValueError, TypeError) as error:
        return f"its {STATE} cannot be read ({error})"
    for index in checkpoint.glob("*.index.json"):
        try:
            shards = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError) as error:
            return f"its {index.name} cannot be read ({error})"
        absent = sorted(shard for shard in shards if not (checkpoint / shard).is_file())
        if absent:
            return f"it lacks {absent[0]}"
    return _what_is_missing_of_optimizer(checkpoint)


def _what_is_missing_of_optimizer(checkpoint: Path) -> str | None:
    """`Trainer` goes on with a fresh optimizer where there is no saved one, and says nothing."""
    names = {path.name for path in checkpoint.iterdir()}
    if any(name.startswith("global_step") for name in names):  # DeepSpeed's, with the scheduler in it or beside it
        return None
    optimizer = any(re.fullmatch(r"optimizer\.(pt|bin)|optimizer_\d+", name) for name in names)  # a folder is FSDP's
    for name, there in (("optimizer.pt", optimizer), ("scheduler.pt", "scheduler.pt" in names)):
        if not there:
            return f"it has no {name}, which a run needs to go on as it was (`save_only_model` leaves it out)"
    return None
