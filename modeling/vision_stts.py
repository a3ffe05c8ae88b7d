"""Molmo2's vision tower and connector with token scoring: dense layers, bias, drop, layers on what is left.

`pixel patches -> layers 0..l -> score -> layer l + 1 with bias -> drop -> layers l + 2.. on survivors -> connector`
(paper section 3). Images take the native path untouched.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.molmo2.modeling_molmo2 import (
    Molmo2Adapter,
    Molmo2VisionAttention,
    Molmo2VisionEncoderLayer,
    Molmo2VisionModel,
)
from transformers.utils import ModelOutput

from .attention_stts import binned_attention, packed_attention
from .checks_stts import check_finite, check_grids, check_tensors
from .configuration_stts import STTSVisionConfig
from .gathered_layout_stts import (
    GatheredSequence,
    frame_of_blocks,
    gather_blocks,
    sequence_kept_patches,
    sequence_with_refill,
    spread_to_patches,
)
from .layout_stts import FrameBins, bin_frames, first_fit_descending
from .plan_stts import PruningPlan
from .scoring_stts import SELECTORS, RankingTower, select_blocks, temporal_loss

# Per call of the connector: kernels put the batch into a dimension of CUDA's grid, which has this limit.
MAX_GRID_BLOCKS = 65535


@dataclass
class STTSVisionOutput(ModelOutput):
    """
    features: (K, S, D * feature layers), the patches of kept blocks. valid: (K, S) bool or None, False for padding.
    token_scores: (G,) float32. keep_mask: (G,) bool. temporal_loss: scalar or None. last_hidden_state: (P, D) of the
    last layer that the connector needs. hidden_states: if asked for, the embeddings and each layer's output, (F, N, D)
    up to the pruning layer and (P, D) after it.
    """

    # `ModelOutput` wants a default; these three are always there.
    features: torch.Tensor = None  # type: ignore[assignment]
    token_scores: torch.Tensor = None  # type: ignore[assignment]
    keep_mask: torch.Tensor = None  # type: ignore[assignment]
    valid: torch.Tensor | None = None
    temporal_loss: torch.Tensor | None = None
    last_hidden_state: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None


@dataclass
class STTSVisionPlan(PruningPlan):
    """feature_layers: layers whose outputs the connector takes, not negative."""

    feature_layers: list[int] = field(default_factory=list)

    def check_blocks(self, num_patches: int) -> None:
        """Raises `ValueError` where a video's blocks have fewer slots than its frames have patches (`N`)."""
        window_size = self.block_patches.shape[1]
        for _, rows, cols in self.grids:
            if rows * cols * window_size < num_patches:
                raise ValueError(
                    f"`video_grids` has {rows} x {cols} blocks of {window_size} patches, too few for the {num_patches} "
                    "patches of a frame. The video processor's `size`, `patch_size` and `pooling_size` must be those "
                    "of `vision_config`."
                )


