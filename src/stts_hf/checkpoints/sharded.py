"""Reading torch.distributed.checkpoint folders without trusting them.

torch's own reader unpickles `.metadata` as it comes, so a checkpoint could run code. Here every class a checkpoint's
metadata needs is replaced by an inert record, and anything else is refused. The classes are known by name alone: the
training code of these models writes some of them from modules of its own.
"""

import io
import math
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

METADATA_FILE = ".metadata"
_RECORD_NAMES = frozenset(
    {
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_StorageInfo",
        "_MEM_FORMAT_ENCODING",
        "MEM_FORMAT_ENCODING",
        "_get_layout",
        "PosixPath",
        "PurePosixPath",
        "WindowsPath",
        "PureWindowsPath",
    }
)


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


class ShardedStateDict(Mapping[str, torch.Tensor]):
    """The tensors of a torch.distributed.checkpoint folder, each read from disk when it is asked for.

    Args:
        folder: holds `.metadata` and the `.distcp` files.
        prefix: only names that start with it are listed, without it ("model." leaves out the optimizer).

    Raises `ValueError`, naming the file, where metadata or data are missing, damaged, or not what a checkpoint of
    plain tensors holds. Nothing in the folder is ever executed.
    """

    def __init__(self, folder: Path | str, prefix: str = ""):
        self.folder = Path(folder)
        metadata = _read_metadata(self.folder / METADATA_FILE)
        try:
            self._sizes = {
                name.removeprefix(prefix): record.state["size"]
                for name, record in metadata["state_dict_metadata"].items()
                if name.startswith(prefix) and record.state and "chunks" in record.state
            }
            self._properties = {
                name: metadata["state_dict_metadata"][prefix + name].state.get("properties") for name in self._sizes
            }
            self._chunks: dict[str, list[tuple[tuple[int, ...], dict]]] = {name: [] for name in self._sizes}
            for index, info in metadata["storage_data"].items():
                name = index.state["fqn"].removeprefix(prefix)
                if index.state["fqn"].startswith(prefix) and name in self._sizes:
                    offsets = index.state.get("offset") or (0,) * len(self._sizes[name])
                    self._chunks[name].append((tuple(offsets), info.state))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.folder / METADATA_FILE} is not the metadata of a checkpoint: {error!r}") from error

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, from the metadata."""
        return {name: tuple(size) for name, size in self._sizes.items()}

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Dtype of every tensor, from the metadata; where it has none there, the tensor is read."""
        dtypes = {}
        for name, record in self._properties.items():
            state = getattr(record, "state", None)
            dtype = state.get("dtype") if isinstance(state, dict) else state[0] if state else None
            dtypes[name] = dtype if isinstance(dtype, torch.dtype) else self[name].dtype
        return dtypes

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, name: str) -> torch.Tensor:
        size = self._sizes[name]
        chunks = [(offsets, self._read_chunk(name, info)) for offsets, info in self._chunks[name]]
        if sum(chunk.numel() for _, chunk in chunks) != math.prod(size):
            raise ValueError(f"{self.folder} holds {len(chunks)} chunks of `{name}`, which do not add up to {size}.")
        if len(chunks) == 1:
            return chunks[0][1].reshape(size)
        tensor = torch.empty(size, dtype=chunks[0][1].dtype)
        for offsets, chunk in chunks:
            region = tuple(slice(start, start + length) for start, length in zip(offsets, chunk.shape, strict=True))
            tensor[region] = chunk
        return tensor

    def _read_chunk(self, name: str, info: dict) -> torch.Tensor:
        path = self.folder / info["relative_path"]
        if path.resolve().parent != self.folder.resolve():
            raise ValueError(f"`{name}` points to {info['relative_path']!r}, which lies outside {self.folder}.")
        if info.get("transform_descriptors"):
            raise ValueError(f"`{name}` is stored as {info['transform_descriptors']}: save it without compression.")
        if not path.is_file():
            raise ValueError(f"{path} is missing, and `{name}` is stored there: copy the checkpoint again.")
        if path.stat().st_size < info["offset"] + info["length"]:
            raise ValueError(f"{path} ends before the data of `{name}`: copy the checkpoint again.")
        try:
            with path.open("rb") as file:
                chunk = _FileSlice(file, info["offset"], info["length"])
                tensor = torch.load(chunk, map_location="cpu", weights_only=True)  # type: ignore[arg-type]
            if not isinstance(tensor, torch.Tensor):
                raise pickle.UnpicklingError(f"it is a {type(tensor).__name__}")
            return tensor
        except (pickle.UnpicklingError, RuntimeError) as error:
            raise ValueError(f"{path} does not hold a plain tensor for `{name}`: {error}") from error


class _FileSlice(io.RawIOBase):
    """A stretch of an open file as a file of its own, so that a tensor is not in memory twice while it is read."""

    def __init__(self, file: io.BufferedReader, start: int, length: int):
        self._file, self._start, self._length, self._position = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = max(0, offset + (0, self._position, self._length)[whence])
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._position)]
        self._file.seek(self._start + self._position)
        count = self._file.readinto(view)
        self._position += count
        return count


def _read_metadata(path: Path) -> dict:
    if not path.is_file():
        raise ValueError(f"{path} is missing: this is not a torch.distributed.checkpoint folder.")
    with path.open("rb") as file:
        try:
            metadata = _MetadataUnpickler(file).load()
        except Exception as error:  # a damaged pickle raises almost anything
            raise ValueError(f"{path} was refused: {error}. Use a checkpoint whose source you trust.") from error
    state = getattr(metadata, "state", None)
    if not isinstance(state, dict):
        raise ValueError(f"{path} is not the metadata of a checkpoint.")
    return state
