"""Tensors of a checkpoint's safetensors files: listed without reading them, and written again shard by shard."""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm import tqdm
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from .files import read_json

MAX_HEADER_BYTES = 4 * 10**6  # of all files together: names of tens of thousands of tensors, more than any model has
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint, read when asked for. A dtype other than float32, bfloat16 and float16 is its name."""

    shape: tuple[int, ...]
    dtype: torch.dtype | str
    read: Callable[[], torch.Tensor]


def in_memory(tensor: torch.Tensor) -> StoredTensor:
    """The same of a tensor in memory or mapped into it; reading copies it."""
    return StoredTensor(tuple(tensor.shape), tensor.dtype, tensor.clone)


def main_dtype(tensors: Mapping[str, StoredTensor]) -> torch.dtype:
    """Returns the dtype of most elements. Raises `ValueError` for other dtypes, and where there are no tensors."""
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
    """Returns the tensors of a folder's safetensors, unread. Raises `ValueError` where one is missing or damaged."""
    tensors: dict[str, StoredTensor] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118
                    if name in tensors:
                        raise ValueError(
                            f"{path} and a file beside it both hold `{name}`: keep one checkpoint's files."
                        )
                    part = file.get_slice(name)
                    code = part.get_dtype()
                    read = partial(_read, path, name)
                    tensors[name] = StoredTensor(tuple(part.get_shape()), _DTYPES.get(code, code), read)
        except SafetensorError as error:
            reason = f"{error}".removeprefix("Error while deserializing header: ")
            raise ValueError(f"{path} is cut off or no safetensors file ({reason}): copy it again.") from error
    return tensors


def _read(path: Path, name: str) -> torch.Tensor:
    with safe_open(path, "pt") as file:
        return file.get_tensor(name)


def weight_files(folder: Path) -> list[Path]:
    """Returns the files of weights that transformers reads. Raises `ValueError` where they cannot be."""
    single, index = folder / SAFE_WEIGHTS_NAME, folder / SAFE_WEIGHTS_INDEX_NAME
    indexed = 0
    if single.is_file():
        files = [single]
    elif index.is_file():
        indexed = index.stat().st_size
        files = shard_files(index) if indexed <= MAX_HEADER_BYTES else []
    else:
        pickled = sorted(path.name for path in folder.glob("*.bin"))
        remedy = "copy the weights there"
        if pickled:
            remedy = f"{pickled[0]} is a pickle, which may hold code and is never opened; save it as safetensors"
        raise ValueError(f"{folder} holds neither {single.name} nor {index.name}: {remedy}.")
    num_bytes = indexed + sum(map(_header_bytes, files))
    if num_bytes > MAX_HEADER_BYTES:
        raise ValueError(f"{folder} has {num_bytes:,} bytes of names of tensors, as no model has: do not load it.")
    return files


def shard_files(index: Path) -> list[Path]:
    """Returns the files that an index names. Raises `ValueError` where one is missing, or the index is invalid."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f"{index} is no checkpoint's index (`weight_map` does not map names to files): copy it again.")
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        if Path(shard).name != shard:
            raise ValueError(f"{index} names {shard!r}, but shards must lie beside it: move them.")
        if not (index.parent / shard).is_file():
            raise ValueError(f"{index.parent / shard} is missing, and {index.name} names it: copy it again.")
    return [index.parent / shard for shard in shards]


def _header_bytes(path: Path) -> int:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
    return size if size < path.stat().st_size else 0  # safetensors refuses a longer one


class _Progress(tqdm):
    """Without tqdm's thread, which waits forever for its own start where memory is short."""

    monitor_interval = 0


def write_safetensors(
    folder: Path, tensors: Mapping[str, StoredTensor], dtype: torch.dtype, max_shard_size: int | str
) -> int:
    """Writes tensors as `save_pretrained` does, one file in memory at a time, and returns their bytes."""
    split = split_torch_state_dict_into_shards(
        {name: torch.empty(tensor.shape, dtype=dtype, device="meta") for name, tensor in tensors.items()},
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    num_bytes, files = split.metadata["total_size"], split.filename_to_tensors
    for file, names in _Progress(files.items(), desc="Writing", unit="file", delay=0.5, disable=None):
        part = {name: cast(name, tensors[name].read(), dtype).contiguous() for name in names}
        save_file(part, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        metadata = {"total_parameters": num_bytes // dtype.itemsize, **split.metadata}
        index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(text, encoding="utf-8")
    return num_bytes


def cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor in another dtype. Raises `ValueError` where finite numbers would become infinite."""
    new = tensor.to(dtype)
    if dtype != tensor.dtype and bool((tensor.isfinite() & ~new.isfinite()).any()):
        kind = str(dtype).removeprefix("torch.")
        wider = "bfloat16" if dtype == torch.float16 else "float32"
        raise ValueError(f"`{name}` holds numbers beyond {torch.finfo(dtype).max:g} of {kind}: pass --dtype {wider}.")
    return new