def check_video_inputs(vision: dict[str, Any], vision_config: STTSVisionConfig) -> list[tuple[int, int, int]]:
    """
    Returns the grid `(T, rows, cols)` of each video, on the host; raises `ValueError` or `TypeError` where frames
    (F, N, pixels), pooling and grids do not fit each other.
    """
    pixel_values_videos, video_token_pooling, video_grids = check_tensors(
        vision, "pixel_values_videos", "video_token_pooling", "video_grids"
    )
    grids = check_grids("video_grids", video_grids)
    pixels = vision_config.patch_size**2 * vision_config.num_channels
    expected = (int(vision_config.num_position_embeddings or 0), pixels)
    if pixel_values_videos.dim() == 4:
        pixel_values_videos = pixel_values_videos.flatten(0, 1)
    if pixel_values_videos.dim() != 3 or tuple(pixel_values_videos.shape[1:]) != expected:
        raise ValueError(
            f"`pixel_values_videos` has shape {tuple(pixel_values_videos.shape)}, but must be (frames, "
            f"{expected[0]}, {expected[1]}): patches of a frame and values of a patch by `vision_config`."
        )
    num_frames = sum(frames for frames, _, _ in grids)
    if num_frames != pixel_values_videos.shape[0]:
        raise ValueError(
            f"`video_grids` counts {num_frames} frames, but `pixel_values_videos` holds {pixel_values_videos.shape[0]}."
        )
    num_blocks = sum(frames * rows * cols for frames, rows, cols in grids)
    window = vision_config.pooling_size[0] * vision_config.pooling_size[1]
    if tuple(video_token_pooling.shape) != (num_blocks, window):
        raise ValueError(
            f"`video_token_pooling` has shape {tuple(video_token_pooling.shape)}, but `video_grids` and "
            f"`vision_config.pooling_size` = {vision_config.pooling_size} make it ({num_blocks}, {window}). The video "
            "processor's `pooling_size` must equal the config's."
        )
    if video_token_pooling.device.type == "cpu":
        lowest, highest = (int(bound) for bound in video_token_pooling.aminmax())
        if lowest < -1 or highest >= num_frames * expected[0]:
            raise ValueError(
                f"`video_token_pooling` goes from {lowest} to {highest}, but must hold rows of the "
                f"{num_frames * expected[0]} patches in `pixel_values_videos`, or -1 for padding."
            )
    check_finite(pixel_values_videos)
    return grids


class STTSVisionAttention(Molmo2VisionAttention):
    """Native attention, and beside it attention within the frames of a packed sequence."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        key_bias: torch.Tensor | None = None,
        sequence: GatheredSequence | None = None,
        bins: FrameBins | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        With `sequence`: hidden_states (P, D); keys from encoder_hidden_states (F, N, D) and key_bias (F * N,), or from
        the sequence itself. With `bins`: (num_bins, capacity, D). With neither: as in Molmo2.
        """
        if sequence is None and bins is None:
            return super().forward(hidden_states, encoder_hidden_states, attention_mask, **kwargs)
        sources = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        query = self.q_proj(hidden_states).unflatten(-1, (-1, self.head_dim))  # (..., heads, d)
        key = self.k_proj(sources).unflatten(-1, (-1, self.head_dim))
        value = self.v_proj(sources).unflatten(-1, (-1, self.head_dim))
        if self.num_key_value_groups > 1:
            key = key.repeat_interleave(self.num_key_value_groups, dim=-2)
            value = value.repeat_interleave(self.num_key_value_groups, dim=-2)
        settings = {
            "scaling": self.scaling,
            "dropout": self.attention_dropout if self.training else 0.0,
            "implementation": self.config._attn_implementation,
        }
        if bins is not None:
            output = binned_attention(query, key, value, bins.attention_mask, **settings)
            return self.o_proj(output.flatten(-2)), None
        assert sequence is not None  # one of the two is given
        cu_seqlens = sequence.cu_seqlens
        if encoder_hidden_states is not None:
            cu_seqlens = sequence.whole_cu_seqlens
            key, value = key.flatten(0, 1), value.flatten(0, 1)
        output = packed_attention(
            query,
            key,
            value,
            sequence.cu_seqlens,
            cu_seqlens,
            sequence.max_seqlen,
            sequence.max_seqlen,
            key_bias=key_bias,
            **settings,
        )
        return self.o_proj(output.flatten(-2)), None


