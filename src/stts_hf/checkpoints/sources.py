"""Where the tensors of a conversion come from: a Hugging Face folder, an original training checkpoint, or memory."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch

from .layout import Group, Part
from .original import SHARDED_FOLDER, UNSHARDED_FILE, load_original_config, open_original_state_dict, original_parts
from .safetensors_files import read_checkpoint_headers, row_blocks
from .sharded import METADATA_FILE, ShardedStateDict

_REOPEN_BYTES = 256 * 2**20


class TensorSource(Protocol):
    """Tensors of a checkpoint, read a few rows at a time."""

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]

    def read(self, name: str, first: int, last: int) -> torch.Tensor:
        """Returns rows `first` up to `last` (not included)."""

    def parts(self, group: Group) -> list[Part]:
        """Returns the tensors that make up the rows of `group`, in order; none where the source lacks them all."""


class HuggingFaceSource:
    """A folder of safetensors in the original or in the native key layout, or in both."""

    def __init__(self, folder: Path):
        self._tensors = read_checkpoint_headers(folder)
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self.dtypes = {name: tensor.dtype for name, tensor in self._tensors.items()}

    def read(self, name: str, first: int, last: int) -> torch.Tensor:
        return self._tensors[name].read(first, last)

    def parts(self, group: Group) -> list[Part]:
        for names in (group.saved, group.native):
            if any(part.name in self.shapes for part in names):
                return [Part(part.name, self.shapes[part.name]) for part in names if part.name in self.shapes]
        return []


class OriginalSource:
    """An original training checkpoint, unsharded or sharded."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._tensors = open_original_state_dict(folder)
        self._mapped = not isinstance(self._tensors, ShardedStateDict)  # model.pt is mapped into memory
        if isinstance(self._tensors, ShardedStateDict):
            self.shapes, self.dtypes = self._tensors.shapes, self._tensors.dtypes
        else:
            self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
            self.dtypes = {name: tensor.dtype for name, tensor in self._tensors.items()}
        self._parts = original_parts(self.shapes)
        self._last: tuple[str, torch.Tensor] | None = None
        self._bytes_read = 0

    def read(self, name: str, first: int, last: int) -> torch.Tensor:
        if self._mapped:
            # Pages of a mapped file count as memory in use until it is unmapped.
            if self._bytes_read > _REOPEN_BYTES:
                self._tensors, self._bytes_read = {}, 0
                self._tensors = open_original_state_dict(self._folder)
            rows = self._tensors[name][first:last].clone()
            self._bytes_read += rows.nbytes
            return rows
        if self._last is None or self._last[0] != name:
            self._last = None  # before the next is read
            self._last = (name, self._tensors[name])
        return self._last[1][first:last]

    def parts(self, group: Group) -> list[Part]:
        return [Part(name, self.shapes[name]) for name in self._parts.get(group.native[0].name, ())]


class MemorySource:
    """Weights that were made here, under native names."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self._tensors = tensors
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.dtypes = {name: tensor.dtype for name, tensor in tensors.items()}

    def read(self, name: str, first: int, last: int) -> torch.Tensor:
        return self._tensors[name][first:last]

    def parts(self, group: Group) -> list[Part]:
        return [part for part in group.native if part.name in self.shapes]


def is_original(folder: Path) -> bool:
    """Whether a folder is an original training checkpoint (rather than a Hugging Face folder)."""
    weights = (folder / UNSHARDED_FILE).is_file() or (folder / SHARDED_FOLDER / METADATA_FILE).is_file()
    if weights and not (folder / "config.json").is_file():
        load_original_config(folder)
        return True
    if (folder / "config.json").is_file():
        return False
    raise ValueError(
        f"{folder} is no checkpoint: it holds neither config.json (a Hugging Face folder) nor config.yaml with "
        f"{UNSHARDED_FILE} or {SHARDED_FOLDER}/ (an original training checkpoint)."
    )


def read_rows(source: TensorSource, parts: list[Part], first: int, last: int) -> Iterator[torch.Tensor]:
    """Yields rows `first` up to `last` of the joined `parts`, in blocks."""
    start = 0
    for part in parts:
        low, high = max(first - start, 0), min(last - start, part.rows)
        if low < high:
            row_bytes = source.dtypes[part.name].itemsize * _numel(part.shape[1:])
            for begin, end in row_blocks(high - low, row_bytes):
                yield source.read(part.name, low + begin, low + end)
        start += part.rows


def main_dtype(source: TensorSource) -> torch.dtype:
    """Returns the floating dtype that most of a source's numbers have. Raises `ValueError` where there are none."""
    counts: dict[torch.dtype, int] = {}
    for name, dtype in source.dtypes.items():
        if dtype in (torch.float32, torch.float16, torch.bfloat16):
            counts[dtype] = counts.get(dtype, 0) + _numel(source.shapes[name])
        else:
            raise ValueError(
                f"`{name}` is {str(dtype).removeprefix('torch.')}, but weights must be float32, bfloat16 or float16: "
                "convert a checkpoint that is not quantised."
            )
    if not counts:
        raise ValueError("`source` holds no tensors: name the folder of a whole checkpoint.")
    return max(counts, key=lambda dtype: counts[dtype])


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for side in shape:
        count *= side
    return count
