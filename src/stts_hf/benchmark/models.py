"""Models to measure and their inputs, all random: speed does not depend on values, only on how many there are."""

import dataclasses
from typing import Any

import torch
from torch import nn
from transformers import Molmo2Config, Molmo2ForConditionalGeneration, PreTrainedModel
from transformers.models.molmo2.configuration_molmo2 import Molmo2VisionConfig

from stts_hf.benchmark.presets import Workload
from stts_hf.modeling.configuration_stts import STTSConfig
from stts_hf.modeling.modeling_stts import STTSForConditionalGeneration
from stts_hf.parts import SCORER, module_of

Models = tuple[STTSForConditionalGeneration, Molmo2ForConditionalGeneration]  # with the same parameters


def _vision(
    width: int, mlp: int, layers: int, heads: int, pruning_layer: int, side: int = 378, head_dim: int = 72
) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": head_dim,
        "image_size": [side, side],
        "patch_size": 14,
        "pruning_layer": pruning_layer,
    }


def _text(
    width: int, mlp: int, layers: int, heads: int, key_heads: int, vocab: int = 13312, head_dim: int = 128
) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6},
    }


SO400M = _vision(1152, 4304, 25, 16, 3)  # of the 27 layers of the original's configuration Molmo2 uses 25
# Vision tower, text model, feature layers of the connector. Smaller towers keep the share of dense layers: 2 of 13, or
# 1 of 6, are nearly 4 of 25. Where only the tower is measured, the text model is as small as it can be.
GEOMETRIES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, int]]] = {
    "tiny": (_vision(32, 64, 6, 4, 1, 126, head_dim=8), _text(48, 96, 2, 4, 2, 512, 16), (5, 3)),
    "so400m": (SO400M, _text(2560, 64, 1, 32, 8, 512), (24, 18)),
    "narrow-tower": (_vision(144, 538, 13, 2, 1), _text(320, 96, 2, 4, 2, 512, 64), (12, 9)),
    "molmo2-4b": (SO400M, _text(2560, 9728, 36, 32, 8, 151936), (24, 18)),
    "molmo2-small": (_vision(288, 1076, 13, 4, 1, 252), _text(1024, 3888, 8, 12, 3), (12, 9)),
    "molmo2-small-long": (_vision(144, 538, 6, 2, 0, 252), _text(640, 2432, 3, 4, 1), (5, 4)),
}


def geometry_config(name: str) -> STTSConfig:
    """Configuration of the geometry `name`, a key of `GEOMETRIES`."""
    vision, text, feature_layers = GEOMETRIES[name]
    shared = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    adapter = {
        "vision_feature_layer": list(feature_layers),
        **{field: vision[field] for field in shared},
        "intermediate_size": text["intermediate_size"],
        "text_hidden_size": text["hidden_size"],
    }
    first = text["vocab_size"]  # Molmo2 numbers its special tokens from the end of the text vocabulary
    return STTSConfig(
        vision_config=vision,
        adapter_config=adapter,
        text_config=text,
        image_start_token_id=first,
        image_end_token_id=first + 1,
        image_patch_id=first + 2,
        low_res_image_start_token_id=first + 4,
        frame_start_token_id=first + 7,
        frame_end_token_id=first + 8,
    )


def build_models(geometry: str, dtype: torch.dtype, device: torch.device) -> Models:
    """
    Returns STTS and stock Molmo2 with one set of random weights between them.

    The scorer is random too: one that was never trained gives every block the same score, and then whole frames would
    be dropped and others kept, which is not what it does in use.
    """
    torch.manual_seed(0)
    with torch.device(device):
        model = STTSForConditionalGeneration._from_config(geometry_config(geometry), dtype=dtype)
    # Drawn, not scaled up: any spread at all ranks the blocks.
    nn.init.normal_(module_of(model, SCORER).score_layer.weight)
    return model, stock_twin(model)


