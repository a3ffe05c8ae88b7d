"""Original training checkpoints of Molmo2 and STTS: their weights and their settings, in transformers' terms."""

import math
import pickle
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]

from .sharded import METADATA_FILE, ShardedStateDict

UNSHARDED_FILE = "model.pt"
SHARDED_FOLDER = "model_and_optim"

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

# Settings of the original code that native Molmo2 cannot express otherwise: (section, key) -> the only value it has.
_FIXED_SETTINGS: dict[tuple[str, ...], Any] = {
    ("llm", "block_type"): "sequential",
    ("llm", "layer_norm_type"): "rms",
    ("llm", "activation_type"): "swiglu",
    ("llm", "attention_layer_norm"): True,
    ("llm", "rope"): True,
    ("llm", "include_bias"): False,
    ("llm", "scale_logits"): False,
    ("llm", "normalize_input_embeds"): False,
    ("llm", "clip_qkv"): None,
    ("vision_backbone", "vit", "image_model_type"): "siglip",
    ("vision_backbone", "image_pooling_2d"): "attention_meanq",
    ("vision_backbone", "image_projector"): "mlp",
    ("vision_backbone", "image_padding_embed"): None,
    ("vision_backbone", "pooling_attention_mask"): True,
    ("vision_backbone", "use_deepstack"): False,
    ("bi_directional_attn",): "image_tokens",
}
# The same for the pruning settings, which count only where pruning is on.
_FIXED_PRUNING_SETTINGS: dict[tuple[str, ...], Any] = {
    ("vision_backbone", "vit", "merge"): False,
    ("vision_backbone", "vit", "prune_from_frame"): 0,
    ("vision_backbone", "vit", "pruning_in_scorer"): True,
    ("vision_backbone", "vit", "rescale_bias_min"): math.exp(-2),
}

_KINDS: dict[tuple[str, ...], tuple[type, ...]] = {
    ("llm",): (dict,),
    ("llm", "d_model"): (int,),
    ("llm", "n_heads"): (int,),
    ("llm", "n_layers"): (int,),
    ("llm", "rope_theta"): (float, int),
    ("vision_backbone",): (dict,),
    ("vision_backbone", "vit_layers"): (list,),
    ("vision_backbone", "vit"): (dict,),
    ("vision_backbone", "vit", "image_num_layers"): (int,),
    ("vision_backbone", "vit", "image_default_input_size"): (list, tuple),
    ("mm_preprocessor",): (dict,),
    ("mm_preprocessor", "video"): (dict,),
}
_KIND_NAMES = {dict: "a section", int: "a whole number", float: "a number", list: "a list", tuple: "a list"}

