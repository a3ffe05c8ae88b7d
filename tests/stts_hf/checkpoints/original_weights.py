"""Original training checkpoints in native names, written rule by rule: the yardstick of what conversion writes.

It reads with torch's own readers and keeps all in memory, and shares nothing with `stts_hf.checkpoints`.
"""

import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, Metadata, load
from torch.distributed.checkpoint.metadata import TensorProperties

Weights = dict[str, torch.Tensor]
# Applied one after another to every name; the longer pattern first where one holds another.
RENAMES = (
    (r"^vision_backbone\.image_vit\.transformer\.temporal_token_scorer\.", "model.vision_tower.scorer."),
    (r"\.scorer\.patch_token_pooler\.w([qkvo])\b", r".scorer.token_pooler.\1_proj"),
    (r"\.scorer\.mlp\.w1\b", ".scorer.input_layer"),
    (r"\.scorer\.mlp\.w2\b", ".scorer.hidden_layer"),
    (r"\.scorer\.mlp\.w3\b", ".scorer.score_layer"),
    (r"^vision_backbone\.image_vit\.transformer\.resblocks\.", "model.vision_tower.layers."),
    (r"^vision_backbone\.image_vit\.", "model.vision_tower."),
    (r"^vision_backbone\.image_pooling_2d\.w([qkvo])\b", r"model.multi_modal_projector.image_pooling_2d.\1_proj"),
    (r"^vision_backbone\.image_projector\.w1\b", "model.multi_modal_projector.image_projector.gate_proj"),
    (r"^vision_backbone\.image_projector\.w2\b", "model.multi_modal_projector.image_projector.down_proj"),
    (r"^vision_backbone\.image_projector\.w3\b", "model.multi_modal_projector.image_projector.up_proj"),
    (r"\.attention\.w([qkvo])\b", r".self_attn.\1_proj"),
    (r"\.attention_norm\b", ".layer_norm1"),
    (r"\.ffn_norm\b", ".layer_norm2"),
    (r"\.feed_forward\.w([12])\b", r".mlp.fc\1"),
    (r"^transformer\.ln_f\b", "model.language_model.norm"),
    (r"^transformer\.blocks\.", "model.language_model.layers."),
    (r"\.attn_norm\b", ".input_layernorm"),
    (r"\.ff_norm\b", ".post_attention_layernorm"),
    (r"\.([qk])_norm\b", r".self_attn.\1_norm"),
    (r"\.attn_out\b", ".self_attn.o_proj"),
    (r"(?<=\d)\.ff_out\b", ".mlp.down_proj"),
)  # fmt: skip


class AnyTensorProperties(TensorProperties):
    """What another torch wrote: 2.15 pickles one entry more than 2.14 reads. Loading needs none of them but dtype."""

    def __setstate__(self, state: tuple) -> None:
        self.__init__(dtype=state[0])  # type: ignore[misc]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return AnyTensorProperties if name == "TensorProperties" else super().find_class(module, name)


class AnyVersionReader(FileSystemReader):
    """torch's own reader, which reads what newer and older torch wrote."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            return _Unpickler(file).load()


def read_original(folder: Path) -> Weights:
    """All tensors of an original training checkpoint, of either form, under their original names."""
    if (folder / "model.pt").is_file():
        return torch.load(folder / "model.pt", weights_only=True)
    reader = AnyVersionReader(folder / "model_and_optim")
    found: dict[str, Any] = reader.read_metadata().state_dict_metadata
    weights = {name: torch.empty(found[name].size) for name in found if name.startswith("model.")}
    load(weights, storage_reader=reader, no_dist=True)
    return {name.removeprefix("model."): tensor for name, tensor in weights.items()}


def native_weights(original: Weights) -> Weights:
    """The same as native Molmo2 and the scorer have them: projections apart, one embedding, a head of its own."""
    native = {}
    for name, tensor in original.items():
        if name.startswith("transformer.wte."):
            continue
        target = name
        for pattern, replacement in RENAMES:
            target = re.sub(pattern, replacement, target)
        if ".att_proj." in target:
            queries = original[name[: name.index("att_proj")] + "attn_out.weight"].shape[1]
            others = (len(tensor) - queries) // 2
            for letter, part in zip("qkv", tensor.split([queries, others, others]), strict=True):
                native[target.replace("att_proj", f"self_attn.{letter}_proj")] = part
        elif ".ff_proj." in target:
            for half, part in zip(("up", "gate"), tensor.chunk(2), strict=True):
                native[target.replace("ff_proj", f"mlp.{half}_proj")] = part
        else:
            native[target] = tensor
    embedding = original["transformer.wte.embedding"]
    native["model.language_model.embed_tokens.weight"] = torch.cat(
        [embedding, original["transformer.wte.new_embedding"]]
    )
    native["lm_head.weight"] = embedding  # tied in training
    return native
