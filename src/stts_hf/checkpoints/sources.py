"""Where the tensors of a conversion come from: a Hugging Face folder, an original training checkpoint, or memory."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from .json_files import read_json
from .layout import Group, Part
from .original import SHARDED_FOLDER, UNSHARDED_FILE, load_original_config, open_original_state_dict, original_parts
from .safetensors_files import CODES, INDEX_FILE, WEIGHTS_FILE, row_blocks
from .sharded import METADATA_FILE, ShardedStateDict

_REOPEN_BYTES = 256 * 2**20
_DTYPES = {code: dtype for dtype, code in CODES.items()}


class TensorSource(Protocol):
    """Tensors of a checkpoint, read a few rows at a time. A dtype that no checkpoint of ours has is given by name."""

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype | str]

    def read(self, name: str, first: int, last: int) -> torch.Tensor:
        """Returns rows `first` up to `last` (not included). A scalar counts as one row."""

    def parts(self, group: Group) -> list[Part]:
        """Returns the tensors that make up the rows of `group`, in order; none where the source lacks them all."""


class HuggingFaceSource:
    """A folder of safetensors in the original or in the native key layout, or in both.

    Raises `ValueError` where there are none, a shard is missing or damaged, or index and shards contradict.
    """

    def __init__(self, folder: Path):
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype | str] = {}
        self._files: dict[str, Path] = {}
        for path, named in weight_files(folder).items():
            try:
                with safe_open(path, "pt") as file:
                    slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                    shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
                    codes = {name: part.get_dtype() for name, part in slices.items()}
            except SafetensorError as error:
                reason = f"{error}".removeprefix("Error while deserializing header: ")
                raise ValueError(
                    f"{path} is cut off, too long, or no safetensors file ({reason}): copy it again."
                ) from error
            if named is not None and shapes.keys() != named:
                odd = sorted(shapes.keys() ^ named)
                raise ValueError(
                    f"{path} and {INDEX_FILE} disagree on {len(odd)} tensors ({', '.join(odd[:3])}): "
                    "they are of different checkpoints; copy both again."
                )
            self.shapes |= shapes
            self.dtypes |= {name: _DTYPES.get(code, code) for name, code in codes.items()}
            self._files |= dict.fromkeys(shapes, path)

    def read(self, name: str, first: int, last: int) -> torch.Tensor:
        # Pages of a mapped file count as memory in use until it is closed.
        with safe_open(self._files[name], "pt") as file:
            return file.get_slice(name)[first:last] if self.shapes[name] else file.get_tensor(name)

    def parts(self, group: Group) -> list[Part]:
        for names in (group.saved, group.native):
            if any(part.name in self.shapes for part in names):
                return [Part(part.name, self.shapes[part.name]) for part in names if part.name in self.shapes]
        return []


def weight_files(folder: Path) -> dict[Path, set[str] | None]:
    """Returns the files of weights in a folder with the tensors that an index promises; None without an index.

    Raises `ValueError` where there are none, where one is missing, or where the index is none.
    """
    single, index = folder / WEIGHTS_FILE, folder / INDEX_FILE
    if single.is_file():
        return {single: None}
    if not index.is_file():
        pickled = sorted(path.name for path in folder.glob("*.bin"))
        remedy = "copy the weights there"
        if pickled:
            remedy = f"{pickled[0]} is a pickle, which may hold code and is never opened; save it as safetensors"
        raise ValueError(f"{folder} holds neither {WEIGHTS_FILE} nor {INDEX_FILE}: {remedy}.")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f"{index} is not the index of a checkpoint (its `weight_map` is none): copy it again.")
    files: dict[Path, set[str] | None] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            raise ValueError(f"{index} names {shard!r}, but shards must lie beside it.")
        if not (folder / shard).is_file():
            raise ValueError(f"{folder / shard} is missing, and {INDEX_FILE} names it: copy the checkpoint again.")
        files[folder / shard] = {name for name, file in weight_map.items() if file == shard}
    return files


class OriginalSource:
    """An original training checkpoint, unsharded or sharded."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.dtypes: dict[str, torch.dtype | str] = {}
        self._tensors = open_original_state_dict(folder)
        self._mapped = not isinstance(self._tensors, ShardedStateDict)  # model.pt is mapped into memory
        if isinstance(self._tensors, ShardedStateDict):
            self.shapes = self._tensors.shapes
            self.dtypes |= self._tensors.dtypes
        else:
            self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
            self.dtypes |= {name: tensor.dtype for name, tensor in self._tensors.items()}
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
        self.dtypes: dict[str, torch.dtype | str] = {name: tensor.dtype for name, tensor in tensors.items()}

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
            dtype = source.dtypes[part.name]
            assert isinstance(dtype, torch.dtype)  # `main_dtype` has refused all others
            row_bytes = dtype.itemsize * math.prod(part.shape[1:])
            for begin, end in row_blocks(high - low, row_bytes):
                yield source.read(part.name, low + begin, low + end)
        start += part.rows


