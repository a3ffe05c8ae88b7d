"""Stock Molmo2 beside an STTS model: the same weights, not a copy of them."""

import dataclasses

import torch
from transformers import Molmo2Config, Molmo2ForConditionalGeneration, PreTrainedModel
from transformers.models.molmo2.configuration_molmo2 import Molmo2VisionConfig

TOKENS = ("image_start_token_id", "image_end_token_id", "image_patch_id", "low_res_image_start_token_id")


def stock_twin(model: PreTrainedModel) -> Molmo2ForConditionalGeneration:
    """
    Returns stock Molmo2 with the very weights of the STTS `model`, the scorer left out.

    The parameters are the same objects, so gradients of either model lie in one place and one optimiser serves both.
    """
    settings = model.config.to_dict()
    known = {field.name for field in dataclasses.fields(Molmo2VisionConfig)} - {"model_type"}
    vision = {name: value for name, value in settings["vision_config"].items() if name in known}
    config = Molmo2Config(
        vision_config=vision,
        adapter_config=settings["adapter_config"],
        text_config=settings["text_config"],
        **{name: settings[name] for name in TOKENS},
    )
    config._attn_implementation = model.config._attn_implementation
    for part in ("vision_config", "adapter_config", "text_config"):
        getattr(config, part)._attn_implementation = getattr(model.config, part)._attn_implementation
    with torch.device("meta"):
        stock = Molmo2ForConditionalGeneration(config)
    shared = {name: tensor for name, tensor in _tensors(model).items() if ".scorer." not in name}
    if differing := shared.keys() ^ _tensors(stock).keys():
        raise ValueError(f"`model` and stock Molmo2 differ in more than the scorer: {sorted(differing)}.")
    for name, tensor in shared.items():
        parent, _, leaf = name.rpartition(".")
        setattr(stock.get_submodule(parent), leaf, tensor)
    return stock.train(model.training)


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by every name they have, tied ones by several."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