class STTSVisionEncoderLayer(Molmo2VisionEncoderLayer):
    """Native layer; as layer `l + 1` it also drops patches."""

    def __init__(self, config: STTSVisionConfig):
        super().__init__(config)
        self.self_attn = STTSVisionAttention(config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        key_bias: torch.Tensor | None = None,
        survivors: GatheredSequence | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """
        With `survivors`, as layer `l + 1`: (F, N, D) -> (P, D). All patches serve as keys and values, with key_bias
        (F * N,) or None, but only survivors have outputs, so only theirs are computed. Else as in Molmo2.
        """
        if survivors is None:
            return super().forward(hidden_states, attention_mask, **kwargs)
        sources = self.layer_norm1(hidden_states)
        attended, _ = self.self_attn(
            sources.flatten(0, 1)[survivors.patch_index], sources, key_bias=key_bias, sequence=survivors
        )
        hidden_states = hidden_states.flatten(0, 1)[survivors.patch_index] + attended
        return hidden_states + self.mlp(self.layer_norm2(hidden_states))


class STTSVisionModel(RankingTower, Molmo2VisionModel):
    """Molmo2's ViT, which for videos scores blocks after layer `pruning_layer` and drops the lowest."""

    config: STTSVisionConfig
    _no_split_modules: ClassVar[list[str]] = ["STTSVisionEncoderLayer", "TokenScorer"]  # type: ignore[misc]

    def __init__(self, config: STTSVisionConfig):
        config.validate_pruning()  # fields may have been set since construction
        super().__init__(config)
        self.layers = nn.ModuleList([STTSVisionEncoderLayer(config) for _ in range(config.num_hidden_layers)])
        self.add_scorer(config.hidden_size, config.intermediate_size, config.num_attention_heads, config.head_dim)
        self.post_init()

    def forward(self, pixel_values: torch.Tensor, pruning: STTSVisionPlan | None = None, **kwargs: Any) -> Any:
        """
        pixel_values: (F, N, patch_size^2 * channels). Without `pruning` as in Molmo2; with it, frames of videos:
        returns an `STTSVisionOutput`, with the layers' outputs where `output_hidden_states` asks for them. Raises
        `ValueError` where the blocks of `pruning` leave out patches or the config's pruning fields do not fit each
        other, and for `output_attentions`.
        """
        if pruning is None:
            return super().forward(pixel_values, **kwargs)
        self.check_call(kwargs)
        pruning.check_blocks(pixel_values.shape[1])
        hidden_states = self.patch_embedding(pixel_values.to(self.dtype))  # (F, N, D)
        hidden_states = hidden_states + self.positional_embedding[None].to(hidden_states)
        pruning_layer = self.config.pruning_layer
        asked = self.returns_states(kwargs)
        wanted = range(len(self.layers)) if asked else pruning.feature_layers
        states = {-1: hidden_states} if asked else {}  # outputs of layers by their index
        for index, layer in enumerate(self.layers[: pruning_layer + 1]):
            hidden_states = layer(hidden_states, None)
            if index in wanted:
                states[index] = hidden_states

        block_patches = pruning.block_patches
        blocks, valid = gather_blocks(hidden_states.flatten(0, 1), block_patches)  # (G, S, D)
        token_scores, bias = self.rank_blocks(blocks, pruning.grids, pruning.num_kept, valid)
        num_patches = hidden_states.shape[0] * hidden_states.shape[1]
        key_bias = None if bias is None else spread_to_patches(bias, block_patches, num_patches)  # (F * N,)
        output = STTSVisionOutput(token_scores=token_scores)
        if pruning.with_temporal_loss and SELECTORS[self.config.selector].is_learned:
            output.temporal_loss = temporal_loss(token_scores, blocks, pruning.grids, pruning.detach_temporal_target)
        output.keep_mask, kept_blocks = select_blocks(token_scores, pruning.grids, pruning.num_kept)

        if kept_blocks.numel() == 0:  # k = 1: nothing is left to encode
            output.features = blocks.new_zeros(0, blocks.shape[1], blocks.shape[2] * len(pruning.feature_layers))
            output.last_hidden_state = blocks.new_zeros(0, blocks.shape[2])
            output.hidden_states = tuple(states.values()) if asked else None
            return output
        sequence, bins = self.pack_survivors(kept_blocks, pruning, *hidden_states.shape[:2])
        output.valid = sequence.window_valid
        for index in range(pruning_layer + 1, max(pruning.feature_layers) + 1):
            layer = self.layers[index]
            if index == pruning_layer + 1:
                hidden_states = layer(hidden_states, None, key_bias, sequence)  # (F, N, D) -> (P, D)
                hidden_states = hidden_states if bins is None else bins.pack(hidden_states)
            else:
                hidden_states = layer(hidden_states, None, sequence=None if bins else sequence, bins=bins)
            if index in wanted:
                states[index] = hidden_states if bins is None else bins.unpack(hidden_states)
        features = [
            states[index] if index > pruning_layer else states[index].flatten(0, 1)[sequence.patch_index]
            for index in pruning.feature_layers
        ]
        output.features = sequence.windows(torch.cat(features, dim=-1), blocks.shape[1])  # (K, S, D * feature layers)
        output.last_hidden_state = features[pruning.feature_layers.index(max(pruning.feature_layers))]
        output.hidden_states = tuple(states.values()) if asked else None
        return output

    def pack_survivors(
        self, kept_blocks: torch.Tensor, pruning: STTSVisionPlan, num_frames: int, size: int
    ) -> tuple[GatheredSequence, FrameBins | None]:
        """The layout of the survivors among `F` frames of `N = size` patches: their sequence, and bins if wanted."""
        frame_blocks = [rows * cols for frames, rows, cols in pruning.grids for _ in range(frames)]
        block_frame = frame_of_blocks(frame_blocks, kept_blocks.device)
        sequence = sequence_kept_patches(kept_blocks, pruning.block_patches, block_frame, [size] * num_frames)
        if self.config.packing == "varlen":
            return sequence, None
        sequence = sequence.without_padding(num_frames)
        lengths = sequence.cu_seqlens.diff().tolist()
        if self.config.refill_single_frame_bins:
            frame_bin, _, _ = first_fit_descending(lengths, size)
            shared = torch.bincount(torch.tensor([b for b, n in zip(frame_bin, lengths, strict=True) if n]))
            alone = [f for f, b in enumerate(frame_bin) if lengths[f] and shared[b] == 1]
            sequence = sequence_with_refill(sequence, alone, pruning.block_patches.shape[1], [size] * num_frames)
            lengths = sequence.cu_seqlens.diff().tolist()
        return sequence, bin_frames(sequence, lengths, size)


class STTSAdapter(Molmo2Adapter):
    """Molmo2's connector, which also takes blocks that are already gathered."""

    def forward(
        self, image_features: torch.Tensor, pooled_patches_idx: torch.Tensor | None = None, **kwargs: Any
    ) -> BaseModelOutput:
        """
        With `pooled_patches_idx` as in Molmo2. Without: image_features (K, S, D * feature layers) are kept blocks and
        `valid` (K, S) bool or None says which slots are no padding; `last_hidden_state` is (K, text hidden size).
        """
        if pooled_patches_idx is not None:
            return super().forward(image_features, pooled_patches_idx, **kwargs)
        valid = kwargs.pop("valid", None)
        if image_features.shape[0] == 0:
            return BaseModelOutput(last_hidden_state=image_features.new_zeros(0, self.config.text_hidden_size))
        parts = image_features.split(MAX_GRID_BLOCKS)
        valids = [None] * len(parts) if valid is None else valid.split(MAX_GRID_BLOCKS)
        pooled = [self.pool(part, some, **kwargs) for part, some in zip(parts, valids, strict=True)]
        return BaseModelOutput(
            last_hidden_state=self.image_projector(torch.cat(pooled) if len(pooled) > 1 else pooled[0])
        )

    def pool(self, blocks: torch.Tensor, valid: torch.Tensor | None, **kwargs: Any) -> torch.Tensor:
        """(K, S, D * feature layers) -> (K, D'), attention from each block's mean to its patches."""
        if valid is None:
            query, attention_mask = blocks.mean(dim=1, keepdim=True), None  # (K, 1, D * feature layers)
        else:
            counts = valid.sum(dim=1)[:, None, None].to(blocks.dtype)
            query = blocks.sum(dim=1, keepdim=True) / counts
            attention_mask = create_bidirectional_mask(
                config=self.config,
                inputs_embeds=query,
                attention_mask=valid,
                encoder_hidden_states=blocks,
                allow_is_bidirectional_skip=False,  # the check would force a host-device sync
            )
        return self.image_pooling_2d(query, blocks, attention_mask=attention_mask, **kwargs)[0].squeeze(1)
