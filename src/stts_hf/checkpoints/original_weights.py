"""The weights of original training checkpoints of Molmo2 and STTS, read without trusting them.

They come as `model.pt`, opened with `weights_only=True`, or as a torch.distributed.checkpoint folder. torch's own
reader unpickles the latter's `.metadata` as it comes, so that a checkpoint could run code. Here every class the
metadata needs is replaced by an inert record, and anything else is refused. The classes are known by name alone: the
training code of these models writes some of them from modules of its own.
"""

import io
import math
import pickle
import re
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .tensors import StoredTensor, in_memory

UNSHARDED_FILE = "model.pt"
SHARDED_FOLDER = "model_and_optim"
METADATA_FILE = ".metadata"
_Chunk = tuple[Sequence[int] | None, dict]  # its offsets in the tensor, None for the beginning, and its storage
_RECORD_NAMES = (
    *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
    *("TensorProperties", "StorageMeta", "_StorageInfo", "_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING", "_get_layout"),
    *("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"),
)

# Original names become those of released checkpoints by these rules, applied one after another.
_RENAMES = (
    (r"^transformer\.ff_out\.", "lm_head."),
    (r"^(transformer|vision_backbone)\.", r"model.\1."),
    (r"(\.blocks\.\d+)\.(att_proj|attn_out|q_norm|k_norm)\.", r"\1.self_attn.\2."),
    (r"(\.blocks\.\d+)\.(ff_proj|ff_out)\.", r"\1.mlp.\2."),
    (r"\.transformer\.temporal_token_scorer\.", ".scorer."),
    (r"\.scorer\.patch_token_pooler\.w([qkvo])\.", r".scorer.token_pooler.\1_proj."),
    (r"\.scorer\.mlp\.w1\.", ".scorer.input_layer."),
    (r"\.scorer\.mlp\.w2\.", ".scorer.hidden_layer."),
    (r"\.scorer\.mlp\.w3\.", ".scorer.score_layer."),
)
_EMBEDDING = "model.transformer.wte.embedding"


def is_original(folder: Path) -> bool:
    """Whether a folder is an original training checkpoint. Raises `ValueError` where it is no checkpoint at all."""
    if (folder / "config.json").is_file():
        return False
    if not any((folder / name).is_file() for name in (UNSHARDED_FILE, f"{SHARDED_FOLDER}/{METADATA_FILE}")):
        raise ValueError(
            f"{folder} is no checkpoint: it holds neither config.json (a Hugging Face folder) nor config.yaml with "
            f"{UNSHARDED_FILE} or {SHARDED_FOLDER}/ (an original training checkpoint)."
        )
    return True


def open_original(folder: Path) -> dict[str, StoredTensor]:
    """Returns its tensors under the names of released checkpoints; raises `ValueError` for anything but tensors."""
    if (folder / SHARDED_FOLDER / METADATA_FILE).is_file():
        originals = open_sharded(folder / SHARDED_FOLDER)
    else:
        originals = {name: in_memory(tensor) for name, tensor in load_unsharded(folder / UNSHARDED_FILE).items()}
    tensors = {}
    for name, tensor in originals.items():
        for pattern, replacement in _RENAMES:
            name = re.sub(pattern, replacement, name)
        tensors[name] = tensor
    if _EMBEDDING in tensors:
        tensors.setdefault("lm_head.weight", tensors[_EMBEDDING])  # tied in training, unless it has a head of its own
    return tensors


def load_unsharded(path: Path) -> dict[str, torch.Tensor]:
    """Maps the tensors of `model.pt` into memory. Raises `ValueError` where it holds anything else."""
    try:
        state_dict = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        found = re.search(r"GLOBAL:? (\S+)", str(error))  # torch's own text advises to load it with code and all
        reason = f"refers to `{found[1]}`" if found else "is cut off, not of torch.save's zip format, or holds more"
        raise ValueError(
            f"{path} was refused: it {reason}, and only tensors are ever unpickled. Copy it again, or save it as a "
            "plain dict of tensors, if you trust where it came from."
        ) from error
    if not isinstance(state_dict, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in state_dict.items()
    ):
        raise ValueError(f"{path} must hold a dict of names and tensors, the model's state dict alone: save that.")
    return state_dict


