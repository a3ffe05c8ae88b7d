"""Which tensors a saved checkpoint holds, under which names, and which of the model's weights each is made of.

`save_pretrained` writes Molmo2 in its original layout: query, key and value weights in one tensor, and so on. Rather
than repeat transformers' renaming rules, they are applied once to tensors that hold nothing but row numbers; where the
rows end up says what every saved tensor is made of. All these rules cut and join along dimension 0.
"""

import math
from dataclasses import dataclass

import torch
from transformers.core_model_loading import revert_weight_conversion

from stts_hf.modeling.configuration_stts import STTSConfig
from stts_hf.modeling.modeling_stts import STTSForConditionalGeneration

SCORER = "model.vision_tower.scorer."


@dataclass(frozen=True)
class Part:
    """A tensor by name, with its whole shape."""

    name: str
    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1


@dataclass(frozen=True)
class Group:
    """Saved tensors and the weights they are made of: joined along dimension 0, both are the same rows in order."""

    saved: tuple[Part, ...]
    native: tuple[Part, ...]

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.native)

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self.native[0].shape[1:]

    @property
    def is_scorer(self) -> bool:
        return self.native[0].name.startswith(SCORER)


def empty_model(config: STTSConfig) -> STTSForConditionalGeneration:
    """Returns the model without memory for its weights (on the meta device), for names and shapes."""
    with torch.device("meta"):
        return STTSForConditionalGeneration(config)


def saved_layout(model: STTSForConditionalGeneration) -> list[Group]:
    """Returns all tensors that `model.save_pretrained` writes, in its order, with the weights each is made of."""
    weights = model.state_dict()
    names = list(weights)
    ranges = {}  # first row of each weight, all weights counted through
    traces, first = {}, 0
    for name, weight in weights.items():
        rows = weight.shape[0] if weight.dim() else 1
        traces[name] = torch.arange(first, first + rows)
        ranges[first] = name
        first += rows
    saved = revert_weight_conversion(model, traces)

    starts = torch.tensor(sorted(ranges))
    groups: list[tuple[list[str], list[str]]] = []  # saved names, native names
    for key, rows in saved.items():
        sources = [names[index] for index in (torch.searchsorted(starts, rows, right=True) - 1).unique_consecutive()]
        # Only the embedding is cut into several saved tensors.
        if groups and groups[-1][1][-1] == sources[0]:
            groups[-1][0].append(key)
            groups[-1][1].extend(sources[1:])
        else:
            groups.append(([key], sources))
    layout = []
    for keys, sources in groups:
        native = tuple(Part(name, tuple(weights[name].shape)) for name in sources)
        parts = tuple(Part(key, (len(saved[key]), *native[0].shape[1:])) for key in keys)
        joined = torch.cat([saved[key] for key in keys])
        if not torch.equal(joined, torch.cat([traces[name] for name in sources])):
            raise RuntimeError(f"transformers saves {', '.join(keys)} by a rule that this package does not know.")
        layout.append(Group(parts, native))
    return layout


def byte_size(layout: list[Group], dtype: torch.dtype) -> int:
    """Returns the bytes of all tensors in `dtype`."""
    return sum(math.prod(part.shape) for group in layout for part in group.saved) * dtype.itemsize
