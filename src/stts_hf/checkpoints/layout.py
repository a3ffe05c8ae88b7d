"""
Which tensors a saved checkpoint holds, and their files. `save_pretrained` writes some models under their original names
and in their original pieces: query, key and value weights in one tensor, and so on.
"""

import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from transformers.core_model_loading import dot_natural_key, revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from stts_hf.auto_classes import MODEL_CLASSES
from stts_hf.modeling.settings_stts import PruningConfig

from .tensors import StoredTensor

Shapes = dict[str, tuple[int, ...]]
EMBEDDING = re.compile(r".*\.wte\.(new_)?embedding")  # Molmo2's, which released checkpoints cut at another row
# Renaming joins and cuts weights within a layer, the scorer, or the rest of a part.
_PART = re.compile(r".*?\.(\d+|scorer)\.|([^.]+\.){0,2}")


@dataclass(frozen=True, eq=False)
class Group:
    """The weights of a layer: shapes by the names in files, and by those in the model."""

    saved: Shapes
    native: Shapes

    def names_in(self, tensors: Mapping[str, StoredTensor]) -> Shapes:
        """Returns the names and shapes, saved or native, by which a checkpoint has this group, some or all of it."""
        return max(self.saved, self.native, key=lambda names: sum(name in tensors for name in names))


def empty_model(config: PruningConfig) -> Any:
    """Returns the model without memory for its weights (on the meta device), for names and shapes."""
    with torch.device("meta"):
        return MODEL_CLASSES[type(config)](config)


def saved_layout(model: Any) -> list[Group]:
    """Returns all tensors that `model.save_pretrained` writes, with the weights each is made of."""
    own = {name: weight for name, weight in model.state_dict().items() if name not in model.all_tied_weights_keys}
    groups = []
    for _, names in itertools.groupby(sorted(own, key=dot_natural_key), _part):
        weights = {name: own[name].to("meta") for name in names}
        groups.append(Group(_shapes(revert_weight_conversion(model, weights)), _shapes(weights)))
    return groups


def _part(name: str) -> str:
    found = _PART.match(name)
    return found[0] if found else ""


def _shapes(tensors: Mapping[str, torch.Tensor]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def byte_size(layout: list[Group], dtype: torch.dtype) -> int:
    """Returns the bytes of all tensors in `dtype`."""
    return sum(math.prod(shape) for group in layout for shape in group.native.values()) * dtype.itemsize


def write_weights(
    folder: Path,
    model: Any,
    tensors: Mapping[str, StoredTensor],
    max_shard_size: int | str,
    on_progress: Callable[[int, int], None],
) -> None:
    """Writes the files of weights and their index, in the model's dtype, as `save_pretrained` does, one in memory."""
    layout, dtype = saved_layout(model), model.dtype
    groups = {name: group for group in layout for name in group.saved}

    @functools.lru_cache(maxsize=1)  # the tensors of a group follow each other
    def rename(group: Group) -> dict[str, torch.Tensor]:
        weights = {name: _cast(name, tensors[name].read(), dtype) for name in group.names_in(tensors)}
        if weights.keys() == group.native.keys():
            return revert_weight_conversion(model, weights)
        pieces = list(filter(EMBEDDING.fullmatch, weights))
        rows = [group.saved[name][0] for name in pieces]
        return dict(zip(pieces, torch.cat([weights[name] for name in pieces]).split(rows), strict=True))

    def read(name: str) -> torch.Tensor:
        group = groups[name]
        if name in group.names_in(tensors) and not EMBEDDING.fullmatch(name):
            return _cast(name, tensors[name].read(), dtype)
        return rename(group)[name].contiguous()

    split = split_torch_state_dict_into_shards(
        {name: torch.empty(group.saved[name], dtype=dtype, device="meta") for name, group in groups.items()},
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    written, total = 0, byte_size(layout, dtype)
    for file, names in split.filename_to_tensors.items():
        part = {name: read(name) for name in names}
        save_file(part, folder / file, metadata={"format": "pt"})
        written += sum(tensor.nbytes for tensor in part.values())
        on_progress(written, total)
    if split.is_sharded:
        metadata = {"total_parameters": total // dtype.itemsize, **split.metadata}
        index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(text, encoding="utf-8")


def _cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    cast = tensor.to(dtype)
    if dtype != tensor.dtype and bool((tensor.isfinite() & ~cast.isfinite()).any()):
        kind = str(dtype).removeprefix("torch.")
        wider = "bfloat16" if dtype == torch.float16 else "float32"
        raise ValueError(
            f"`{name}` holds numbers beyond {torch.finfo(dtype).max:g}, which {kind} would turn into infinity: pass "
            f"--dtype {wider}."
        )
    return cast
