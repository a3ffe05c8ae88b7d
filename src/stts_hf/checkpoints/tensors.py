"""Tensors of a checkpoint's safetensors files, listed without reading them."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from .files import read_json

MAX_HEADER_BYTES = 4 * 10**6  # of all files together, which is tens of thousands of tensors: no model here has as many
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint, read when asked for. A dtype that no checkpoint of ours has is given by its name."""

    shape: tuple[int, ...]
    dtype: torch.dtype | str
    read: Callable[[], torch.Tensor]


def in_memory(tensor: torch.Tensor) -> StoredTensor:
    """The same of a tensor that was made here, or is mapped; reading copies it."""
    return StoredTensor(tuple(tensor.shape), tensor.dtype, tensor.clone)


def main_dtype(tensors: Mapping[str, StoredTensor]) -> torch.dtype:
    """Returns the floating dtype that most of the numbers have. Raises `ValueError` where there are none."""
    counts: Counter[torch.dtype] = Counter()
    for name, tensor in tensors.items():
        if not isinstance(tensor.dtype, torch.dtype) or tensor.dtype not in _DTYPES.values():
            raise ValueError(
                f"`{name}` is {str(tensor.dtype).removeprefix('torch.')}, but weights must be float32, bfloat16 or "
                "float16: convert a checkpoint that is not quantised."
            )
        counts[tensor.dtype] += math.prod(tensor.shape)
    if not counts:
        raise ValueError("the checkpoint's files hold no tensors: copy them again.")
    return counts.most_common(1)[0][0]


def open_safetensors(folder: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a folder's safetensors by name, without reading them.

    Raises `ValueError` where there are none, and where a shard is missing or damaged.
    """
    tensors: dict[str, StoredTensor] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118
                    if name in tensors:
                        raise ValueError(f"{path} is of another checkpoint than its siblings, which hold `{name}` too.")
                    part = file.get_slice(name)
                    code = part.get_dtype()
                    read = partial(_read, path, name)
                    tensors[name] = StoredTensor(tuple(part.get_shape()), _DTYPES.get(code, code), read)
        except SafetensorError as error:
            reason = f"{error}".removeprefix("Error while deserializing header: ")
            raise ValueError(
                f"{path} is cut off, too long, or no safetensors file ({reason}): copy it again."
            ) from error
    return tensors


def _read(path: Path, name: str) -> torch.Tensor:
    with safe_open(path, "pt") as file:
        return file.get_tensor(name)


def weight_files(folder: Path) -> list[Path]:
    """Returns the files of weights in a folder. Raises `ValueError` where one is missing, or the index is none."""
    single, index = folder / SAFE_WEIGHTS_NAME, folder / SAFE_WEIGHTS_INDEX_NAME
    check_headers(folder)
    if single.is_file():
        return [single]
    if not index.is_file():
        pickled = sorted(path.name for path in folder.glob("*.bin"))
        remedy = "copy the weights there"
        if pickled:
            remedy = f"{pickled[0]} is a pickle, which may hold code and is never opened; save it as safetensors"
        raise ValueError(f"{folder} holds neither {single.name} nor {index.name}: {remedy}.")
    return shard_files(index)


def shard_files(index: Path) -> list[Path]:
    """Returns the files that an index names. Raises `ValueError` where one is missing, or the index is none."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f"{index} is not the index of a checkpoint (its `weight_map` is none): copy it again.")
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        if Path(shard).name != shard:
            raise ValueError(f"{index} names {shard!r}, but shards must lie beside it.")
        if not (index.parent / shard).is_file():
            raise ValueError(
                f"{index.parent / shard} is missing, and {index.name} names it: copy the checkpoint again."
            )
    return [index.parent / shard for shard in shards]


def check_headers(folder: Path) -> None:
    """
    Raises `ValueError` where the weights of a folder have more names than any model, before a name is read, and
    `PermissionError` where a file of them may not be read, of which `safe_open` says that there is none.
    """
    index, indexed, shards = folder / SAFE_WEIGHTS_INDEX_NAME, 0, []
    if index.is_file() and not (folder / SAFE_WEIGHTS_NAME).is_file():  # which would be read in its place
        indexed = index.stat().st_size
        shards = shard_files(index) if indexed <= MAX_HEADER_BYTES else []
    indexed += sum(map(_header_bytes, shards))
    # An adapter or another model that lies there is no part of these weights, but a configuration may name it.
    others = [path for path in folder.glob("*.safetensors") if path.is_file() and path not in shards]
    num_bytes = max([indexed, *map(_header_bytes, others)])
    if num_bytes > MAX_HEADER_BYTES:
        raise ValueError(
            f"{folder} has {num_bytes:,} bytes of names of tensors, and those of a checkpoint have at most "
            f"{MAX_HEADER_BYTES:,}: get it from its origin, or do not load it."
        )


def _header_bytes(path: Path) -> int:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
    return size if size < path.stat().st_size else 0  # of a longer one the library says what is wrong