class _Record:
    """Stands in for a class of the metadata: keeps the pickled state, does nothing else."""

    state: Any = None

    def __init__(self, *args: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _enum_member(record: Any, name: str) -> _Record:
    """In place of `getattr`, by which early releases of Python 3.11 pickle a member of an enum."""
    if not (isinstance(record, type) and issubclass(record, _Record)):
        raise pickle.UnpicklingError(f"it takes `{name}` of {record!r}, which no checkpoint metadata needs")
    return record()


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the records above, tensor sizes and dtypes, and plain containers; refuses all other globals."""

    def __init__(self, file: io.BufferedIOBase):
        super().__init__(file)
        # Fresh classes for each file: a pickle may set attributes on them.
        self._records = {name: type(name, (_Record,), {}) for name in _RECORD_NAMES}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name == "Size":
            return torch.Size
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if module == "collections" and name == "OrderedDict":
            return OrderedDict
        if name in self._records:
            return self._records[name]
        if module == "builtins" and name == "getattr":
            return _enum_member
        raise pickle.UnpicklingError(f"it refers to `{module}.{name}`, which no checkpoint metadata needs")


def open_sharded(folder: Path) -> dict[str, StoredTensor]:
    """
    Returns the model's tensors of a torch.distributed.checkpoint folder (`.metadata`, `.distcp` files), unread: those
    named "model. ...", without that; others are the optimizer's. Raises `ValueError`, naming the file, where metadata
    or, once they are read, data are missing, damaged, or not plain tensors.
    """
    path = folder / METADATA_FILE
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load().state
    except Exception as error:  # a damaged pickle raises almost anything
        raise ValueError(f"{path} was refused: {error}. Use a checkpoint whose source you trust.") from error
    chunks: dict[str, list[_Chunk]] = {}
    tensors = {}
    try:
        for index, info in metadata["storage_data"].items():
            chunks.setdefault(index.state["fqn"], []).append((tuple(index.state.get("offset") or ()), info.state))
        for name, record in metadata["state_dict_metadata"].items():
            if name.startswith("model.") and record.state and "chunks" in record.state:
                size, properties = tuple(record.state["size"]), record.state["properties"].state
                dtype = properties["dtype"] if isinstance(properties, dict) else properties[0]
                read = partial(_read_chunks, folder, name, size, chunks.get(name, []))
                tensors[name.removeprefix("model.")] = StoredTensor(size, dtype, read)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a checkpoint's metadata ({error!r}): copy it again.") from error
    return tensors


def _read_chunks(folder: Path, name: str, size: tuple[int, ...], stored: list[_Chunk]) -> torch.Tensor:
    chunks = [(offsets, _read_chunk(folder, name, info)) for offsets, info in stored]
    if sum(chunk.numel() for _, chunk in chunks) != math.prod(size):
        raise ValueError(f"{folder} holds {len(chunks)} chunks of `{name}`, but not all of {size}: copy it again.")
    if len(chunks) == 1:
        return chunks[0][1].reshape(size)
    tensor = torch.empty(size, dtype=chunks[0][1].dtype)
    for offsets, chunk in chunks:
        starts = offsets or (0,) * len(size)
        tensor[tuple(slice(start, start + side) for start, side in zip(starts, chunk.shape, strict=True))] = chunk
    return tensor


def _read_chunk(folder: Path, name: str, info: dict) -> torch.Tensor:
    path = folder / info["relative_path"]
    if path.resolve().parent != folder.resolve():
        raise ValueError(f"`{name}` points to {info['relative_path']!r}, which lies outside {folder}.")
    if not path.is_file() or path.stat().st_size < info["offset"] + info["length"]:
        raise ValueError(f"{path} is missing or ends before the data of `{name}`: copy the checkpoint again.")
    try:
        with path.open("rb") as file:
            file.seek(info["offset"])
            tensor = torch.load(io.BytesIO(file.read(info["length"])), map_location="cpu", weights_only=True)
        if not isinstance(tensor, torch.Tensor):
            raise pickle.UnpicklingError(f"it is a {type(tensor).__name__}")
        return tensor
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise ValueError(f"{path} does not hold a plain tensor for `{name}`: {error}") from error