_VIT_LAYER = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention_norm": "layer_norm1",
    "ffn_norm": "layer_norm2",
    "feed_forward.w1": "mlp.fc1",
    "feed_forward.w2": "mlp.fc2",
}
_TEXT_LAYER = {
    "attn_norm": "input_layernorm",
    "ff_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "attn_out": "self_attn.o_proj",
    "ff_out": "mlp.down_proj",
}
_ATTENTION = {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj"}
_EXTRA_EMBEDDING = "transformer.wte.new_embedding"
_ORIGINAL_SCORER = "vision_backbone.image_vit.transformer.temporal_token_scorer"
_MODULES = {
    "transformer.ln_f": "model.language_model.norm",
    "transformer.ff_out": "lm_head",
    "vision_backbone.image_vit.patch_embedding": "model.vision_tower.patch_embedding",
    "vision_backbone.image_projector.w1": "model.multi_modal_projector.image_projector.gate_proj",
    "vision_backbone.image_projector.w2": "model.multi_modal_projector.image_projector.down_proj",
    "vision_backbone.image_projector.w3": "model.multi_modal_projector.image_projector.up_proj",
    f"{_ORIGINAL_SCORER}.mlp.w1": "model.vision_tower.scorer.input_layer",
    f"{_ORIGINAL_SCORER}.mlp.w2": "model.vision_tower.scorer.hidden_layer",
    f"{_ORIGINAL_SCORER}.mlp.w3": "model.vision_tower.scorer.score_layer",
}
for _old, _new in _ATTENTION.items():
    _MODULES[f"vision_backbone.image_pooling_2d.{_old}"] = f"model.multi_modal_projector.image_pooling_2d.{_new}"
    _MODULES[f"{_ORIGINAL_SCORER}.patch_token_pooler.{_old}"] = f"model.vision_tower.scorer.token_pooler.{_new}"

_NUMBERED = {
    re.compile(r"vision_backbone\.image_vit\.transformer\.resblocks\.(\d+)\.(.+)"): (
        "model.vision_tower.layers",
        _VIT_LAYER,
    ),
    re.compile(r"transformer\.blocks\.(\d+)\.(.+)"): ("model.language_model.layers", _TEXT_LAYER),
}


def open_original_state_dict(folder: Path | str) -> Mapping[str, torch.Tensor]:
    """The model's tensors under their original names, from either form, each in memory only while it is used.

    Args:
        folder: holds `model.pt` (unsharded), or `model_and_optim/` in torch.distributed.checkpoint format.

    Raises `ValueError` where neither is there, or where either holds anything but tensors: no code is ever unpickled.
    """
    folder = Path(folder)
    if (folder / SHARDED_FOLDER / METADATA_FILE).is_file():
        return ShardedStateDict(folder / SHARDED_FOLDER, prefix="model.")
    path = folder / UNSHARDED_FILE
    if not path.is_file():
        raise ValueError(
            f"`folder` is {str(folder)!r}, which holds neither {UNSHARDED_FILE} nor {SHARDED_FOLDER}/{METADATA_FILE}: "
            "name the folder of an original training checkpoint."
        )
    try:
        state_dict = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        # torch's own text advises to load it with code and all.
        found = re.search(r"GLOBAL:? (\S+)", str(error))
        reason = f"refers to `{found[1]}`" if found else "holds more than tensors"
        raise ValueError(
            f"{path} was refused: it {reason}, and only tensors are ever unpickled. Save it again as a plain dict of "
            "tensors, if you trust where it came from."
        ) from error
    except (RuntimeError, EOFError) as error:
        raise ValueError(
            f"{path} was refused: it is cut off, or not of torch.save's zip format. Copy it again."
        ) from error
    if not isinstance(state_dict, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in state_dict.items()
    ):
        raise ValueError(
            f"{path} must hold a dict of names and tensors, the model's state dict alone: save it as that."
        )
    return state_dict


def load_original_config(folder: Path | str) -> dict:
    """The `model` section of the checkpoint's `config.yaml`. Raises `ValueError` where there is none."""
    path = Path(folder) / "config.yaml"
    if not path.is_file():
        raise ValueError(f"{path} is missing: an original training checkpoint has one beside its weights.")
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    model = config.get("model") if isinstance(config, dict) else None
    if not isinstance(model, dict):
        raise ValueError(f"{path} has no `model` section: it is not the config of a training checkpoint.")
    return model


def original_parts(names: Iterable[str]) -> dict[str, list[str]]:
    """What the weights are made of: native name to the original tensors whose rows, joined, are that weight's.

    A fused tensor stands under the first weight it holds (`q_proj`, `up_proj`), and is followed by the others.
    Raises `ValueError` naming every key that is not known.
    """
    parts: dict[str, list[str]] = {}
    for name, target in _targets(names).items():
        if target == "embedding":
            parts["model.language_model.embed_tokens.weight"] = [name]
            parts.setdefault("lm_head.weight", [name])  # tied in training, unless it has a head of its own
        elif target == "lm_head.weight":
            parts[target] = [name]
        elif target != "extra embedding":
            parts[target.replace(".att_proj", ".q_proj").replace(".ff_proj", ".up_proj")] = [name]
    if _EXTRA_EMBEDDING in names:
        parts["model.language_model.embed_tokens.weight"].append(_EXTRA_EMBEDDING)
    return parts


def convert_original_config(config: Mapping[str, Any], special_token_ids: Mapping[str, int]) -> dict[str, Any]:
    """Keyword arguments of `STTSConfig` for the `model` section of an original `config.yaml`.

    A checkpoint trained with pruning brings its ratio, layer and method, and is given the released code's layout
    (first-fit-descending with refill). Without pruning, those fields are left to their defaults.

    Args:
        config: from `load_original_config`.
        special_token_ids: id of every token in `SPECIAL_TOKENS`, by its text; the YAML does not have them.

    Raises `ValueError` naming every setting that native Molmo2 or STTS cannot express, or one that is missing or of a
    wrong kind.
    """
    missing = [token for token in SPECIAL_TOKENS.values() if token not in special_token_ids]
    if missing:
        raise ValueError(f"`special_token_ids` lacks {', '.join(missing)}: take the ids from the tokenizer.")
    _check_kinds(config)
    try:
        vit = config["vision_backbone"]["vit"]
        _check_settings(config, _FIXED_SETTINGS | (_FIXED_PRUNING_SETTINGS if vit.get("prune") else {}))
        return {
            "text_config": _text_config(config["llm"]),
            "vision_config": _vision_config(config),
            "adapter_config": _adapter_config(config),
            **{field: special_token_ids[token] for field, token in SPECIAL_TOKENS.items()},
            **({"temporal_loss_weight": vit["sim_reg_loss_coefficient"]} if vit.get("prune") else {}),
            "initializer_range": config["llm"].get("initializer_range", 0.02),
        }
    except KeyError as error:
        raise ValueError(f"it lacks {error} in its `model` section") from error


def _targets(names: Iterable[str]) -> dict[str, str]:
    """`_target` of every name; raises `ValueError` where some are not known."""
    targets, unexpected = {}, []
    for name in names:
        target = _target(name)
        if target is None:
            unexpected.append(name)
        else:
            targets[name] = target
    if _EXTRA_EMBEDDING in targets and "transformer.wte.embedding" not in targets:
        unexpected.append(_EXTRA_EMBEDDING)
    if unexpected:
        raise ValueError(f"The checkpoint has {len(unexpected)} unexpected keys: {', '.join(sorted(unexpected))}.")
    return targets


def _target(name: str) -> str | None:
    """Native name of one original tensor, the name of a rule for the fused ones, None for an unknown key."""
    if name == "transformer.wte.embedding":
        return "embedding"
    if name == _EXTRA_EMBEDDING:
        return "extra embedding"
    if name == "vision_backbone.image_vit.positional_embedding":
        return "model.vision_tower.positional_embedding"
    module, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        return None
    if module in _MODULES:
        return f"{_MODULES[module]}.{kind}"
    for pattern, (layers, names) in _NUMBERED.items():
        if match := pattern.fullmatch(module):
            index, part = match.groups()
            if names is _TEXT_LAYER and part == "att_proj":
                return f"{layers}.{index}.self_attn.att_proj.{kind}"
            if names is _TEXT_LAYER and part == "ff_proj" and kind == "weight":
                return f"{layers}.{index}.mlp.ff_proj.weight"
            return f"{layers}.{index}.{names[part]}.{kind}" if part in names else None
    return None


def _check_kinds(config: Mapping[str, Any]) -> None:
    """Raises `ValueError` for settings of a wrong kind among those that are reckoned with below."""
    for path, kinds in _KINDS.items():
        value: Any = config
        for key in path:
            value = value.get(key) if key in value else NotImplemented
            if value is NotImplemented:  # missing, which is another error
                break
        else:
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise ValueError(f"`{'.'.join(path)}` is {value!r}, but must be {_KIND_NAMES[kinds[0]]}")


def _check_settings(config: Mapping[str, Any], fixed: Mapping[tuple[str, ...], Any]) -> None:
    wrong = []
    for path, expected in fixed.items():
        value: Any = config
        for key in path:
            value = value.get(key, expected) if isinstance(value, Mapping) else expected
        same = math.isclose(value, expected) if isinstance(expected, float) else value == expected
        if not same:
            wrong.append(f"`{'.'.join(path)}` is {value!r}, but must be {expected!r}")
    if wrong:
        raise ValueError("; ".join(wrong))


def _text_config(llm: Mapping[str, Any]) -> dict[str, Any]:
    rope = {"rope_type": llm.get("rope_type") or "default", "rope_theta": llm["rope_theta"]}
    if rope["rope_type"] != "default":
        scaling = {key.removeprefix("rope_"): value for key, value in llm.items() if key.startswith("rope_")}
        not_scaling = ("type", "theta", "full_precision")
        rope |= {key: value for key, value in scaling.items() if value is not None and key not in not_scaling}
    full_layers = llm.get("full_attention_layers")
    scaled_layers = full_layers
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
        "initializer_range": llm.get("initializer_range", 0.02),
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
        "initializer_range": vit.get("initializer_range", 0.02),
        "pooling_size": [video["pooling_h"], video["pooling_w"]],
    }
    if not vit.get("prune"):
        return vision_config
    if vit["prune_method"] not in SELECTORS:
        raise ValueError(
            f"`vision_backbone.vit.prune_method` is {vit['prune_method']!r}, but must be one of {list(SELECTORS)}"
        )
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
        "initializer_range": llm.get("initializer_range", 0.02),
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
