"""Shared by backbones whose text layers are mostly recurrent.

A recurrent layer keeps a state instead of keys and values. What it has read stays in the state: masked filler between
tokens changes it, cached columns can be neither hidden nor cut off, and samples of a row cannot be told apart. So
filler stands in front of a row alone, and whatever would need something else is refused. Only the kernels of two
packages, on a GPU, begin a sample of a packed row with a new state.
"""

from typing import Any, ClassVar

import torch
from transformers.utils.import_utils import is_causal_conv1d_available, is_flash_linear_attention_available

from .mrope_stts import MropeBackbone
from .pruning_stts import Call, PrunedInputs

HAS_KERNELS = is_flash_linear_attention_available() and is_causal_conv1d_available()


class RecurrentBackbone(MropeBackbone):
    """Mixin for the model without a head."""

    refuses_packed_rows: ClassVar[str | None] = (
        None
        if HAS_KERNELS
        else "recurrent layers would carry the state of one sample into the next without the kernels of "
        "`flash-linear-attention` and `causal-conv1d`, which need a GPU"
    )

    def read_call(self, call: Call, kwargs: dict[str, Any]) -> None:
        """
        As in `PruningBackbone`; beside videos and images, where a cache is to be filled, padding on the right moves to
        the left. Raises `ValueError` for packed rows, and for a cache that was made for other layers.
        """
        super().read_call(call, kwargs)
        if call.packed_rows and (self.refuses_packed_rows or call.tokens.shape[0] > 1):
            one = f"the kernels of recurrent layers take one such row a call, not {call.tokens.shape[0]}"
            raise ValueError(
                "`position_ids` start over (`packed_rows`): a row holds several samples, but "
                f"{self.refuses_packed_rows or one}. Pass one sample per row."
            )
        if call.cache is not None and not any(getattr(call.cache, "is_linear", ())):
            raise ValueError(
                "`past_key_values` has no recurrent layers: make it with `DynamicCache(config=model.config)`, or leave "
                "it out."
            )
        mask, fills = call.tokens.padding_mask, call.cache is not None or kwargs.get("use_cache")
        if fills and call.vision and mask is not None:
            call.pads_left = not bool(mask[:, -1].all())

    def merge(self, call: Call, pruned: PrunedInputs) -> dict[str, Any]:
        """As in `MropeBackbone`; of a packed row also where its samples begin, as the kernels take it."""
        arguments = super().merge(call, pruned)
        if not call.packed_rows:
            return arguments
        starts = arguments["position_ids"][0] == 0  # (1, L')
        ends = starts.new_ones(1, 1)  # of the last sample
        borders = torch.cat([starts, ends], -1)[0].nonzero()[:, 0]
        return arguments | {"cu_seq_lens_q": borders.int(), "seq_idx": (starts.cumsum(-1) - 1).int()}

    def native_forward(self, **arguments: Any) -> Any:
        """
        As in `MropeBackbone`. Rows that end in padding leave no cache. In training mode a call leaves one only if it
        asks for it or is given one; otherwise it does not read the mask. Raises `ValueError` where a cache
        would hold filler behind tokens.
        """
        mask = None if torch.compiler.is_compiling() else arguments.get("attention_mask")
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
