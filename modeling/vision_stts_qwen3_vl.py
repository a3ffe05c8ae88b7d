"""Qwen3-VL's vision tower with token scoring: dense layers, bias, drop, layers on what is left.

`pixels -> layers 0..l -> score -> layer l + 1 with bias -> drop -> layers l + 2.. on survivors -> merger` (paper
section 3), and deepstack's taps on the way. A frame is a tubelet: its patches lie block by block, and see each other
alone. Images take the native path untouched.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLVisionAttention,
    Qwen3VLVisionBlock,
    Qwen3VLVisionModel,
    apply_rotary_pos_emb_vision,
)
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from .attention_stts import binned_attention, packed_attention
from .configuration_stts_qwen3_vl import STTSQwen3VLVisionConfig
from .layout_stts import (
    FrameBins,
    FrameSequence,
    bin_frames,
    frame_bounds,
    frame_of_blocks,
    sequence_kept_patches,
    spread_to_patches,
)
from .plan_stts import PruningPlan, VideoFeatures
from .scoring_stts import RankingTower, select_blocks, temporal_loss


class PatchProjection(nn.Conv3d):
    """The native embedding of patches; of flat ones, (P, values), as the matrix product that it is: much faster."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) if input.dim() > 2 else F.linear(input, self.weight.flatten(1), self.bias)


