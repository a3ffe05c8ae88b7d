"""Saving that a kill, an error or a full disk cannot turn into a folder that loads wrongly.

transformers writes into the destination file by file. Here everything is written beside it first and then moved in, and
the file without which nothing loads (`config.json`, `processor_config.json`) is gone while files are being exchanged.
"""

import contextlib
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    hf_hub_download,
    split_torch_state_dict_into_shards,
)
from huggingface_hub.errors import RevisionNotFoundError
from transformers import PreTrainedModel

from .card_stts import CARD, ModelCardMixin, card_of_saved, is_provisional

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

MODEL_GATE = "config.json"
PROCESSOR_GATE = "processor_config.json"
CUT_OFF = "cut"  # in place of the process in the name of what a save left that was interrupted while files moved


@contextlib.contextmanager
def staged(folder: str | os.PathLike, gate: str) -> Iterator[Path]:
    """
    Yields an empty folder inside `folder`; what is in it at the end moves to `folder`, `gate` last. After an error
    `folder` is as before. A kill, or an interrupt while files move, leaves either the old files or a folder without
    `gate`, and what was being saved under `_saving-*`, which the next save removes (and `Trainer` does not push). Of
    saves at the same time, the last wins.
    """
    folder = Path(folder)
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    owner = f"_saving-{gate.removesuffix('.json')}-{socket.gethostname()}-"
    if (folder / gate).exists():  # otherwise what is left may be all there is, until the new files are in place
        clear(folder, owner)
    stage = folder / f"{owner}{os.getpid()}-{secrets.token_hex(4)}"
    stage.mkdir()
    moving = False
    try:
        yield stage
        check_places(stage, folder)
        with alone(folder):
            moving = True
            publish(stage, folder, gate)
            moving = False
        clear(folder, owner)
    finally:
        if moving:
            stage.rename(folder / f"{owner}{CUT_OFF}-{secrets.token_hex(4)}")
        else:
            shutil.rmtree(stage, ignore_errors=True)
        if new:
            with contextlib.suppress(OSError):  # not empty: saved
                folder.rmdir()


def clear(folder: Path, owner: str) -> None:
    """Removes what saves left in `folder`, under names that begin with `owner`, and that no process still writes."""
    for left in os.listdir(folder):
        process = left.removeprefix(owner).split("-")[0]
        if left.startswith(owner) and (process == CUT_OFF or not is_running(process)):
            shutil.rmtree(folder / left, ignore_errors=True)


def check_places(stage: Path, folder: Path) -> None:
    """Raises `FileExistsError`, before anything moves, where a folder of `folder` is in a file's way or vice versa."""
    for entry in stage.iterdir():
        place = folder / entry.name
        if place.exists() and place.is_dir() != entry.is_dir():
            raise FileExistsError(
                f"{place} is in the way of what is saved: move it elsewhere, or save into another folder."
            )


def is_running(process: str) -> bool:
    """Whether a process of this machine, given by its id, still runs; where nobody can tell, it does."""
    try:
        if os.name == "posix":
            os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError, OverflowError):
        pass
    return True


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Waits until no other process is in here with the same `folder`, where the file system can tell."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


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
        (folder / name).unlink(missing_ok=True)
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


def name_after_own_code(model_class: type) -> None:
    """
    FSDP2 (`fully_shard`) puts a class of torch's over the model's, and transformers saves the code of the file in which
    a model's class is defined: let that be ours.
    """
    if model_class.__module__.startswith("torch."):
        own = next(base for base in model_class.__mro__ if not base.__module__.startswith("torch."))
        model_class.__module__ = own.__module__


def push_saved(part: Any, folder: Path, names: set[str], repo_id: str, **options: Any) -> None:
    """
    Pushes the entries `names` of `folder`, just saved there by the model or processor `part`, in one commit. The card
    goes with them where the repository has none of its own. options: those of `save_pretrained(..., push_to_hub=True)`.
    """
    upload = {"commit_message": options.pop("commit_message", None), "create_pr": options.pop("create_pr", False)}
    token = options.get("token")
    repo_id = HfApi().create_repo(repo_id, exist_ok=True, **options).repo_id
    if HfApi().file_exists(repo_id, CARD, token=token) and not is_provisional(
        Path(hf_hub_download(repo_id, CARD, token=token))
    ):
        names = names - {CARD}
    elif (folder / CARD).is_file():
        names = names | {CARD}
    elsewhere = {entry: float("inf") for entry in os.listdir(folder) if entry not in names}
    part._upload_modified_files(folder, repo_id, elsewhere, token=token, **upload)


