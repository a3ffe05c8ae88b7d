"""Tensors of safetensors files, read and written a few rows at a time; the library writes whole tensors only.

Files are byte for byte those of the library.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from .files import read_json

BLOCK_BYTES = 32 * 2**20
MAX_HEADER_BYTES = 4 * 10**6  # of all files together, which is tens of thousands of tensors: no model here has as many
_CODES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint: `read(first, last)` gives its rows from `first` up to `last`, not included.

    A dtype that no checkpoint of ours has is given by its name. `whole`: any rows take reading all of them.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | str
    read: Callable[[int, int], torch.Tensor]
    whole: bool = False

    def blocks(self, first: int, last: int) -> Iterator[torch.Tensor]:
        """Yields rows `first` up to `last` in blocks of at most `BLOCK_BYTES`, at least one row each."""
        assert isinstance(self.dtype, torch.dtype)  # `main_dtype` has refused all others
        step = max(1, BLOCK_BYTES // max(1, self.dtype.itemsize * math.prod(self.shape[1:])))
        rows = max(step, last - first) if self.whole else step
        for start in range(first, last, rows):
            yield from self.read(start, min(start + rows, last)).split(step)


def in_memory(tensor: torch.Tensor) -> StoredTensor:
    """The same of a tensor that was made here."""
    return StoredTensor(tuple(tensor.shape), tensor.dtype, lambda first, last: tensor[first:last])


def same_contents(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits; reads both, a few rows at a time."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    blocks = zip(one.blocks(0, one.shape[0]), other.blocks(0, other.shape[0]), strict=True)
    return all(torch.equal(first.view(torch.uint8), second.view(torch.uint8)) for first, second in blocks)


def main_dtype(tensors: Mapping[str, StoredTensor]) -> torch.dtype:
    """Returns the floating dtype that most of the numbers have. Raises `ValueError` where there are none."""
    counts: Counter[torch.dtype] = Counter()
    for name, tensor in tensors.items():
        if not isinstance(tensor.dtype, torch.dtype) or tensor.dtype not in _CODES:
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
                    read = partial(_read_rows, path, name)
                    tensors[name] = StoredTensor(tuple(part.get_shape()), _DTYPES.get(code, code), read)
        except SafetensorError as error:
            reason = f"{error}".removeprefix("Error while deserializing header: ")
            raise ValueError(
                f"{path} is cut off, too long, or no safetensors file ({reason}): copy it again."
            ) from error
    return tensors


def _read_rows(path: Path, name: str, first: int, last: int) -> torch.Tensor:
    # Pages of a mapped file count as memory in use until it is closed.
    with safe_open(path, "pt") as file:
        return file.get_slice(name)[first:last]


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


def write_safetensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, rows: Callable[[str], Iterable[torch.Tensor]]
) -> Iterator[int]:
    """Writes one file, and yields the bytes of tensor data after each block written, for progress.

    Args:
        shapes: of every tensor, all of which are of `dtype`.
        rows: `rows(name)` yields the tensor in blocks of rows.

    Raises `OSError` where the disk is full, `ValueError` where `dtype` cannot hold a number.
    """
    ordered = sorted(shapes, key=lambda name: name.encode())
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in ordered:
        begin, end = end, end + math.prod(shapes[name]) * dtype.itemsize
        header[name] = {"dtype": _CODES[dtype], "shape": list(shapes[name]), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in ordered:
            for block in rows(name):
                yield file.write(_cast(name, block, dtype).contiguous().flatten().view(torch.uint8).numpy().data)
        if file.tell() != 8 + len(text) + end:
            raise ValueError(f"{path.name} came out with {file.tell()} bytes, which do not make the shapes in it.")


def _cast(name: str, block: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    cast = block.to(dtype)
    if dtype != block.dtype and bool((block.isfinite() & ~cast.isfinite()).any()):
        kind = str(dtype).removeprefix("torch.")
        wider = "bfloat16" if dtype == torch.float16 else "float32"
        raise ValueError(
            f"`{name}` holds numbers beyond {torch.finfo(dtype).max:g}, which {kind} would turn into infinity: pass "
            f"--dtype {wider}."
        )
    return cast
