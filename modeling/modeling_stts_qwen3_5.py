"""STTS on Qwen3.5: Qwen3-VL's tower without deepstack, before a text model most of whose layers are recurrent.

A recurrent layer keeps a state instead of keys and values. What it has read stays in the state: masked filler between
tokens changes it, cached columns can be neither hidden nor cut off, and samples of a row cannot be told apart. So
filler stands in front of a row alone, and whatever would need something else is refused.
"""

from typing import Any

import torch
from transformers import GenerationMixin
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5ForConditionalGeneration,
    Qwen3_5Model,
    Qwen3_5TextModel,
)

from .configuration_stts_qwen3_5 import STTSQwen3_5Config
from .mrope_stts import MropeBackbone
from .outputs_stts import PruningHead
from .pruning_stts import Call
from .vision_stts_qwen3_vl import STTSQwen3VLVisionModel


class STTSQwen3_5Model(MropeBackbone, Qwen3_5Model):
    """Qwen3.5 without a head, whose videos lose the blocks of least score."""

    config: STTSQwen3_5Config
    visual: STTSQwen3VLVisionModel
    native = Qwen3_5Model
    tower = STTSQwen3VLVisionModel
    text_class = Qwen3_5TextModel

    def read_call(self, call: Call, kwargs: dict[str, Any]) -> None:
        """
        As in `PruningBackbone`; beside videos and images, where a cache is to be filled, padding on the right moves to
        the left. Raises `ValueError` for packed rows, and for a cache that was made for other layers.
        """
        super().read_call(call, kwargs)
        if call.packed_rows:
            raise ValueError(
                "`position_ids` start over (`packed_rows`): a row holds several samples, but recurrent layers would "
                "carry the state of one sample into the next. Pass each sample as a row of its own."
            )
        if call.cache is not None and not any(getattr(call.cache, "is_linear", ())):
            raise ValueError(
                "`past_key_values` has no recurrent layers: make it with `DynamicCache(config=model.config)`, or leave "
                "it out."
            )
        mask, fills = call.tokens.padding_mask, call.cache is not None or kwargs.get("use_cache")
        if fills and call.vision and mask is not None:
            call.pads_left = not bool(mask[:, -1].all())

    def native_forward(self, mm_token_type_ids: torch.Tensor | None = None, **arguments: Any) -> Any:
        """
        As in `MropeBackbone`; rows that end in padding leave no cache. Raises `ValueError` where one would hold filler
        behind tokens.
        """
        embeddings = arguments.get("inputs_embeds")
        given: Any = arguments.get("input_ids") if embeddings is None else embeddings
        mask = arguments.get("attention_mask") if given.shape[1] > 1 and not torch.compiler.is_compiling() else None
        if isinstance(mask, torch.Tensor) and mask.dim() == 2 and bool((mask.long().diff() < 0).any()):
            if arguments.get("past_key_values") is not None or arguments.get("use_cache"):
                raise ValueError(
                    "`attention_mask` hides tokens behind others in a row, but beside a cache it may hide only the "
                    "beginning: recurrent layers cannot skip what follows. Pad on the left, and call rows of unequal "
                    "length behind a cache, or whose answer ended early, one by one."
                )
            arguments["use_cache"] = False
        return super().native_forward(mm_token_type_ids, **arguments)


class STTSQwen3_5ForConditionalGeneration(PruningHead, Qwen3_5ForConditionalGeneration, GenerationMixin):
    """Qwen3.5 with video token pruning inside the ViT and the LLM; loads stock Qwen3.5 weights too."""

    config: STTSQwen3_5Config
    model: STTSQwen3_5Model
    native = Qwen3_5ForConditionalGeneration
    backbone = STTSQwen3_5Model


__all__ = ["STTSQwen3_5ForConditionalGeneration", "STTSQwen3_5Model"]
