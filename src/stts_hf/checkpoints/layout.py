"""Which tensors a saved checkpoint holds, under which names, and which of the model's weights each is made of.

`save_pretrained` writes some models in their original layout: query, key and value weights in one tensor, and so on.
Rather than repeat transformers' renaming rules, they are applied once to tensors that hold nothing but row numbers;
where the rows end up says what every saved tensor is made of. All these rules cut and join along dimension 0.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from transformers.core_model_loading import dot_natural_key, revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from stts_hf.auto_classes import MODEL_CLASSES
from stts_hf.modeling.settings_stts import PruningConfig

from .tensors import StoredTensor, write_safetensors

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class Group:
    """Saved tensors and the weights they are made of: joined along dimension 0, both are the same rows in order."""

    saved: Shapes
    native: Shapes

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the joined tensors."""
        return (sum(shape[0] for shape in self.native.values()), *next(iter(self.native.values()))[1:])

    def names_in(self, tensors: Mapping[str, StoredTensor]) -> Shapes:
        """Returns the names and shapes, saved or native, by which a checkpoint has this group, some or all of it."""
        return self.native if any(name in tensors for name in self.native) else self.saved

    def read(self, tensors: Mapping[str, StoredTensor], first: int, last: int) -> Iterator[torch.Tensor]:
        """Yields rows `first` up to `last` of the joined tensors, in blocks."""
        start = 0
        for tensor in (tensors[name] for name in self.names_in(tensors)):
            rows = tensor.shape[0]
            yield from tensor.blocks(max(first - start, 0), min(last - start, rows))
            start += rows


def empty_model(config: PruningConfig) -> Any:
    """Returns the model without memory for its weights (on the meta device), for names and shapes."""
    with torch.device("meta"):
        return MODEL_CLASSES[type(config)](config)


def saved_layout(model: Any) -> list[Group]:
    """Returns all tensors that `model.save_pretrained` writes, in its order, with the weights each is made of."""
    own = {name: weight for name, weight in model.state_dict().items() if name not in model.all_tied_weights_keys}
    weights: Shapes = {name: tuple(weight.shape) for name, weight in own.items()}
    ends = torch.tensor([shape[0] for shape in weights.values()]).cumsum(0)
    traces = {name: torch.arange(end - weights[name][0], end) for name, end in zip(weights, ends.tolist(), strict=True)}
    # In the order of a loaded model, of which alone it also sorts what needs no conversion.
    saved = revert_weight_conversion(model, dict(sorted(traces.items(), key=lambda item: dot_natural_key(item[0]))))
    groups: list[Group] = []
    for key, rows in saved.items():
        names = [list(weights)[index] for index in torch.searchsorted(ends, rows, right=True).unique_consecutive()]
        if not groups or names[0] not in groups[-1].native:  # only the embedding is cut into several saved tensors
            groups.append(Group({}, {}))
        groups[-1].saved[key] = (len(rows), *weights[names[0]][1:])
        groups[-1].native.update({name: weights[name] for name in names})
    for group in groups:
        native = torch.cat([traces[name] for name in group.native])
        if not torch.equal(torch.cat([saved[key] for key in group.saved]), native):
            raise RuntimeError(f"transformers saves {', '.join(group.saved)} by a rule that is not known here.")
    return groups


def byte_size(layout: list[Group], dtype: torch.dtype) -> int:
    """Returns the bytes of all tensors in `dtype`."""
    return sum(math.prod(group.shape) for group in layout) * dtype.itemsize


def write_weights(
    folder: Path,
    layout: list[Group],
    tensors: Mapping[str, StoredTensor],
    dtype: torch.dtype,
    max_shard_size: int | str,
    on_progress: Callable[[int, int], None],
) -> None:
    """Writes the files of weights and their index, as `save_pretrained` does."""
    groups, rows, shapes = {}, {}, {}  # by saved name: what it is part of, which rows of that it has, its shape
    for group in layout:
        first = 0
        for name, shape in group.saved.items():
            groups[name], rows[name], shapes[name] = group, (first, first + shape[0]), shape
            first += shape[0]
    # In `save_pretrained` the parts of a weight share its memory, which keeps them in one file.
    split = split_state_dict_into_shards_factory(
        groups,
        get_storage_size=lambda group: byte_size([group], dtype),
        get_storage_id=lambda group: group,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    written, total = 0, byte_size(layout, dtype)
    for file, names in split.filename_to_tensors.items():
        for count in write_safetensors(
            folder / file,
            {name: shapes[name] for name in names},
            dtype,
            lambda name: groups[name].read(tensors, *rows[name]),
        ):
            written += count
            on_progress(written, total)
    if split.is_sharded:
        metadata = {"total_parameters": total // dtype.itemsize, **split.metadata}
        index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(text, encoding="utf-8")
