"""Towers that take patches of all videos in one flat sequence, block by block, beside grids.

Patches attend within their frame, or in some layers within their window of it: a window is a span of the same sequence,
whose blocks then lie window by window. `tower_stts` has the pass.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import nn
from transformers.vision_utils import get_vision_position_ids

from .attention_stts import AttentionSpans
from .plan_stts import PruningPlan, VideoFeatures
from .tower_stts import PruningTower, SpanLayer, reorder


class PatchProjection(nn.Conv3d):
    """The native embedding of patches; of flat ones, (P, values), as the matrix product that it is: much faster."""

    @classmethod
    def like(cls, native: Any) -> "PatchProjection":
        bias = native.bias is not None
        return cls(native.in_channels, native.out_channels, native.kernel_size, native.stride, bias=bias)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) if input.dim() > 2 else F.linear(input, self.weight.flatten(1), self.bias)


class RotarySpanLayer(SpanLayer):
    """`SpanLayer` with one projection for queries, keys and values, and rotary positions."""

    rotate: Callable[..., tuple[torch.Tensor, torch.Tensor]]  # native: query, key, cosines, sines
    attn: Any

    def project(
        self, states: torch.Tensor, queries: torch.Tensor | None, *rotation: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query, key, value = self.attn.qkv(states).unflatten(-1, (3, self.attn.num_heads, -1)).unbind(-3)
        query, key = self.rotate(query, key, *rotation)
        return query if queries is None else query[queries], key, value


class FlatTower(PruningTower):
    """Mixin for a native tower whose `blocks` are `RotarySpanLayer`s."""

    block: ClassVar[Any]  # class of `blocks`
    blocks: nn.ModuleList
    patch_embed: Any
    pos_embed: nn.Embedding  # in native towers that have learned positions
    rotary_pos_emb: Any
    merger: Any
    spatial_merge_size: int
    spatial_merge_unit: int
    deepstack_visual_indexes: Any = ()  # of layers, in native towers that have deepstack, if only an empty list
    deepstack_merger_list: Any

    def __init__(self, config: Any):
        config.validate_pruning()  # fields may have been set since construction
        super().__init__(config)
        self.patch_embed.proj = PatchProjection.like(self.patch_embed.proj)
        self.blocks = nn.ModuleList([self.block(config) for _ in range(config.depth)])
        self.add_scorer(config.hidden_size, config.intermediate_size, config.num_heads)
        self.post_init()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """As in PyTorch, but `model.to(dtype)` does not round RoPE's frequencies: other blocks would rank lowest."""
        exact = dict(self.rotary_pos_emb.named_buffers())
        super()._apply(fn, recurse)
        for name, moved in list(self.rotary_pos_emb.named_buffers()):
            if moved.dtype != exact[name].dtype:
                setattr(self.rotary_pos_emb, name, exact[name].to(moved.device))
        return self

    def place_patches(self, grids: list[tuple[int, int, int]]) -> tuple[torch.Tensor, ...]:
        """
        Of the patches of one frame of each video, which are those of all its frames, on the host: rows and columns,
        (N of all, 2), and of learned positions, rows of their table and weights of these, (N of all, 4) each.
        """
        return (get_vision_position_ids(self.one_frame_each(grids), self.spatial_merge_size),)

    def cut_windows(
        self, grids: list[tuple[int, int, int]], device: torch.device
    ) -> tuple[torch.Tensor, AttentionSpans] | None:
        """Blocks (G,) window by window, frame by frame, and the windows' spans of patches; None without windows."""
        return None

    def one_frame_each(self, grids: list[tuple[int, int, int]]) -> torch.Tensor:
        """Grids (V, 3) in patches of one frame of each video, on the host."""
        return torch.tensor([[1, self.spatial_merge_size * r, self.spatial_merge_size * c] for _, r, c in grids])

    def embed(
        self, pixel_values: torch.Tensor, grids: list[tuple[int, int, int]], drops: bool
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Patches (F * N, D) with learned positions, and rotary angles; to the native rounding if nothing drops."""
        sizes = [self.spatial_merge_unit * rows * cols for _, rows, cols in grids]

        def repeat(states: torch.Tensor) -> torch.Tensor:
            videos = zip(states.split(sizes), grids, strict=True)
            return torch.cat([video.repeat(frames, 1) for video, (frames, _, _) in videos])

        on_host, device = self.place_patches(grids), pixel_values.device
        places, *tables = (states.to(device, non_blocking=device.type == "cuda") for states in on_host)
        hidden_states = self.patch_embed.proj(pixel_values) if drops else self.patch_embed(pixel_values)
        rotary = self.rotary_pos_emb(hidden_states, places)
        if tables:
            indices, weights = tables
            learned = (self.pos_embed(indices) * weights[:, :, None]).sum(1)
            hidden_states = hidden_states + repeat(learned.to(hidden_states.dtype))
        return hidden_states, tuple(repeat(part) for part in rotary)

    def forward(
        self,
        hidden_states: torch.Tensor,
        grid_thw: torch.Tensor | None = None,
        pruning: PruningPlan | None = None,
        **kwargs: Any,
    ) -> Any:
        """
        hidden_states: pixels (F * N, values of a patch). With `pruning`, frames of videos: returns `VideoFeatures`
        whose `hidden_states` are flat, (F * N, D) up to the pruning layer, and lie window by window in a tower that has
        windows; raises as `check_call`. Else as in the native model.
        """
        if pruning is None:
            native: Any = super()
            return native.forward(hidden_states, grid_thw, **kwargs)
        grids, keeps_states = pruning.grids, self.check_call(kwargs)
        hidden_states, angles = self.embed(hidden_states, grids, drops=pruning.drops)
        device, window_to_raster = hidden_states.device, None
        lengths = [self.spatial_merge_unit * rows * cols for frames, rows, cols in grids for _ in range(frames)]
        spans = [AttentionSpans.of_lengths(lengths, device)]
        windows = self.cut_windows(grids, device)
        if windows is not None:
            window_to_raster, spans = windows[0], [*spans, windows[1]]
        by_block = (states.unflatten(0, (-1, self.spatial_merge_unit)) for states in (hidden_states, *angles))
        hidden_states, *rotation = (reorder(states, window_to_raster).flatten(0, 1) for states in by_block)
        taps = sorted(set(self.deepstack_visual_indexes))  # as the native model
        found, _, states, tapped = self.encode_blocks(
            hidden_states, self.blocks, taps, keeps_states, pruning, spans, tuple(rotation), window_to_raster
        )
        if hasattr(self, "deepstack_merger_list"):
            mergers = [self.deepstack_merger_list[list(self.deepstack_visual_indexes).index(tap)] for tap in taps]
            merged = [merger(states) for merger, states in zip(mergers, tapped, strict=True)]
            found["deepstack_features"] = [features.split(pruning.num_kept) for features in merged]
        merged = self.merger(found["last_hidden_state"])  # (K, text hidden size)
        return VideoFeatures(**found, pooler_output=merged.split(pruning.num_kept), hidden_states=states or None)
