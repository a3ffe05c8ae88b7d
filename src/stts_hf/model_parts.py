"""The parts of an STTS model, bare or wrapped, as its backbone's attribute `parts` names them."""

import copy
import itertools
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from stts_hf.selectors import SELECTORS

LANGUAGE_MODEL, VISION_TOWER, CONNECTOR, SCORER = "language_model", "vision_tower", "connector", "scorer"
PARTS = (LANGUAGE_MODEL, VISION_TOWER, CONNECTOR, SCORER)

# Prefixes that torch.compile, FSDP, DDP, activation checkpointing and PEFT add to the names of wrapped modules.
_WRAPPERS = re.compile(
    r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|module|original_module|modules_to_save\.[^.]+)\."
)


def find_backbone(model: nn.Module) -> tuple[str, Any]:
    """Returns the name and module of the headless model inside `model`. Raises `ValueError` if there is none."""
    for name, module in model.named_modules():
        if hasattr(type(module), "parts"):  # that of remote code is no subclass of this package's `PruningBackbone`
            return name, module
    raise ValueError(f"`model` is a {type(model).__name__}; it must be an STTS model, alone or inside a PEFT model.")


def video_placeholders(backbone: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """Which tokens (B, L) of a batch stand for blocks of videos."""
    placeholders: torch.Tensor
    placeholders, _ = backbone.find_placeholders(batch["input_ids"], batch.keys(), batch.get("mm_token_type_ids"))
    return placeholders


def modules_of(model: nn.Module, part: str) -> dict[str, Any]:
    """Returns the modules of a part by their name in `model`. Raises `ValueError` for a model that is not STTS."""
    home, backbone = find_backbone(model)
    names = [name for name, of in type(backbone).parts.items() if of == part]
    return {".".join(filter(None, (home, name))): backbone.get_submodule(name) for name in names}


def module_of(model: nn.Module, part: str) -> Any:
    """Returns the module of a part that is a single module in every backbone: every part but the connector."""
    (module,) = modules_of(model, part).values()
    return module


def is_scorer_trained(model: nn.Module) -> bool:
    """Whether the scorer was ever trained: the weights of its last layer start at zero."""
    return bool(module_of(model, SCORER).score_layer.weight.any())


def usable_selectors(model: nn.Module) -> list[str]:
    """Names of the selectors that a model can use, its own first; those that are learned need a trained scorer."""
    own = find_backbone(model)[1].config.vision_config.selector
    return list(dict.fromkeys([own, *(SELECTORS if is_scorer_trained(model) else SELECTORS.of_kind(False))]))


def with_selector(model: Any, selector: str) -> Any:
    """The model with the same weights and its own configuration, without another selector's threshold."""
    shared = {id(tensor): tensor for tensor in itertools.chain(model.parameters(), model.buffers())}
    other = copy.deepcopy(model, shared)
    if selector != other.config.vision_config.selector:
        other.config.vision_config.update({"selector": selector, "score_threshold": None})
    return other


def parts_of(model: nn.Module) -> dict[str, str]:
    """
    Returns the part of each parameter, by its name in `named_parameters`, which PEFT, DDP, FSDP and torch.compile may
    have prefixed. Head and embeddings belong to the language model, pooler and MLP to the scorer, LoRA weights to the
    part they adapt. Raises `ValueError` for a model that is not an STTS model.
    """
    home, backbone = find_backbone(model)
    parts = sorted(type(backbone).parts.items(), key=lambda item: -len(item[0]))  # what is inside comes first
    found = {}
    for name, _ in model.named_parameters():
        inner = _WRAPPERS.sub("", name.removeprefix(f"{home}.")) if name.startswith(home) else ""
        found[name] = next((part for place, part in parts if f"{inner}.".startswith(f"{place}.")), LANGUAGE_MODEL)
    return found
