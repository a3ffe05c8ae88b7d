"""The settings of original training checkpoints of Molmo2 and STTS, in transformers' terms."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

# The model config's fields for special tokens, and the tokens the original tokenizer has for them.
SPECIAL_TOKENS = {
    "image_start_token_id": "<im_start>",
    "image_end_token_id": "<im_end>",
    "image_patch_id": "<im_patch>",
    "low_res_image_start_token_id": "<low_res_im_start>",
    "frame_start_token_id": "<frame_start>",
    "frame_end_token_id": "<frame_end>",
}

SELECTORS = {"scorer": "scorer", "easy": "cosine", "random": "random"}

# Settings of the original code that native Molmo2 cannot express otherwise, with the only value it has.
_FIXED_SETTINGS: dict[str, Any] = {
    "llm.block_type": "sequential",
    "llm.layer_norm_type": "rms",
    "llm.activation_type": "swiglu",
    "llm.attention_layer_norm": True,
    "llm.rope": True,
    "llm.include_bias": False,
    "llm.scale_logits": False,
    "llm.normalize_input_embeds": False,
    "llm.clip_qkv": None,
    "vision_backbone.vit.image_model_type": "siglip",
    "vision_backbone.image_pooling_2d": "attention_meanq",
    "vision_backbone.image_projector": "mlp",
    "vision_backbone.image_padding_embed": None,
    "vision_backbone.pooling_attention_mask": True,
    "vision_backbone.use_deepstack": False,
    "bi_directional_attn": "image_tokens",
}
# The same for the pruning settings, which count only where pruning is on.
_FIXED_PRUNING_SETTINGS: dict[str, Any] = {
    "vision_backbone.vit.merge": False,
    "vision_backbone.vit.prune_from_frame": 0,
    "vision_backbone.vit.pruning_in_scorer": True,
    "vision_backbone.vit.rescale_bias_min": math.exp(-2),
}


def load_original_config(folder: Path | str) -> dict:
    """The `model` section of the checkpoint's `config.yaml`. Raises `ValueError` if there is none."""
    path = Path(folder) / "config.yaml"
    if not path.is_file():
        raise ValueError(f"{path} is missing: an original training checkpoint has one beside its weights.")
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{path} is not valid YAML, copy it again: {error}") from error
    model = config.get("model") if isinstance(config, dict) else None
    if not isinstance(model, dict):
        raise ValueError(f"{path} has no `model` section: it is not the config of a training checkpoint.")
    return model


def convert_original_config(config: Mapping[str, Any], token_ids: Mapping[str, int]) -> dict[str, Any]:
    """Keyword arguments of `STTSConfig` for the `model` section of an original `config.yaml`.

    A checkpoint trained with pruning brings its ratio, layer and method, and is given the released code's layout
    (first-fit-descending with refill). Without pruning, those fields are left to their defaults.

    Args:
        config: from `load_original_config`.
        token_ids: id of every token in `SPECIAL_TOKENS`, by its text; the YAML does not have them.

    Raises `ValueError` naming every setting that native Molmo2 or STTS cannot express, or one that is missing, and
    `TypeError` or `AttributeError` for one of a wrong kind.
    """
    _check_settings(config)
    try:
        vit = config["vision_backbone"]["vit"]
        return {
            "text_config": _text_config(config["llm"]),
            "vision_config": _vision_config(config),
            "adapter_config": _adapter_config(config),
            **{field: token_ids[token] for field, token in SPECIAL_TOKENS.items()},
            **({"temporal_loss_weight": vit["sim_reg_loss_coefficient"]} if vit.get("prune") else {}),
        }
    except KeyError as error:
        raise ValueError(f"it lacks {error} in its `model` section") from error


def _check_settings(config: Mapping[str, Any]) -> None:
    wrong = []
    pruned = _setting(config, "vision_backbone.vit.prune", False)
    for path, expected in (_FIXED_SETTINGS | (_FIXED_PRUNING_SETTINGS if pruned else {})).items():
        value = _setting(config, path, expected)
        same = math.isclose(value, expected) if isinstance(expected, float) else value == expected
        if not same:
            wrong.append(f"`{path}` is {value!r}, but must be {expected!r}")
    if wrong:
        raise ValueError("; ".join(wrong))


def _setting(config: Any, path: str, default: Any) -> Any:
    for key in path.split("."):
        config = config.get(key, default) if isinstance(config, Mapping) else default
    return config


