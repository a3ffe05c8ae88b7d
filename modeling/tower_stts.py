"""What vision towers share: score, bias, layer `l + 1` on kept patches, drop, later layers.

`patches -> layers 0..l -> score -> layer l + 1 with bias -> drop -> layers l + 2.. on survivors` (paper section 3).
Patches of all frames of a call lie in one flat sequence, block by block, `S` slots each. Blocks of the sequence may lie
in another order than the caller's, window by window. Images take the native path untouched.
"""

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init

from .attention_stts import packed_attention
from .layout_stts import AttentionSpans, block_slots
from .plan_stts import PruningPlan
from .scoring_stts import FIRST_LOGIT, SELECTORS, TokenScorer, score_bias, select_blocks, temporal_loss

# Attention bias of padding slots: their weight is 0 in float32, and float16 holds it after scaling.
PADDING_BIAS = -1000.0

if TYPE_CHECKING:

    class NativeLayer(nn.Module):
        """The native class that the mixin below precedes."""

    class NativeTower(PreTrainedModel):
        """The native class that the mixin below precedes."""

else:
    NativeLayer = NativeTower = object


class SpanLayer(NativeLayer):
    """Mixin for a native layer, which for videos attends within spans; as layer `l + 1` it also drops patches."""

    # Names of the first norm, the attention, its output projection and the second norm.
    names: ClassVar[tuple[str, str, str, str]] = ("norm1", "attn", "proj", "norm2")
    mlp: Any

    def project(
        self, states: torch.Tensor, queries: torch.Tensor | None, *rotation: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Hook: queries (P, heads, d) of the given patches or all, keys and values, of states (P_k, D)."""
        raise NotImplementedError

    def forward(
        self,
        hidden_states: torch.Tensor,
        *arguments: Any,
        spans: AttentionSpans | None = None,
        rotation: tuple[torch.Tensor, ...] = (),
        **kwargs: Any,
    ) -> torch.Tensor:
        """
        With `spans`: patches (P_k, D), and key_bias (P_k,) or None by its place, since gradients reach nothing else
        where layers are checkpointed. All patches are keys; returns (P, D) of those that are queries. Without `spans`
        as in the native model.
        """
        if spans is None:
            return super().forward(hidden_states, *arguments, **kwargs)
        norm1, attention, norm2 = (getattr(self, self.names[index]) for index in (0, 1, 3))
        query, key, value = self.project(norm1(hidden_states), spans.queries, *rotation)
        dropout, kernel = attention.attention_dropout if self.training else 0.0, attention.config._attn_implementation
        attended = packed_attention(query, key, value, spans, attention.scaling, arguments[0], dropout, kernel)
        if spans.queries is not None:
            hidden_states = hidden_states[spans.queries]
        hidden_states = hidden_states + getattr(attention, self.names[2])(attended.flatten(1))
        return hidden_states + self.mlp(norm2(hidden_states))


class PruningTower(NativeTower):
    """Mixin for a vision tower with a `scorer`, whose layers are `SpanLayer`s."""

    config: Any
    scorer: TokenScorer

    def add_scorer(self, hidden_size: int, intermediate_size: int, num_heads: int, head_dim: int | None = None) -> None:
        """A new scorer, which a stock checkpoint lacks: to be called before `post_init`."""
        self.scorer = TokenScorer(hidden_size, intermediate_size, num_heads, head_dim)
        if not SELECTORS[self.config.selector].is_learned:  # no warning: a stock checkpoint has all weights in use
            self._keys_to_ignore_on_load_missing = [r"(^|\.)scorer\."]

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        # transformers skips modules of custom code that hold no parameters themselves, so this asks for the layer.
        if hasattr(self, "scorer") and module is self.scorer.score_layer:
            init.zeros_(module.weight)
            init.constant_(module.bias, FIRST_LOGIT)

    def check_call(self, kwargs: dict[str, Any]) -> bool:
        """
        Whether a call, or else the config, asks for `output_hidden_states`. Raises `ValueError` where the config's
        fields do not fit each other, and for `output_attentions`.
        """
        self.config.validate_pruning()
        if kwargs.get("output_attentions"):
            raise ValueError(
                "`output_attentions` is True, but attention within the frames of a video computes no weights. "
                "Leave it out; `token_scores` and `keep_mask` say what the video's tokens are worth."
            )
        asked = kwargs.get("output_hidden_states")
        return bool(getattr(self.config, "output_hidden_states", False) if asked is None else asked)

    def rank_blocks(
        self, blocks: torch.Tensor, pruning: PruningPlan, valid: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Scores (G,) of blocks (G, S, D), padding slots zero where `valid` (G, S) is False, and the bias (G,) of layer
        `l + 1`: None for the untrained selectors, and where no video loses anything.
        """
        selector = SELECTORS[self.config.selector]
        scores = selector.rank(self, blocks, pruning.grids, valid)
        loses = [dropped > 0 for dropped in pruning.counts[2]]
        biased = selector.is_learned and any(loses)
        return scores, score_bias(scores, pruning.grids, self.config.score_rescaling, loses) if biased else None

    def sees_window(self, layer: int) -> bool:
        """Whether a layer attends within windows, the second kind of spans."""
        return False

    def encode_blocks(
        self,
        hidden_states: torch.Tensor,
        layers: nn.ModuleList,
        taps: list[int],
        keeps_states: bool,
        pruning: PruningPlan,
        spans: list[AttentionSpans],
        rotation: tuple[torch.Tensor, ...] = (),
        valid: torch.Tensor | None = None,
        window_to_raster: torch.Tensor | None = None,
    ) -> tuple[dict[str, Any], torch.Tensor, tuple[torch.Tensor, ...], list[torch.Tensor]]:
        """
        hidden_states: embeddings (G * S, D). spans: frames, and windows if `sees_window`. rotation: (G * S, ...) each.
        valid: (G, S) bool, or None without padding. window_to_raster: (G,) the caller's block at each place of the
        sequence, or None where they are the same. Returns fields of `VideoFeatures`, the kept blocks (K,), if it
        keeps_states the embeddings and each layer's output, and for each layer of `taps` the kept blocks' patches (K *
        S, D). All but the layers' outputs are in the caller's order.
        """
        layer, size, kept_rank = self.config.pruning_layer, pruning.block_patches.shape[1], None
        raster_to_window = None if window_to_raster is None else window_to_raster.argsort()
        padding_bias = None if valid is None else PADDING_BIAS * (~valid).flatten().float()
        key_bias, after, wanted = padding_bias, spans, {*taps, len(layers) - 1}
        states = {-1: hidden_states} if keeps_states else {}  # outputs of layers by their index
        for index, encoder_layer in enumerate(layers):
            if index == layer + 1:
                blocks = reorder(hidden_states.unflatten(0, (-1, size)), raster_to_window)  # (G, S, D)
                blocks = blocks if valid is None else blocks * valid[..., None].to(blocks.dtype)
                scores, bias = self.rank_blocks(blocks, pruning, valid)
                if bias is not None:
                    bias = reorder(bias, window_to_raster)[:, None].expand(-1, size).flatten()
                    key_bias = bias + (0 if padding_bias is None else padding_bias)
                keep_mask, kept_blocks = select_blocks(scores, pruning.grids, pruning.num_kept)
                places = kept_blocks
                if raster_to_window is not None:
                    places, kept_rank = raster_to_window[kept_blocks].sort()
                spans, after = self.drop_slots(slots := block_slots(places, size), spans, valid)
            if index > layer and len(slots) == 0:  # k = 1
                hidden_states = hidden_states[:0]
            else:
                seen = spans[int(self.sees_window(index))]
                hidden_states = encoder_layer(hidden_states, key_bias, spans=seen, rotation=rotation)
            if index == layer + 1:
                left, spans = spans[0].queries, after
                rotation = tuple(part[left] for part in rotation)
                key_bias = None if padding_bias is None or spans[0].bins else padding_bias[left]
            if keeps_states or index in wanted:
                states[index] = hidden_states

        among = None if spans[0].bins is None else torch.searchsorted(left, slots).clamp_max(len(left) - 1)  # type: ignore[arg-type]
        callers = None if kept_rank is None else block_slots(kept_rank.argsort(), size)
        kept = {i: reorder(reorder(states[i], slots if i <= layer else among), callers) for i in wanted}
        found: dict[str, Any] = {"last_hidden_state": kept[len(layers) - 1], "token_scores": pruning.per_video(scores)}
        found["keep_mask"] = pruning.per_video(keep_mask)
        if pruning.with_temporal_loss and SELECTORS[self.config.selector].is_learned:
            found["temporal_loss"] = temporal_loss(scores, blocks, pruning.grids, pruning.detach_temporal_target)
        return found, kept_blocks, tuple(states.values()) if keeps_states else (), [kept[tap] for tap in taps]

    def drop_slots(
        self, slots: torch.Tensor, spans: list[AttentionSpans], valid: torch.Tensor | None
    ) -> tuple[list[AttentionSpans], list[AttentionSpans]]:
        """Spans of layer `l + 1`, where slots (P,) are queries, and spans of these alone, by the config's `packing`."""
        if self.config.packing == "varlen" or len(slots) == 0:
            pairs = [kind.drop(slots) for kind in spans]
        else:
            size = int(spans[0].cu_seqlens_k[-1])
            usable = torch.ones(size, dtype=torch.bool, device=slots.device) if valid is None else valid.flatten()
            pairs = [kind.drop_into_bins(slots, usable, self.config.refill_single_frame_bins) for kind in spans]
        return [dropping for dropping, _ in pairs], [after for _, after in pairs]


def reorder(blocks: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """Rows (G, ...) in another order, or some of them; None leaves them as they are."""
    return blocks if order is None else blocks[order]
