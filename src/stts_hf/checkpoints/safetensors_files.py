"""Reading and writing safetensors files a few rows at a time.

The `safetensors` library maps files into memory (what was read counts as used until the file is closed) and writes
files from whole tensors only. Here nothing is held but the rows in hand. Files are byte for byte those of the library.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
BLOCK_BYTES = 32 * 2**20
_MAX_HEADER = 100 * 2**20  # the library's own limit

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: file, first byte, dtype and shape."""

    path: Path
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self, first: int, last: int) -> torch.Tensor:
        """Returns rows `first` up to `last` (not included) from disk. A scalar counts as one row."""
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        data = bytearray((last - first) * row)
        with self.path.open("rb") as file:
            file.seek(self.start + first * row)
            if file.readinto(data) != len(data):
                raise ValueError(f"{self.path} ends before its data: copy the checkpoint again.")
        if not data:
            return torch.empty((last - first, *self.shape[1:]), dtype=self.dtype)
        tensor = torch.frombuffer(data, dtype=self.dtype)
        return tensor.view(last - first, *self.shape[1:]) if self.shape else tensor


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Returns every tensor of a file. Raises `ValueError`, naming the file, where it is cut off or not safetensors."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(_MAX_HEADER, size - 8):
            raise ValueError(f"{path} is not a safetensors file, or is cut off in its header: copy it again.")
        text = file.read(length)
    first = 8 + length
    tensors = {}
    try:
        header: dict[str, Any] = json.loads(text)
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            tensor = StoredTensor(path, first + begin, DTYPES[entry["dtype"]], tuple(entry["shape"]))
            if begin < 0 or end - begin != math.prod(tensor.shape) * tensor.dtype.itemsize:
                raise ValueError(f"`{name}` has {end - begin} bytes for shape {tensor.shape}")
            tensors[name] = tensor
        stored = max((first + entry["data_offsets"][1] for entry in header.values()), default=first)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} has a header that cannot be read ({error!r}): copy the file again.") from error
    if stored != size:
        state = "is cut off" if size < stored else "holds more than it says"
        raise ValueError(f"{path} {state}: it has {size:,} bytes, but its header promises {stored:,}. Copy it again.")
    return tensors


def read_checkpoint_headers(folder: Path) -> dict[str, StoredTensor]:
    """Returns every tensor of a folder's `model.safetensors`, or of the shards that its index names.

    Raises `ValueError` where there are neither, a shard is missing or damaged, or index and shards contradict.
    """
    index_path = folder / INDEX_FILE
    if (folder / WEIGHTS_FILE).is_file():
        return read_header(folder / WEIGHTS_FILE)
    if not index_path.is_file():
        pickled = sorted(path.name for path in folder.glob("*.bin"))
        remedy = "copy the weights there"
        if pickled:
            remedy = f"{pickled[0]} is a pickle, which may hold code and is never opened; save it as safetensors"
        raise ValueError(f"{folder} holds neither {WEIGHTS_FILE} nor {INDEX_FILE}: {remedy}.")
    weight_map = read_weight_map(index_path)
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            raise ValueError(f"{index_path} names {shard!r}, but shards must lie beside it.")
        if not (folder / shard).is_file():
            raise ValueError(f"{folder / shard} is missing, and {INDEX_FILE} names it: copy the checkpoint again.")
        found = read_header(folder / shard)
        named = {name for name, file in weight_map.items() if file == shard}
        if found.keys() != named:
            odd = sorted(found.keys() ^ named)
            raise ValueError(
                f"{folder / shard} and {INDEX_FILE} disagree on {len(odd)} tensors ({', '.join(odd[:3])}): "
                "they are of different checkpoints; copy both again."
            )
        tensors |= found
    return tensors


def read_weight_map(index_path: Path) -> dict[str, str]:
    """Returns tensor name to file name of an index. Raises `ValueError` for any other file."""
    try:
        weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
        if not isinstance(weight_map, dict) or not all(isinstance(value, str) for value in weight_map.values()):
            raise TypeError("weight_map is no table of file names")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index_path} is not the index of a checkpoint ({error!r}): copy it again.") from error
    return weight_map


def write_safetensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, rows: Callable[[str], Iterable[torch.Tensor]]
) -> Iterator[int]:
    """Writes one file, and yields the bytes of tensor data after each block written, for progress.

    Args:
        shapes: of every tensor, all of which are of `dtype`.
        rows: `rows(name)` yields the tensor in blocks of rows.

    Raises `OSError` where the disk is full, `ValueError` where `dtype` cannot hold a number. The file is on the disk,
    not only in its cache, when the iterator ends.
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
            written = 0
            for block in rows(name):
                data = _cast(name, block, dtype).contiguous().flatten().view(torch.uint8).numpy()
                file.write(data.data)
                written += data.nbytes
                yield data.nbytes
            if written != math.prod(shapes[name]) * dtype.itemsize:
                raise ValueError(f"`{name}` came with {written} bytes, which do not make shape {shapes[name]}.")
        file.flush()
        os.fsync(file.fileno())


def _cast(name: str, block: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    cast = block.to(dtype)
    if dtype != block.dtype and not cast.isfinite().all() and bool((block.isfinite() & ~cast.isfinite()).any()):
        kind = str(dtype).removeprefix("torch.")
        wider = "bfloat16" if dtype == torch.float16 else "float32"
        raise ValueError(
            f"`{name}` holds numbers beyond {torch.finfo(dtype).max:g}, which {kind} would turn into infinity: pass "
            f"--dtype {wider}."
        )
    return cast


def row_blocks(rows: int, row_bytes: int, block_bytes: int = BLOCK_BYTES) -> Iterator[tuple[int, int]]:
    """Yields (first, last) of consecutive blocks of at most `block_bytes`, at least one row each."""
    step = max(1, block_bytes // max(1, row_bytes))
    for first in range(0, rows, step):
        yield first, min(first + step, rows)
