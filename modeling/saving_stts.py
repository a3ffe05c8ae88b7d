"""Saving that a kill, an error or a full disk cannot turn into a folder that loads wrongly.

transformers writes into the destination file by file. Here everything is written beside it first and then moved in, and
the file without which nothing loads (`config.json`, `processor_config.json`) is gone while files are being exchanged.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from .card_stts import CARD, ModelCardMixin

MODEL_GATE = "config.json"
PROCESSOR_GATE = "processor_config.json"


@contextlib.contextmanager
def staged(folder: str | os.PathLike, gate: str) -> Iterator[Path]:
    """
    Yields an empty folder inside `folder`; what is in it at the end moves to `folder`, `gate` last. After an error
    `folder` is as before. A kill leaves either the old files or a folder without `gate`, and what was being saved under
    `_saving-*`, which the next save removes (and `Trainer` does not push).
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    stage = folder / f"_saving-{gate.removesuffix('.json')}"
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir()
    try:
        yield stage
        publish(stage, folder, gate)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def publish(stage: Path, folder: Path, gate: str) -> None:
    """Moves everything in `stage` into `folder`, over files of the same names; weights of an earlier save go."""
    if (stage / gate).is_file():
        (folder / gate).unlink(missing_ok=True)
    names = sorted(entry.name for entry in stage.iterdir() if entry.name != gate)
    for name in names:
        if (stage / name).is_dir() and (folder / name).exists():
            shutil.rmtree(folder / name)
        os.replace(stage / name, folder / name)
    for name in stale_weights(os.listdir(folder), names):
        (folder / name).unlink()
    if (stage / gate).is_file():
        os.replace(stage / gate, folder / gate)


def stale_weights(present: list[str], saved: list[str]) -> list[str]:
    """
    Weights among the files `present` that are no part of those just `saved`. transformers would read an old
    `model.safetensors` before a new index of shards.
    """
    weights = re.compile(r"model(\.[\w-]+?)??(-\d{5}-of-\d{5})?\.safetensors(\.index(\.[\w-]+)?\.json)?")

    def variant(name: str) -> str | None:
        found = weights.fullmatch(name)
        return (found[1] or found[4] or "") if found else None

    variants = {variant(name) for name in saved} - {None}
    return sorted(name for name in present if name not in saved and variant(name) in variants)


class SavingMixin(ModelCardMixin):
    """Goes before `PreTrainedModel`: saves all at once, with a model card where there is none."""

    def save_pretrained(self, save_directory, is_main_process: bool = True, *args, **kwargs):
        """As in transformers; an error leaves `save_directory` as it was."""
        saves = is_main_process
        if hasattr(self, "should_save_on_this_rank"):
            saves = self.should_save_on_this_rank(is_main_process)
        # Where all ranks write, they must write into one folder; where a file is in the way, transformers says so.
        if not saves or kwargs.get("distributed_checkpoint") or os.path.isfile(save_directory):
            return super().save_pretrained(save_directory, is_main_process, *args, **kwargs)  # type: ignore[misc]
        folder = Path(save_directory)
        if kwargs.get("push_to_hub"):
            kwargs.setdefault("repo_id", os.path.basename(os.path.normpath(save_directory)))
        with staged(folder, MODEL_GATE) as stage:
            super().save_pretrained(stage, is_main_process, *args, **kwargs)  # type: ignore[misc]
            if (stage / MODEL_GATE).is_file() and not (folder / CARD).exists():
                self.make_card().save(stage / CARD)
        return None


class ProcessorSavingMixin(ModelCardMixin):
    """Goes before `ProcessorMixin`: saves all at once."""

    def save_pretrained(self, save_directory, push_to_hub: bool = False, **kwargs):
        """As in transformers; an error leaves `save_directory` as it was."""
        if push_to_hub:
            kwargs.setdefault("repo_id", os.path.basename(os.path.normpath(save_directory)))
        with staged(save_directory, PROCESSOR_GATE) as stage:
            files = super().save_pretrained(str(stage), push_to_hub, **kwargs)  # type: ignore[misc]
        return [str(Path(save_directory) / Path(file).relative_to(stage)) for file in files]