def main_dtype(source: TensorSource) -> torch.dtype:
    """Returns the floating dtype that most of a source's numbers have. Raises `ValueError` where there are none."""
    counts: dict[torch.dtype, int] = {}
    for name, dtype in source.dtypes.items():
        if isinstance(dtype, torch.dtype) and dtype in CODES:
            counts[dtype] = counts.get(dtype, 0) + math.prod(source.shapes[name])
        else:
            raise ValueError(
                f"`{name}` is {str(dtype).removeprefix('torch.')}, but weights must be float32, bfloat16 or float16: "
                "convert a checkpoint that is not quantised."
            )
    if not counts:
        raise ValueError("`source` holds no tensors: name the folder of a whole checkpoint.")
    return max(counts, key=lambda dtype: counts[dtype])


@dataclass
class WeightProblems:
    """How a checkpoint's tensors differ from the model's, by name."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    wrong_shapes: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.wrong_shapes)

    def __str__(self) -> str:
        kinds = {
            "missing": self.missing,
            "unexpected": self.unexpected,
            "of the wrong shape": self.wrong_shapes,
        }
        return "; ".join(
            f"{len(names)} tensors are {kind}: {', '.join(names[:4])}"
            + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            for kind, names in kinds.items()
            if names
        )


def check_weights(
    source: TensorSource, layout: list[Group], declared_layers: int = 0, kept_layers: int = 0
) -> WeightProblems:
    """Compares the names and shapes of a source with the model's.

    Args:
        declared_layers: ViT layers from `kept_layers` up to this one may be there; the model has no use for them.
    """
    used: set[str] = set()
    problems = WeightProblems()
    for group in layout:
        parts = source.parts(group)
        names = {part.name for part in parts}
        used |= names
        expected = next((wanted for wanted in (group.saved, group.native) if names & {w.name for w in wanted}), ())
        absent = [part.name for part in (expected if parts else group.saved) if part.name not in names]
        if absent:
            problems.missing += absent
            continue
        # Native weights have a shape each; parts of the saved embedding, and original tensors, need only add up.
        rows, row_shape = sum(part.rows for part in parts), group.row_shape
        adds_up = rows == group.rows and all(part.shape[1:] == row_shape for part in parts)
        if tuple(parts) == expected or (adds_up and expected != group.native):
            continue
        if expected == group.native and len(parts) > 1:
            pairs = [(part, wanted) for part, wanted in zip(parts, expected, strict=True) if part != wanted]
            problems.wrong_shapes += [f"{p.name} {list(p.shape)} instead of {list(w.shape)}" for p, w in pairs]
        else:
            shape = [group.rows, *row_shape] if group.native[0].shape else []
            found = " and ".join(f"{part.name} {list(part.shape)}" for part in parts)
            problems.wrong_shapes.append(f"{found} instead of {shape}{' together' if len(parts) > 1 else ''}")
    unneeded = {f".{layer}." for layer in range(kept_layers, declared_layers)}
    for name in source.shapes:
        is_vision_layer = "resblocks." in name or "vision_tower.layers." in name
        if name not in used and not (is_vision_layer and any(index in name for index in unneeded)):
            problems.unexpected.append(name)
    return problems