class STTSQwen3VLVisionAttention(Qwen3VLVisionAttention):
    """Native attention, and beside it attention within the frames of videos."""

    def forward(  # type: ignore[override]  # `max_seqlen` is handed on
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
        `survivors`, (P', D) of which are returned. Else as in Qwen3-VL.
        """
        if longest is None or position_embeddings is None:
            return super().forward(hidden_states, cu_seqlens, position_embeddings=position_embeddings, **kwargs)
        query, key, value = self.qkv(hidden_states).unflatten(-1, (3, self.num_heads, -1)).unbind(-3)
        query, key = apply_rotary_pos_emb_vision(query, key, *position_embeddings)
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


class STTSQwen3VLVisionBlock(Qwen3VLVisionBlock):
    """Native layer; as layer `l + 1` it also drops patches."""

    def __init__(self, config: STTSQwen3VLVisionConfig):
        super().__init__(config)
        self.attn = STTSQwen3VLVisionAttention(config)

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
        Else as in Qwen3-VL. Gradients reach what is passed by place alone where they are checkpointed.
        """
        if survivors is None:
            return super().forward(hidden_states, cu_seqlens, **kwargs)
        attended = self.attn(self.norm1(hidden_states), cu_seqlens, survivors=survivors, key_bias=key_bias, **kwargs)
        hidden_states = hidden_states[survivors.patch_index] + attended
        return hidden_states + self.mlp(self.norm2(hidden_states))


class STTSQwen3VLVisionModel(RankingTower, Qwen3VLVisionModel):
    """Qwen3-VL's ViT, which for videos scores blocks after layer `pruning_layer` and drops the lowest."""

    config: STTSQwen3VLVisionConfig
    _no_split_modules: ClassVar[list[str]] = ["STTSQwen3VLVisionBlock", "TokenScorer"]  # type: ignore[misc]

    def __init__(self, config: STTSQwen3VLVisionConfig):
        config.validate_pruning()  # fields may have been set since construction
        super().__init__(config)
        native: Any = self.patch_embed.proj
        self.patch_embed.proj = PatchProjection(
            native.in_channels, native.out_channels, native.kernel_size, native.stride
        )
        self.blocks = nn.ModuleList([STTSQwen3VLVisionBlock(config) for _ in range(config.depth)])
        self.add_scorer(config.hidden_size, config.intermediate_size, config.num_heads)
        self.post_init()

    def place_patches(self, grids: list[tuple[int, int, int]]) -> tuple[torch.Tensor, ...]:
        """
        Of the patches of one frame of each video, which are those of all its frames, on the host: rows of the table of
        learned positions and their weights, (N of all, 4) each, and rows and columns, (N of all, 2).
        """
        side = self.spatial_merge_size
        frame = torch.tensor([[1, side * rows, side * cols] for _, rows, cols in grids])
        indices, weights = get_vision_interpolation_indices_and_weights(
            frame, self.num_grid_per_side, self.interpolation_mode, self.interpolation_align_corners, side
        )
        return indices, weights, get_vision_position_ids(frame, side)

    def embed(
        self, pixel_values: torch.Tensor, grids: list[tuple[int, int, int]], drops: bool
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """
        Patches (F * N, D) of videos of `grids` in blocks with their learned positions, and the angles of their rotary
        ones, as the native model; to its rounding where nothing drops.
        """
        indices, weights, places = (states.to(pixel_values.device) for states in self.place_patches(grids))
        sizes = [self.spatial_merge_unit * rows * cols for _, rows, cols in grids]
        hidden_states = self.patch_embed.proj(pixel_values) if drops else self.patch_embed(pixel_values)
        learned = (self.pos_embed(indices) * weights[:, :, None]).sum(1)
        rotary = self.rotary_pos_emb(hidden_states, places)

        def repeat(states: torch.Tensor) -> torch.Tensor:
            videos = zip(states.split(sizes), grids, strict=True)
            return torch.cat([video.repeat(frames, 1) for video, (frames, _, _) in videos])

        return hidden_states + repeat(learned.to(hidden_states.dtype)), tuple(repeat(part) for part in rotary)

    def forward(
        self,
        hidden_states: torch.Tensor,
        grid_thw: torch.Tensor | None = None,
        pruning: PruningPlan | None = None,
        **kwargs: Any,
    ) -> Any:
        """
        hidden_states: pixels (F * N, values of a patch). With `pruning`, tubelets of videos: returns `VideoFeatures`
        whose `hidden_states` are flat, (F * N, D) up to the pruning layer; raises as `check_call`. Else as in Qwen3-VL.
        """
        if pruning is None:
            return super().forward(hidden_states, grid_thw, **kwargs)
        self.check_call(kwargs)
        layer, grids, key_bias = self.config.pruning_layer, pruning.grids, None
        hidden_states, rotation = self.embed(hidden_states, grids, drops=pruning.num_kept != pruning.num_blocks)
        frame_blocks = [rows * cols for frames, rows, cols in grids for _ in range(frames)]
        frame_lengths = [self.spatial_merge_unit * blocks for blocks in frame_blocks]
        bounds, longest = frame_bounds(frame_lengths, hidden_states.device), max(frame_lengths)
        options: dict[str, Any] = {"position_embeddings": rotation, "longest": longest}
        asked = bool(kwargs.get("output_hidden_states"))
        states = {-1: hidden_states} if asked else {}  # outputs of layers by their index
        for index, block in enumerate(self.blocks):
            hidden_states = block(hidden_states, bounds, key_bias, **options)
            if asked or index in self.deepstack_visual_indexes:
                states[index] = hidden_states
            if index == layer:
                blocks = hidden_states.unflatten(0, pruning.block_patches.shape)  # (G, S, D)
                scores, bias = self.rank_blocks(blocks, grids, pruning.num_kept)
                if bias is not None:
                    key_bias = spread_to_patches(bias, pruning.block_patches, len(hidden_states))
                keep_mask, kept_blocks = select_blocks(scores, grids, pruning.num_kept)
                block_frame = frame_of_blocks(frame_blocks, kept_blocks.device)
                sequence = sequence_kept_patches(kept_blocks, pruning.block_patches, block_frame, frame_lengths)
                options["survivors"] = sequence
            elif index == layer + 1:
                kept_rotation = (rotation[0][sequence.patch_index], rotation[1][sequence.patch_index])
                bounds, key_bias, options = sequence.cu_seqlens, None, options | {"position_embeddings": kept_rotation}
                del options["survivors"]
                if self.config.packing != "varlen" and len(kept_blocks):
                    options["bins"] = bin_frames(sequence, sequence.cu_seqlens.diff().tolist(), longest)

        taps = []
        indexes = list(self.deepstack_visual_indexes)
        for index in sorted(set(indexes)):  # as the native model, in the order of layers
            tapped = states[index] if index > layer else states[index][sequence.patch_index]
            taps.append(self.deepstack_merger_list[indexes.index(index)](tapped).split(pruning.num_kept))
        with_loss = pruning.with_temporal_loss and self.config.selector == "scorer"
        return VideoFeatures(
            last_hidden_state=hidden_states,
            pooler_output=self.merger(hidden_states).split(pruning.num_kept),
            hidden_states=tuple(states.values()) if asked else None,
            token_scores=pruning.per_video(scores),
            keep_mask=pruning.per_video(keep_mask),
            temporal_loss=temporal_loss(scores, blocks, grids, pruning.detach_temporal_target) if with_loss else None,
            deepstack_features=taps,
        )
