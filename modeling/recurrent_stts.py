"""Shared by backbones whose text layers are mostly recurrent.

A recurrent layer keeps a state instead of keys and values. What it has read stays in the state: masked filler between
tokens changes it, cached columns can be neither hidden nor cut off, and samples of a row cannot be told apart. So
filler stands in front of a row alone, and whatever would need something else is refused.
"""

from typing import Any

import torch

from .mrope_stts import MropeBackbone
from .pruning_stts import Call


class RecurrentBackbone(MropeBackbone):
    """Mixin for the model without a head."""

    refuses_packed_rows = "recurrent layers would carry the state of one sample into the next"

    def read_call(self, call: Call, kwargs: dict[str, Any]) -> None:
        """
        As in `PruningBackbone`; beside videos and images, where a cache is to be filled, padding on the right moves to
        the left. Raises `ValueError` for packed rows, and for a cache that was made for other layers.
        """
        super().read_call(call, kwargs)
        if call.packed_rows:
            raise ValueError(
                "`position_ids` start over (`packed_rows`): a row holds several samples, but "
                f"{self.refuses_packed_rows}. Pass one sample per row."
            )
        if call.cache is not None and not any(getattr(call.cache, "is_linear", ())):
            raise ValueError(
                "`past_key_values` has no recurrent layers: make it with `DynamicCache(config=model.config)`, or leave "
                "it out."
            )
        mask, fills = call.tokens.padding_mask, call.cache is not None or kwargs.get("use_cache")
        if fills and call.vision and mask is not None:
            call.pads_left = not bool(mask[:, -1].all())

    def native_forward(self, **arguments: Any) -> Any:
        """
        As in `MropeBackbone`. Rows that end in padding leave no cache. In training mode a call leaves one only if it
        asks for it or is given one; otherwise it does not read the mask. Raises `ValueError` where a cache
        would hold filler behind tokens.
        """
        embeddings = arguments.get("inputs_embeds")
        given: Any = arguments.get("input_ids") if embeddings is None else embeddings
        mask = arguments.get("attention_mask") if given.shape[1] > 1 and not torch.compiler.is_compiling() else None
        fills = arguments.get("past_key_values") is not None or arguments.get("use_cache")
        if not fills and self.training:
            arguments["use_cache"] = False
        elif isinstance(mask, torch.Tensor) and mask.dim() == 2 and bool((mask.long().diff() < 0).any()):
            if fills:
                raise ValueError(
                    "`attention_mask` hides tokens behind others in a row, but beside a cache it may hide only the "
                    "beginning: recurrent layers cannot skip what follows. Pad on the left, and call rows of unequal "
                    "length behind a cache, or whose answer ended early, one by one."
                )
            arguments["use_cache"] = False
        return super().native_forward(**arguments)
