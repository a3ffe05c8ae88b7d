"""The models to measure, with random weights: speed does not depend on values, only on how many there are."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from stts_hf.auto_classes import register_auto_classes
from stts_hf.benchmark.geometries import GEOMETRIES
from stts_hf.benchmark.presets import Workload
from stts_hf.model_parts import SCORER, module_of
from stts_hf.modeling.settings_stts import PRUNING_FIELDS, TRAINING_FIELDS

Models = tuple[PreTrainedModel, PreTrainedModel]  # STTS and its native twin, with the same parameters


def build_models(geometry: str, dtype: torch.dtype, device: torch.device) -> Models:
    """Returns STTS and the stock model with one set of random weights, scorer included: else whole frames drop."""
    register_auto_classes()
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForImageTextToText.from_config(GEOMETRIES[geometry].config(), dtype=dtype)
    nn.init.normal_(module_of(model, SCORER).score_layer.weight)
    return model, stock_twin(model)


def stock_twin(model: PreTrainedModel) -> PreTrainedModel:
    """Returns the stock model with the same parameter objects: both share gradients, one optimiser serves both."""
    config = stock_config(model.config)
    with torch.device("meta"):
        stock = AutoModelForImageTextToText.from_config(config)
    weights = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if ".scorer." not in name}
    stock.load_state_dict(weights, assign=True)
    for name, buffer in list(stock.named_buffers()):
        if buffer.is_meta:  # rotary frequencies are not persistent, so the state dict lacks them
            owner = name.rpartition(".")[0]
            stock.set_submodule(owner, model.get_submodule(owner))
    stock.model.parts = model.model.parts
    return stock.train(model.training)


def stock_inputs(stock: PreTrainedModel, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs of rows with one video each, and no images, as the stock model takes them: maybe frames as images."""
    if hasattr(stock.model, "get_video_features") or "pixel_values_videos" not in inputs:
        return dict(inputs)
    if "pixel_values" in inputs:
        raise ValueError("`inputs` has images beside videos, which stock_inputs does not order. Leave the images out.")
    others = {name: value for name, value in inputs.items() if name not in ("video_grids", "mm_token_type_ids")}
    frames = others.pop("pixel_values_videos")
    return others | {"pixel_values": frames.view(len(inputs["input_ids"]), -1, *frames.shape[1:])}


def stock_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The native configuration of an STTS model's, without the fields of pruning."""
    ours = {*PRUNING_FIELDS, *TRAINING_FIELDS, "quantization_config"}
    ours |= {"model_type", "architectures", "auto_map", "dtype"}
    given = {name: value for name, value in config.to_dict().items() if name not in ours}
    given["vision_config"] = {name: value for name, value in given["vision_config"].items() if name not in ours}
    stock = config.native(**given)
    stock._attn_implementation = config._attn_implementation
    for name in config.native.sub_configs:
        getattr(stock, name)._attn_implementation = getattr(config, name)._attn_implementation
    return stock


def configure(models: Models, workload: Workload, backend: str) -> None:
    """Sets both models' attention, mode and gradient checkpointing, and STTS's pruning fields, as `set_pruning`."""
    set_pruning(models[0].config, workload)
    # Flash attention takes no mask, which a language model with bidirectional vision tokens needs; the vision tower has
    # no mask, which is what flex attention is for.
    masked = not models[0].model.vision_is_causal
    of_text = "sdpa" if masked and backend.startswith("flash_attention") else backend
    of_vision = "sdpa" if backend == "flex_attention" else backend
    training = workload.mode == "training"
    for model in models:
        model.config._attn_implementation = of_text  # sets the parts' too
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


def set_pruning(config: Any, workload: Workload) -> None:
    """Sets a workload's pruning fields. Raises `ValueError` for a layer that the tower does not have."""
    vision, own = config.vision_config, GEOMETRIES[workload.geometry].config().vision_config
    vision.selector = workload.selector
    vision.pruning_layer = own.pruning_layer if workload.pruning_layer is None else workload.pruning_layer
    vision.validate_pruning()
