"""The models to measure, with random weights: speed does not depend on values, only on how many there are."""

import dataclasses

import torch
from torch import nn
from transformers import AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from stts_hf.auto_classes import register_auto_classes
from stts_hf.benchmark.evs import AFTER_TOWER
from stts_hf.benchmark.geometries import geometry_config
from stts_hf.benchmark.presets import Workload
from stts_hf.model_parts import SCORER, module_of

Models = tuple[PreTrainedModel, PreTrainedModel]  # STTS and its native twin, with the same parameters


def build_models(geometry: str, dtype: torch.dtype, device: torch.device) -> Models:
    """
    Returns STTS and the stock model with one set of random weights between them.

    The scorer is random too: one that was never trained gives every block the same score, and then whole frames would
    be dropped and others kept, which is not what it does in use.
    """
    register_auto_classes()
    torch.manual_seed(0)
    config = geometry_config(geometry)
    with torch.device(device):
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype)
    # Drawn, not scaled up: any spread at all ranks the blocks.
    nn.init.normal_(module_of(model, SCORER).score_layer.weight)
    return model, stock_twin(model)


def stock_twin(model: PreTrainedModel) -> PreTrainedModel:
    """
    Returns the stock model of the STTS `model`'s backbone with the very weights of `model`, the scorer left out.

    The parameters are the same objects, so gradients of either model lie in one place and one optimiser serves both.
    Raises `RuntimeError` where they differ in more than the scorer.
    """
    config = stock_config(model.config)
    with torch.device("meta"):
        stock = AutoModelForImageTextToText.from_config(config)
    weights = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if ".scorer." not in name}
    stock.load_state_dict(weights, assign=True)
    for name, buffer in list(stock.named_buffers()):
        if buffer.is_meta:  # a state dict leaves out what is not persistent: rotary frequencies
            owner = name.rpartition(".")[0]
            stock.set_submodule(owner, model.get_submodule(owner))
    stock.model.parts = model.model.parts
    return stock.train(model.training)


def stock_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The native configuration of an STTS model's: with what the native classes know, and the same attention."""

    def known(settings: dict, native: type[PreTrainedConfig]) -> dict:
        names = {field.name for field in dataclasses.fields(native)} - {"model_type", "architectures", "dtype"}
        return {name: value for name, value in settings.items() if name in names}

    settings, parts = config.to_dict(), config.native.sub_configs
    settings |= {name: known(settings[name], native) for name, native in parts.items()}
    stock = config.native(**known(settings, config.native))
    stock._attn_implementation = config._attn_implementation
    for name in parts:
        getattr(stock, name)._attn_implementation = getattr(config, name)._attn_implementation
    return stock


def pruning_settings(workload: Workload) -> dict[str, object]:
    """Fields of the vision config that a workload sets."""
    layer = workload.pruning_layer
    if layer is None:
        layer = geometry_config(workload.geometry).vision_config.pruning_layer
    selector = "random" if workload.selector == AFTER_TOWER else workload.selector
    return {"packing": workload.layout, "selector": selector, "pruning_layer": layer}


def configure(models: Models, workload: Workload, backend: str) -> None:
    """
    Sets both models alike: attention, mode, checkpointing; and STTS alone: what ranks the blocks, after which layer,
    and the layout of the survivors. Raises `ValueError` for a layer that the tower does not have.
    """
    model = models[0]
    for name, value in pruning_settings(workload).items():
        setattr(model.config.vision_config, name, value)
    model.config.vision_config.validate_pruning()
    # Bidirectional vision tokens need a mask in the language model, and flash attention takes none; flex attention is
    # for masks, of which the vision tower has none.
    masked = not model.model.vision_is_causal
    of_text = "sdpa" if masked and backend.startswith("flash_attention") else backend
    of_vision = "sdpa" if backend == "flex_attention" else backend
    training = workload.mode == "training"
    for model in models:
        model.config._attn_implementation = of_text  # of its parts too
        for part in model.config.sub_configs.keys() - {"text_config"}:
            getattr(model.config, part)._attn_implementation = of_vision
        model.train(training)
        # transformers 5.23 renamed these.
        renamed = hasattr(model, "activation_checkpointing_enable")
        name = "activation_checkpointing" if renamed else "gradient_checkpointing"
        if training and workload.checkpointing:
            getattr(model, f"{name}_enable")({"use_reentrant": False})
        else:
            getattr(model, f"{name}_disable")()