def _text_config(llm: Mapping[str, Any]) -> dict[str, Any]:
    rope = {"rope_type": llm.get("rope_type") or "default", "rope_theta": llm["rope_theta"]}
    if rope["rope_type"] != "default":
        scaling = {key.removeprefix("rope_"): value for key, value in llm.items() if key.startswith("rope_")}
        not_scaling = ("type", "theta", "full_precision")
        rope |= {key: value for key, value in scaling.items() if value is not None and key not in not_scaling}
    scaled_layers = full_layers = llm.get("full_attention_layers")
    if full_layers is not None and llm.get("sliding_attention_rope_scaling"):
        scaled_layers = [layer for layer in range(llm["n_layers"]) if layer not in full_layers]
    return {
        "hidden_size": llm["d_model"],
        "num_attention_heads": llm["n_heads"],
        "num_key_value_heads": llm.get("n_kv_heads") or llm["n_heads"],
        "head_dim": llm.get("head_dim") or llm["d_model"] // llm["n_heads"],
        "vocab_size": llm.get("embedding_size") or llm["vocab_size"],
        "additional_vocab_size": llm["additional_vocab_size"] or 0,
        "attention_bias": llm["qkv_bias"],
        "qk_norm_type": llm["attention_layer_norm_type"],
        "num_hidden_layers": llm["n_layers"],
        "intermediate_size": _intermediate_size(llm),
        "hidden_act": "silu",
        "max_position_embeddings": llm.get("max_position_embeddings") or llm["max_sequence_length"],
        "rope_parameters": rope,
        "rope_scaling_layers": scaled_layers,
        "rms_norm_eps": llm["layer_norm_eps"],
        "norm_after": llm["norm_after"],
        "tie_word_embeddings": False,
    }


def _vision_config(config: Mapping[str, Any]) -> dict[str, Any]:
    vit = config["vision_backbone"]["vit"]
    video = config["mm_preprocessor"]["video"]
    vision_config = {
        "hidden_size": vit["image_emb_dim"],
        "intermediate_size": vit["image_mlp_dim"],
        "num_hidden_layers": max(_feature_layers(config)) + 1,
        "num_attention_heads": vit["image_num_heads"],
        "num_key_value_heads": vit["image_num_key_value_heads"],
        "head_dim": vit["image_head_dim"],
        "hidden_act": vit["image_mlp_activations"],
        "layer_norm_eps": vit["image_norm_eps"],
        "image_size": list(vit["image_default_input_size"]),
        "patch_size": vit["image_patch_size"],
        "num_position_embeddings": vit["image_num_pos"],
        "pooling_size": [video["pooling_h"], video["pooling_w"]],
    }
    if not vit.get("prune"):
        return vision_config
    if vit["prune_method"] not in SELECTORS:
        raise ValueError(f"`vision_backbone.vit.prune_method` is {vit['prune_method']!r}, none of {list(SELECTORS)}")
    return vision_config | {
        "pruning_ratio": vit["topk"],
        "pruning_layer": vit["prune_at"],
        "selector": SELECTORS[vit["prune_method"]],
        "score_rescaling": "row",
        "packing": "first_fit_descending",
        "refill_single_frame_bins": True,
    }


def _adapter_config(config: Mapping[str, Any]) -> dict[str, Any]:
    vit, llm = config["vision_backbone"]["vit"], config["llm"]
    return {
        "vision_feature_layer": _feature_layers(config),
        "hidden_size": vit["image_emb_dim"],
        "num_attention_heads": vit["image_num_heads"],
        "num_key_value_heads": vit["image_num_key_value_heads"],
        "head_dim": vit["image_head_dim"],
        "hidden_act": "silu",
        "intermediate_size": _intermediate_size(llm),
        "text_hidden_size": llm["d_model"],
    }


def _feature_layers(config: Mapping[str, Any]) -> list[int]:
    num_layers, layers = config["vision_backbone"]["vit"]["image_num_layers"], config["vision_backbone"]["vit_layers"]
    if not layers or not all(isinstance(layer, int) and -num_layers <= layer < num_layers for layer in layers):
        raise ValueError(
            f"`vision_backbone.vit_layers` is {layers!r}, but must be a list of the {num_layers} layers of "
            "`vision_backbone.vit`"
        )
    return [layer % num_layers for layer in layers]


def _intermediate_size(llm: Mapping[str, Any]) -> int:
    # One fused matrix holds gate and up projection.
    return (llm.get("mlp_hidden_size") or int(llm["mlp_ratio"] * llm["d_model"])) // 2
