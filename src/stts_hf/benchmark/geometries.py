"""Shapes of models to measure. Weights are random: speed does not depend on them, only on how many there are."""

from typing import Any

import torch
from torch import nn
from transformers import Molmo2ForConditionalGeneration

from stts_hf.benchmark.stock import PARTS, stock_twin
from stts_hf.benchmark.workloads import Workload
from stts_hf.modeling.configuration_stts import STTSConfig
from stts_hf.modeling.modeling_stts import STTSForConditionalGeneration

Models = tuple[STTSForConditionalGeneration, Molmo2ForConditionalGeneration]  # with the same parameters

SO400M = {  # of the 27 layers of the original's configuration Molmo2 uses 25
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 25,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 72,
    "image_size": [378, 378],
    "patch_size": 14,
    "pruning_layer": 3,
}
# 2 of 13 layers dense, or 1 of 6, are nearly the same share as 4 of 25.
SMALL_TOWER = SO400M | {
    "hidden_size": 288,
    "intermediate_size": 1076,
    "num_hidden_layers": 13,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "image_size": [252, 252],
    "pruning_layer": 1,
}
NARROW_TOWER = SO400M | {
    "hidden_size": 144,
    "intermediate_size": 538,
    "num_hidden_layers": 13,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pruning_layer": 1,
}
SHORT_TOWER = SMALL_TOWER | {
    "hidden_size": 144,
    "intermediate_size": 538,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pruning_layer": 0,
}
TINY_TOWER = SO400M | {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "image_size": [126, 126],
    "pruning_layer": 1,
}

TEXT_4B = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
TEXT_SMALL = {
    "hidden_size": 1024,
    "intermediate_size": 3888,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 3,
    "head_dim": 128,
    "vocab_size": 13312,
}
TEXT_SMALL_LONG = TEXT_SMALL | {
    "hidden_size": 640,
    "intermediate_size": 2432,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
}
TEXT_TINY = TEXT_SMALL | {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}
# Where only the tower is measured: as wide as the connector's output, and as small as it can be.
TEXT_OF_TOWER = TEXT_4B | {"num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 512}
TEXT_OF_NARROW_TOWER = TEXT_TINY | {"hidden_size": 320, "head_dim": 64}

GEOMETRIES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, int]]] = {
    # name: vision tower, text model, feature layers of the connector
    "tiny": (TINY_TOWER, TEXT_TINY, (5, 3)),
    "so400m": (SO400M, TEXT_OF_TOWER, (24, 18)),
    "narrow-tower": (NARROW_TOWER, TEXT_OF_NARROW_TOWER, (12, 9)),
    "molmo2-4b": (SO400M, TEXT_4B, (24, 18)),
    "molmo2-small": (SMALL_TOWER, TEXT_SMALL, (12, 9)),
    "molmo2-small-long": (SHORT_TOWER, TEXT_SMALL_LONG, (5, 4)),
}


def geometry_config(name: str) -> STTSConfig:
    """Configuration of the geometry `name`. Raises `ValueError` for a name that is not in `GEOMETRIES`."""
    if name not in GEOMETRIES:
        raise ValueError(f"`geometry` is {name!r}, but must be one of {', '.join(GEOMETRIES)}.")
    vision, text, feature_layers = GEOMETRIES[name]
    patches = (vision["image_size"][0] // vision["patch_size"]) ** 2
    adapter = {
        "vision_feature_layer": list(feature_layers),
        "hidden_size": vision["hidden_size"],
        "num_attention_heads": vision["num_attention_heads"],
        "num_key_value_heads": vision["num_key_value_heads"],
        "head_dim": vision["head_dim"],
        "intermediate_size": text["intermediate_size"],
        "text_hidden_size": text["hidden_size"],
    }
    first = text["vocab_size"]  # Molmo2 numbers its special tokens from the end of the text vocabulary
    return STTSConfig(
        vision_config=vision | {"num_position_embeddings": patches},
        adapter_config=adapter,
        text_config=text | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}},
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
    nn.init.normal_(model.model.vision_tower.scorer.score_layer.weight)
    return model, stock_twin(model)


def configure(models: Models, workload: Workload, backend: str) -> None:
    """Sets both models alike: layout of the packed patches (only STTS has one), attention, mode, checkpointing."""
    models[0].config.vision_config.packing = workload.layout
    flash = backend.startswith("flash_attention")
    training = workload.mode == "training"
    for model in models:
        for part in PARTS:
            config = getattr(model.config, part) if part else model.config
            # Bidirectional vision tokens need a mask in the language model, and flash attention takes none; flex
            # attention is for masks, of which the vision tower has none.
            of_text = part in ("", "text_config")
            plain = (of_text and flash) or (not of_text and backend == "flex_attention")
            config._attn_implementation = "sdpa" if plain else backend
        model.train(training)
        # transformers 5.23 renamed these.
        renamed = hasattr(model, "activation_checkpointing_enable")
        name = "activation_checkpointing" if renamed else "gradient_checkpointing"
        if training and workload.checkpointing:
            getattr(model, f"{name}_enable")({"use_reentrant": False})
        else:
            getattr(model, f"{name}_disable")()
