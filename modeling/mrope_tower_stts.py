"""What towers share that take patches of all videos in one flat sequence, block by block, beside grids.

`pixels -> layers 0..l -> score -> layer l + 1 with bias -> drop -> layers l + 2.. on survivors -> merger` (paper
section 3), and the taps of deepstack on the way, where a tower has some. Patches see those of their frame, or in some
layers those of their window in it: windows are stretches of the same sequence, whose blocks then lie window by window.
Scores, masks and features are always in the caller's order of blocks. Images take the native path untouched.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import nn
from transformers.vision_utils import get_vision_position_ids

from .attention_stts import binned_attention, packed_attention
from .layout_stts import FrameBins, FrameSequence, bin_frames, frame_bounds, sequence_kept_blocks
from .plan_stts import PruningPlan, VideoFeatures
from .scoring_stts import SELECTORS, RankingTower, select_blocks, temporal_loss

if TYPE_CHECKING:

    class NativeLayer(nn.Module):
        """The native class that a mixin below precedes."""

else:
    NativeLayer = object


class PatchProjection(nn.Conv3d):
    """The native embedding of patches; of flat ones, (P, values), as the matrix product that it is: much faster."""

    @classmethod
    def like(cls, native: Any) -> "PatchProjection":
        bias = native.bias is not None
        return cls(native.in_channels, native.out_channels, native.kernel_size, native.stride, bias=bias)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) if input.dim() > 2 else F.linear(input, self.weight.flatten(1), self.bias)


class FrameAttention(NativeLayer):
    """Mixin for native attention, and beside it attention within the frames, or windows, of videos."""

    rotate: Callable[..., tuple[torch.Tensor, torch.Tensor]]  # native: query, key, cosines, sines
    config: Any
    qkv: nn.Linear
    proj: nn.Linear
    num_heads: int
    scaling: float
    attention_dropout: float

    def forward(
        self,
        hidden_states: torch.Tensor,
        cu_seqlens: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        longest: int | None = None,
        survivors: FrameSequence | None = None,
        key_bias: torch.Tensor | None = None,
        bins: FrameBins | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """
        With `longest`, the bound of a frame's patches: patches (P, D) of frames that end at cu_seqlens, in `bins` if
        there are any. All are keys, with key_bias (P,) or None; the queries are all or, as in layer `l + 1`, the
        `survivors`, (P', D) of which are returned. Else as in the native model.
        """
        if longest is None or position_embeddings is None:
            return super().forward(hidden_states, cu_seqlens, position_embeddings=position_embeddings, **kwargs)
        query, key, value = self.qkv(hidden_states).unflatten(-1, (3, self.num_heads, -1)).unbind(-3)
        query, key = self.rotate(query, key, *position_embeddings)
        settings: dict[str, Any] = {
            "scaling": self.scaling,
            "dropout": self.attention_dropout if self.training else 0.0,
            "implementation": self.config._attn_implementation,
        }
        if bins is not None:
            heads, packed = query.shape[1:], (bins.pack(states.flatten(1)) for states in (query, key, value))
            query, key, value = (states.unflatten(-1, heads) for states in packed)
            output = binned_attention(query, key, value, bins.attention_mask, **settings)
            return self.proj(bins.unpack(output.flatten(-2)))
        ends = cu_seqlens
        if survivors is not None:
            query, ends = query[survivors.patch_index], survivors.cu_seqlens
        output = packed_attention(query, key, value, ends, cu_seqlens, longest, longest, key_bias=key_bias, **settings)
        return self.proj(output.flatten(-2))


class FrameBlock(NativeLayer):
    """Mixin for a native layer, whose `attn` is a `FrameAttention`; as layer `l + 1` it also drops patches."""

    attention: ClassVar[Any]  # class of `attn`
    attn: Any
    norm1: Any
    norm2: Any
    mlp: Any

    def __init__(self, config: Any):
        super().__init__(config)
        self.attn = self.attention(config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        cu_seqlens: torch.Tensor,
        key_bias: torch.Tensor | None = None,
        survivors: FrameSequence | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """
        With `survivors`, as layer `l + 1`: (F * N, D) -> (P, D); all patches are keys, but only survivors have outputs.
        Else as in the native model. Gradients reach what is passed by place alone where they are checkpointed.
        """
        if survivors is None:
            return super().forward(hidden_states, cu_seqlens, **kwargs)
        attended = self.attn(self.norm1(hidden_states), cu_seqlens, survivors=survivors, key_bias=key_bias, **kwargs)
        hidden_states = hidden_states[survivors.patch_index] + attended
        return hidden_states + self.mlp(self.norm2(hidden_states))


@dataclass
class Stretches:
    """
    Patches that see each other in a layer: those of a frame, or of a window of it.

    bounds: (stretches + 1,) int32, where each starts and ends among all patches. longest: bound of their lengths.
    left: the survivors in them. bins: of the survivors, for that layout.
    """

    bounds: torch.Tensor
    longest: int
    left: FrameSequence | None = None
    bins: FrameBins | None = None

    def layout(self, prunes: bool) -> tuple[torch.Tensor, dict[str, Any]]:
        """Bounds and options of a layer's attention; `prunes` of layer `l + 1`."""
        if prunes:
            return self.bounds, {"longest": self.longest, "survivors": self.left}
        if self.left is not None:
            return self.left.cu_seqlens, {"longest": self.longest, "bins": self.bins}
        return self.bounds, {"longest": self.longest}


def reorder(blocks: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """Blocks (G, ...) in another order (G,); None leaves them as they are."""
    return blocks if order is None else blocks[order]


class FlatTower(RankingTower):
    """Mixin for a native tower whose `blocks` are `FrameBlock`s: for videos it scores blocks and drops the lowest."""

    block: ClassVar[Any]  # class of `blocks`
    blocks: nn.ModuleList
    patch_embed: Any
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
        (N of all, 2), and the arguments of `embed_places`, (N of all, ...).
        """
        return (get_vision_position_ids(self.one_frame_each(grids), self.spatial_merge_size),)

    def embed_places(self, *places: torch.Tensor) -> torch.Tensor | None:
        """Learned positions (N of all, D) of what `place_patches` returned, or None."""
        return None

    def cut_windows(
        self, grids: list[tuple[int, int, int]], device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor, int] | None:
        """
        Blocks (G,) window by window, where each window starts and ends among the patches, (windows + 1,) int32, and the
        longest's patches; None for a tower without windows. A frame's windows follow each other.
        """
        return None

    def sees_window(self, layer: int) -> bool:
        """Whether patches see those of their window alone."""
        return False

    def one_frame_each(self, grids: list[tuple[int, int, int]]) -> torch.Tensor:
        """Grids (V, 3) in patches of one frame of each video, on the host."""
        return torch.tensor([[1, self.spatial_merge_size * r, self.spatial_merge_size * c] for _, r, c in grids])

    def embed(
        self, pixel_values: torch.Tensor, grids: list[tuple[int, int, int]], drops: bool
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """
        Patches (F * N, D) with their learned positions, and the angles of their rotary ones, as the native model; to
        its rounding where nothing drops.
        """
        sizes = [self.spatial_merge_unit * rows * cols for _, rows, cols in grids]

        def repeat(states: torch.Tensor) -> torch.Tensor:
            videos = zip(states.split(sizes), grids, strict=True)
            return torch.cat([video.repeat(frames, 1) for video, (frames, _, _) in videos])

        places, *tables = (states.to(pixel_values.device) for states in self.place_patches(grids))
        hidden_states = self.patch_embed.proj(pixel_values) if drops else self.patch_embed(pixel_values)
        learned, rotary = self.embed_places(*tables), self.rotary_pos_emb(hidden_states, places)
        if learned is not None:
            hidden_states = hidden_states + repeat(learned.to(hidden_states.dtype))
        return hidden_states, tuple(repeat(part) for part in rotary)

    def cut_stretches(
        self, grids: list[tuple[int, int, int]], device: torch.device
    ) -> tuple[list[Stretches], torch.Tensor | None]:
        """Frames, and windows where the tower has some, with the order (G,) in which blocks then lie."""
        lengths = [self.spatial_merge_unit * rows * cols for frames, rows, cols in grids for _ in range(frames)]
        frames = Stretches(frame_bounds(lengths, device), max(lengths))
        cut = self.cut_windows(grids, device)
        if cut is None:
            return [frames], None
        order, bounds, longest = cut
        return [frames, Stretches(bounds, longest)], order

    def drop(
        self, scores: torch.Tensor, pruning: PruningPlan, kinds: list[Stretches], place: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """
        Says in all `kinds` what is left. place: (G,) of the caller's blocks among the tower's, or None where it is the
        same. Returns the mask (G,) of the caller's blocks, the patches (P,) that are left, and, or None likewise, the
        places (K,) of the tower's kept blocks among the caller's.
        """
        keep_mask, kept = select_blocks(scores, pruning.grids, pruning.num_kept)
        rank = None
        if place is not None:
            kept, rank = place[kept].sort()
        for kind in kinds:
            left = kind.left = sequence_kept_blocks(kept, self.spatial_merge_unit, kind.bounds)
            if self.config.packing != "varlen" and len(kept):
                kind.bins = bin_frames(left, left.cu_seqlens.diff().tolist(), kind.longest)
        return keep_mask, left.patch_index, rank

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
        self.check_call(kwargs)
        layer, grids, key_bias = self.config.pruning_layer, pruning.grids, None
        hidden_states, angles = self.embed(hidden_states, grids, drops=pruning.num_kept != pruning.num_blocks)
        kinds, order = self.cut_stretches(grids, hidden_states.device)
        place = None if order is None else order.argsort()
        by_block = (states.unflatten(0, (-1, self.spatial_merge_unit)) for states in (hidden_states, *angles))
        hidden_states, *rotation = (reorder(states, order).flatten(0, 1) for states in by_block)
        asked = self.returns_states(kwargs)
        states = {-1: hidden_states} if asked else {}  # outputs of layers by their index
        for index, block in enumerate(self.blocks):
            seen = kinds[self.sees_window(index)]
            if seen.left is None or len(seen.left.patch_index):
                bounds, options = seen.layout(prunes=index == layer + 1)
                hidden_states = block(hidden_states, bounds, key_bias, position_embeddings=tuple(rotation), **options)
            else:  # k = 1: nothing is left to encode
                hidden_states = hidden_states[:0]
            if asked or index in self.deepstack_visual_indexes:
                states[index] = hidden_states
            if index == layer:
                blocks = reorder(hidden_states.unflatten(0, pruning.block_patches.shape), place)  # (G, S, D)
                scores, bias = self.rank_blocks(blocks, grids, pruning.num_kept)
                if bias is not None:
                    key_bias = reorder(bias, order)[:, None].expand(-1, self.spatial_merge_unit).flatten()
                keep_mask, patch_index, rank = self.drop(scores, pruning, kinds, place)
            elif index == layer + 1:
                rotation, key_bias = [part[patch_index] for part in rotation], None

        callers = None if rank is None else rank.argsort()  # order of blocks
        merged = [self.merger(hidden_states), *self.merge_taps(states, patch_index)]  # (K, text hidden size) each
        pooled, *taps = (reorder(features, callers).split(pruning.num_kept) for features in merged)
        with_loss = pruning.with_temporal_loss and SELECTORS[self.config.selector].is_learned
        return VideoFeatures(
            last_hidden_state=hidden_states,
            pooler_output=pooled,
            hidden_states=tuple(states.values()) if asked else None,
            token_scores=pruning.per_video(scores),
            keep_mask=pruning.per_video(keep_mask),
            temporal_loss=temporal_loss(scores, blocks, grids, pruning.detach_temporal_target) if with_loss else None,
            deepstack_features=taps if hasattr(self, "deepstack_merger_list") else None,
        )

    def merge_taps(self, states: dict[int, torch.Tensor], patch_index: torch.Tensor) -> list[torch.Tensor]:
        """Deepstack's features (K, text hidden size) of the patches (P,) that are left, in the order of layers."""
        indexes, layer, merged = list(self.deepstack_visual_indexes), self.config.pruning_layer, []
        for index in sorted(set(indexes)):  # as the native model
            tapped = states[index] if index > layer else states[index][patch_index]
            merged.append(self.deepstack_merger_list[indexes.index(index)](tapped))
        return merged
