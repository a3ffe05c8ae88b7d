"""The parts of a model that have learning rates of their own, found by parameter name, and their freezing."""

import difflib
from collections.abc import Iterable, Mapping

import torch
from torch import nn

LANGUAGE_MODEL, VISION_TOWER, CONNECTOR, SCORER = "language_model", "vision_tower", "connector", "scorer"
PARTS = (LANGUAGE_MODEL, VISION_TOWER, CONNECTOR, SCORER)
ADAPTER = "adapter"  # LoRA and DoRA weights, wherever they sit

# Put around modules by torch.compile, FSDP, DDP and activation checkpointing.
WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module"}


def part_of(name: str) -> str:
    """
    Part of the parameter `name`, as `named_parameters` gives it, wrapped by PEFT, DDP, FSDP or torch.compile or not.
    The head and the embeddings belong to the language model, pooler and MLP to the scorer; LoRA weights to the part
    they adapt. Raises `ValueError` for names of another model.
    """
    words = [word for word in name.split(".") if word not in WRAPPERS]
    for index, word in enumerate(words):
        if word == "vision_tower":
            return SCORER if "scorer" in words[index + 1 : index + 2] else VISION_TOWER
        if word == "multi_modal_projector":
            return CONNECTOR
        if word in ("language_model", "lm_head"):
            return LANGUAGE_MODEL
    raise ValueError(
        f"Parameter {name!r} belongs to none of the parts {', '.join(PARTS)}. The model must be an STTS model, alone "
        "or inside a PEFT model."
    )


def is_adapter(name: str) -> bool:
    """Whether the parameter `name` is a LoRA matrix or a DoRA magnitude."""
    return any(word.startswith("lora_") for word in name.split("."))


def rate_of(name: str, learning_rates: Mapping[str, object]) -> str:
    """Which of `learning_rates` the parameter `name` takes: its part's, or the adapters' where they have their own."""
    return ADAPTER if ADAPTER in learning_rates and is_adapter(name) else part_of(name)


def check_parts(argument: str, names: Iterable[str], valid: tuple[str, ...]) -> None:
    """Raises `ValueError` that lists the `valid` parts where the `argument` names another."""
    for name in names:
        if name not in valid:
            close = difflib.get_close_matches(str(name), valid, n=1, cutoff=0.5)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"`{argument}` names {name!r}, which is no part of the model.{hint} Parts: {list(valid)}.")


def freeze_parts(model: nn.Module, parts: Iterable[str]) -> None:
    """
    Turns off the gradients of all parameters of `parts`. Raises `ValueError` where PEFT trains some of them, and where
    nothing would be left to train.
    """
    parts = set(parts)
    for name, parameter in model.named_parameters():
        if part_of(name) in parts:
            if parameter.requires_grad and (is_adapter(name) or "modules_to_save" in name.split(".")):
                raise ValueError(
                    f"`freeze` names {part_of(name)!r}, but PEFT trains {name!r} in it. Take the part out of `freeze`, "
                    "or its modules out of the PEFT config's `target_modules` and `modules_to_save`."
                )
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"Nothing is left to train: `freeze` is {sorted(parts)}, and no other parameter requires a gradient."
        )


def require_grads_in_tower(model: nn.Module) -> None:
    """
    Makes the outputs of the vision tower's patch embedding require gradients where the tower has weights to train. Of
    the text embedding, `activation_checkpointing_enable` sees to it.
    """
    if any(parameter.requires_grad and part_of(name) == VISION_TOWER for name, parameter in model.named_parameters()):
        [embedding] = (m for name, m in model.named_modules() if name.endswith("vision_tower.patch_embedding"))
        embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_())


def split_groups(
    optimizer: torch.optim.Optimizer, model: nn.Module, learning_rates: dict[str, float]
) -> list[dict[str, object]]:
    """
    The optimizer's parameter groups, each split by part, with the part's rate as `lr`. The language model's come first,
    so that theirs is the rate that `Trainer` logs. Raises `ValueError` for a rate for adapters that are not there.
    """
    trained = ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
    keys = {id(parameter): rate_of(name, learning_rates) for name, parameter in trained}
    if ADAPTER in learning_rates and ADAPTER not in keys.values():
        raise ValueError(f"`learning_rates` names {ADAPTER!r}, but the model has no LoRA weights that are trained.")
    groups: list[dict[str, object]] = []
    for key in (*PARTS, ADAPTER):
        for group in optimizer.param_groups:
            params = [parameter for parameter in group["params"] if keys[id(parameter)] == key]
            if params:
                groups.append({**group, "params": params, "lr": learning_rates[key]})
    return groups