class UploadMixin:
    """Goes before `PreTrainedModel`: no weights of an earlier push stay, which might be read in place of new ones."""

    def _upload_modified_files(self, working_dir, repo_id, files_timestamps, **options):
        """As in transformers; weights in the repository that are no part of those pushed go with the same commit."""
        folder, token, revision = Path(working_dir), options.get("token"), options.get("revision")
        names = [
            entry.name
            for entry in folder.iterdir()
            if entry.name not in files_timestamps or entry.stat().st_mtime > files_timestamps[entry.name]
        ]
        api = HfApi(token=token)
        try:
            present = api.list_repo_files(repo_id, revision=revision)
        except RevisionNotFoundError:  # a new branch, which will begin as `main` is
            present = api.list_repo_files(repo_id)
        stale = stale_weights(present, names)
        if not stale:
            return super()._upload_modified_files(working_dir, repo_id, files_timestamps, **options)  # type: ignore[misc]
        if revision is not None and not revision.startswith("refs/pr"):
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        files = [path for path in folder.rglob("*") if path.is_file() and path.relative_to(folder).parts[0] in names]
        return api.create_commit(
            repo_id,
            [
                *(CommitOperationAdd(path.relative_to(folder).as_posix(), path) for path in files),
                *(CommitOperationDelete(name) for name in stale),
            ],
            commit_message=options.get("commit_message") or "Upload model",
            commit_description=options.get("commit_description"),
            create_pr=options.get("create_pr", False),
            revision=revision,
        )


class SavingMixin(ModelCardMixin, UploadMixin):
    """Goes before `PreTrainedModel`: saves all at once, with a model card where there is none."""

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        state_dict: dict | None = None,
        push_to_hub: bool = False,
        max_shard_size: int | str = "50GB",
        variant: str | None = None,
        token: str | bool | None = None,
        save_peft_format: bool = True,
        save_original_format: bool = True,
        distributed_checkpoint: bool = False,
        **kwargs: Any,
    ) -> None:
        """As in transformers; an error leaves `save_directory` as it was, a failed push what was saved."""
        options: dict[str, Any] = {
            "state_dict": state_dict,
            "max_shard_size": max_shard_size,
            "variant": variant,
            "token": token,
            "save_peft_format": save_peft_format,
            "save_original_format": save_original_format,
        }
        model: Any = super()
        name_after_own_code(type(self))
        saves = is_main_process
        if hasattr(self, "should_save_on_this_rank"):
            saves = self.should_save_on_this_rank(is_main_process)
        # Where all ranks write, they must write into one folder; where a file is in the way, transformers says so.
        if not saves or distributed_checkpoint or os.path.isfile(save_directory):
            options |= {"push_to_hub": push_to_hub, "distributed_checkpoint": distributed_checkpoint}
            model.save_pretrained(save_directory, is_main_process, **options, **kwargs)
            return
        folder = Path(save_directory)
        if self._is_offloaded():
            # Then transformers converts each shard by itself, and tears apart what the released layout keeps in one.
            tensors = self.state_dict() if state_dict is None else state_dict  # type: ignore[attr-defined]
            if split_torch_state_dict_into_shards(tensors, max_shard_size=max_shard_size).is_sharded:
                options["save_original_format"] = False
        if getattr(self, "hf_quantizer", None) is not None:
            options["save_original_format"] = False  # fused and packed, query, key and value cannot be told apart again
        with staged(folder, MODEL_GATE) as stage:
            self._note_dtypes()
            model.save_pretrained(stage, is_main_process, **options)
            if (stage / MODEL_GATE).is_file() and not (folder / CARD).exists():
                self.make_card(getattr(self, "model_tags", None) or (), state_dict).save(stage / CARD)
            names = set(os.listdir(stage))
        if push_to_hub:
            repo_id = kwargs.pop("repo_id", None) or os.path.basename(os.path.abspath(folder))
            push_saved(self, folder, names, repo_id, token=token, **kwargs)

    def _note_dtypes(self) -> None:
        # As loading does for each part; else a model that was never loaded would be saved otherwise than after a load.
        for module in self.modules():  # type: ignore[attr-defined]
            if isinstance(module, PreTrainedModel):
                module.config.dtype = module.dtype

    def _is_offloaded(self) -> bool:
        places = getattr(self, "hf_device_map", {}).values()
        return "cpu" in places or "disk" in places


class ProcessorSavingMixin(ModelCardMixin):
    """Goes before `ProcessorMixin`: saves all at once. `Trainer` saves it to a model without card, which gets one."""

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any) -> list[str]:
        """As in transformers; an error leaves `save_directory` as it was, a failed push what was saved."""
        folder = Path(save_directory)
        for option in ("is_local", "local_files_only"):  # of the load, which transformers takes for the tokenizer's
            self.tokenizer.init_kwargs.pop(option, None)  # type: ignore[attr-defined]
        with staged(folder, PROCESSOR_GATE) as stage:
            files = super().save_pretrained(str(stage))  # type: ignore[misc]
            card = None if (folder / CARD).exists() else card_of_saved(folder / MODEL_GATE)
            if card is not None:
                card.save(stage / CARD)
            names = set(os.listdir(stage))
        if push_to_hub:
            repo_id = kwargs.pop("repo_id", None) or os.path.basename(os.path.abspath(folder))
            push_saved(self, folder, names, repo_id, **kwargs)
        return [str(folder / Path(file).relative_to(stage)) for file in files]