def stock_twin(model: PreTrainedModel) -> Molmo2ForConditionalGeneration:
    """
    Returns stock Molmo2 with the very weights of the STTS `model`, the scorer left out.

    The parameters are the same objects, so gradients of either model lie in one place and one optimiser serves both.
    Raises `RuntimeError` where they differ in more than the scorer.
    """
    settings = model.config.to_dict()
    known = {field.name for field in dataclasses.fields(Molmo2VisionConfig)} - {"model_type"}
    parts = {part: settings[part] for part in ("adapter_config", "text_config")}
    parts["vision_config"] = {name: value for name, value in settings["vision_config"].items() if name in known}
    tokens = {name: value for name, value in settings.items() if name.endswith(("_token_id", "_patch_id"))}
    config = Molmo2Config(**parts, **tokens)
    config._attn_implementation = model.config._attn_implementation
    for part in parts:
        getattr(config, part)._attn_implementation = getattr(model.config, part)._attn_implementation
    with torch.device("meta"):
        stock = Molmo2ForConditionalGeneration(config)
    weights = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if ".scorer." not in name}
    stock.load_state_dict(weights, assign=True)
    for name in ("rotary_emb", "rotary_emb_unscaled"):  # which a state dict leaves out
        setattr(stock.model.language_model, name, model.get_submodule(f"model.language_model.{name}"))
    return stock.train(model.training)


def configure(models: Models, workload: Workload, backend: str) -> None:
    """Sets both models alike: layout of the packed patches (only STTS has one), attention, mode, checkpointing."""
    models[0].config.vision_config.packing = workload.layout
    # Bidirectional vision tokens need a mask in the language model, and flash attention takes none; flex attention is
    # for masks, of which the vision tower has none.
    of_text = "sdpa" if backend.startswith("flash_attention") else backend
    of_vision = "sdpa" if backend == "flex_attention" else backend
    training = workload.mode == "training"
    for model in models:
        model.config._attn_implementation = of_text  # of its parts too
        for part in ("vision_config", "adapter_config"):
            getattr(model.config, part)._attn_implementation = of_vision
        model.train(training)
        # transformers 5.23 renamed these.
        renamed = hasattr(model, "activation_checkpointing_enable")
        name = "activation_checkpointing" if renamed else "gradient_checkpointing"
        if training and workload.checkpointing:
            getattr(model, f"{name}_enable")({"use_reentrant": False})
        else:
            getattr(model, f"{name}_disable")()


def workload_inputs(workload: Workload, config: STTSConfig, device: torch.device) -> dict[str, Any]:
    """
    Arguments of `model(...)`, laid out as the processor does: each row has 3 text tokens, one video, more text.

    Pixels and ids are random, never zeros. Returns input_ids, attention_mask, mm_token_type_ids (B, L),
    pixel_values_videos (F, N, pixels), video_token_pooling (G, S), video_grids (V, 3), and labels (B, L) for training:
    the text after the video.
    """
    vision = config.vision_config
    generator = torch.Generator(device).manual_seed(0)
    patch_rows, patch_cols = (side // vision.patch_size for side in vision.image_size)
    rows, cols = vision.block_grid
    height, width = vision.pooling_size
    patches = torch.arange(patch_rows * patch_cols, device=device).view(rows, height, cols, width)
    windows = patches.transpose(1, 2).reshape(rows * cols, height * width)  # (n, S)
    frames = workload.batch * workload.frames
    first = torch.arange(frames, device=device) * (patch_rows * patch_cols)
    pixels = vision.patch_size**2 * vision.num_channels
    text = config.text_config.vocab_size

    frame = [0] * workload.timestamp_tokens + [config.frame_start_token_id]
    frame += [config.image_patch_id] * (rows * cols) + [config.frame_end_token_id]
    answer = max(workload.text_tokens - 3, 1)
    row = torch.tensor([0] * 3 + frame * workload.frames + [0] * answer, device=device)
    input_ids = row.repeat(workload.batch, 1)
    drawn = torch.randint(1, text, input_ids.shape, generator=generator, device=device)
    input_ids = torch.where(input_ids < text, drawn, input_ids)
    inputs = {
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        "mm_token_type_ids": (input_ids >= text).long(),
        "pixel_values_videos": torch.randn(
            frames, patch_rows * patch_cols, pixels, generator=generator, device=device
        ).to(getattr(torch, workload.dtype)),
        "video_token_pooling": (windows + first[:, None, None]).flatten(0, 1),
        "video_grids": torch.tensor([[workload.frames, rows, cols]] * workload.batch),
    }
    if workload.mode == "training":
        labels = torch.full_like(input_ids, -100)
        labels[:, -answer:] = input_ids[:, -answer:]
        inputs["labels"] = labels
    return inputs
