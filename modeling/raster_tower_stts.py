"""Towers that take frames of one size, whose patches come row by row, with separate projections of queries and keys.

`frames -> embed, (F, N, D) -> gather block by block -> encode_blocks -> norm -> (K, S, D) of the kept blocks`. A table
says which patches a block has, -1 for padding. `tower_stts` has the pass.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
from torch import nn

from .attention_stts import AttentionSpans
from .plan_stts import PruningPlan, VideoFeatures
from .tower_stts import PruningTower, SpanLayer


@dataclass
class RasterOutput(VideoFeatures):
    """
    `VideoFeatures` before the connector. features: (K, S, D * feature layers), the patches of kept blocks. valid: (K,
    S) bool or None, False for padding. hidden_states: (F, N, D) up to the pruning layer and (P, D) after it.
    """

    features: torch.Tensor = None  # type: ignore[assignment]  # `ModelOutput` wants a default
    valid: torch.Tensor | None = None

    def connected(self, tokens: torch.Tensor, plan: PruningPlan) -> VideoFeatures:
        """The same behind the connector, whose tokens are (K, text hidden size)."""
        shared = {name: value for name, value in self.items() if name in VideoFeatures.__dataclass_fields__}
        return VideoFeatures(**shared, pooler_output=tokens.split(plan.num_kept))


@dataclass
class RasterPlan(PruningPlan):
    """feature_layers: layers whose outputs the connector takes, not negative; the last one where it is empty."""

    feature_layers: list[int] = field(default_factory=list)

    def check_blocks(self, num_patches: int) -> None:
        """Raises `ValueError` where a video's blocks have fewer slots than its frames have patches (`N`)."""
        window_size = self.block_patches.shape[1]
        for _, rows, cols in self.grids:
            if rows * cols * window_size < num_patches:
                raise ValueError(
                    f"`video_grids` has {rows} x {cols} blocks of {window_size} patches, too few for the {num_patches} "
                    "patches of a frame. The video processor's `size`, `patch_size` and block size must be those of "
                    "`vision_config`, and blocks must cover a frame without a rest."
                )


class RasterSpanLayer(SpanLayer):
    """`SpanLayer` with separate projections of queries, keys and values; only the embeddings hold positions."""

    names = ("layer_norm1", "self_attn", "o_proj", "layer_norm2")
    self_attn: Any

    def project(
        self, states: torch.Tensor, queries: torch.Tensor | None, *rotation: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        attention, groups = self.self_attn, getattr(self.self_attn, "num_key_value_groups", 1)
        query = attention.q_proj(states if queries is None else states[queries])
        key, value = attention.k_proj(states), attention.v_proj(states)
        query, key, value = (part.unflatten(-1, (-1, attention.head_dim)) for part in (query, key, value))
        if groups > 1:
            key, value = key.repeat_interleave(groups, dim=-2), value.repeat_interleave(groups, dim=-2)
        return query, key, value


class RasterTower(PruningTower):
    """
    Mixin for a native tower over frames of one size.

    layer: class of the layers, a `RasterSpanLayer`. layers_name: where the native tower has them. norm_name: of the
    norm behind the last layer, or "".
    """

    layer: ClassVar[Any]
    layers_name: ClassVar[str] = "layers"
    norm_name: ClassVar[str] = ""
    # Hook: patches of frames with their positions, (F, N, D), row by row.
    embed: Callable[[torch.Tensor], torch.Tensor]

    def __init__(self, config: Any):
        config.validate_pruning()  # fields may have been set since construction
        super().__init__(config)
        layers = nn.ModuleList([self.layer(config) for _ in range(config.num_hidden_layers)])
        self.set_submodule(self.layers_name, layers)
        head_dim = getattr(config, "head_dim", None)
        self.add_scorer(config.hidden_size, config.intermediate_size, config.num_attention_heads, head_dim)
        self.post_init()

    def forward(self, pixel_values: torch.Tensor, pruning: RasterPlan | None = None, **kwargs: Any) -> Any:
        """
        pixel_values: frames (F, ...). Without `pruning` as in the native model; with it, frames of videos: returns a
        `RasterOutput`, with the layers' outputs where `output_hidden_states` asks for them. Raises `ValueError` where
        the blocks of `pruning` leave out patches, and as `check_call`.
        """
        if pruning is None:
            native: Any = super()
            return native.forward(pixel_values, **kwargs)
        returns_states, table = self.check_call(kwargs), pruning.block_patches
        embedded = [self.embed(pixel_values)]  # without a name, so as not to lie beside the layers' states to the end
        frames, num_patches, width = embedded[0].shape
        pruning.check_blocks(num_patches)
        valid = table >= 0 if table.numel() > frames * num_patches else None
        lengths = [table.shape[1] * rows * cols for num_frames, rows, cols in pruning.grids for _ in range(num_frames)]
        spans, index = [AttentionSpans.of_lengths(lengths, table.device)], table.flatten().clamp_min(0)
        layers = cast(nn.ModuleList, self.get_submodule(self.layers_name))
        taps = pruning.feature_layers or [len(layers) - 1]
        layers = layers[: 1 + max(*taps, self.config.pruning_layer + 1)]  # up to the one that prunes
        found, kept, states, tapped = self.encode_blocks(
            embedded.pop().flatten(0, 1)[index], layers, taps, returns_states, pruning, spans, valid=valid
        )
        if returns_states:
            raster = table.flatten().argsort()[table.numel() - frames * num_patches :]  # padding slots are -1
            last = self.config.pruning_layer + 1  # of those that hold all patches
            whole = tuple(part[raster].view(frames, num_patches, width) for part in states[: last + 1])
            found["hidden_states"] = whole + states[last + 1 :]
        if self.norm_name:
            tapped[-1] = self.get_submodule(self.norm_name)(tapped[-1])
        features = torch.cat(tapped, dim=-1).unflatten(0, (-1, table.shape[1]))  # (K, S, D * feature layers)
        if valid is not None:
            valid = valid[kept]
            features = features * valid[..., None].to(features.dtype)
        return RasterOutput(**found, features=features, valid=valid)
