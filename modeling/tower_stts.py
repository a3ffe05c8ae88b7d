"""What vision towers share: score, bias, layer `l + 1` on kept patches, drop, later layers.

`patches -> layers 0..l -> score -> layer l + 1 with bias -> drop -> layers l + 2.. on survivors` (paper section 3).
Patches of all frames of a call lie in one flat sequence, block by block, `S` slots each. Blocks of the sequence may lie
in another order than the caller's, window by window. Images take the native path untouched.
"""

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init

from .attention_stts import AttentionSpans, packed_attention
from .plan_stts import PruningPlan
from .scoring_stts import FIRST_LOGIT, TokenScorer, mean_error, score_bias, select_blocks, temporal_errors
from .selectors_stts import SELECTORS

# Attention bias of padding slots: their weight is 0 in float32, and float16 holds it after scaling.
PADDING_BIAS = -1000.0


class SpanLayer(nn.Module):
    """Mixin for a native layer, which for videos attends within spans; as layer `l + 1` it also drops patches."""

    # Names of the first norm, the attention, its output projection and the second norm.
    names: ClassVar[tuple[str, str, str, str]] = ("norm1", "attn", "proj", "norm2")
    # What the attention calls its scale and its dropout.
    options: ClassVar[tuple[str, str]] = ("scaling", "attention_dropout")
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
        As in the native model, or with `spans`: patches (P_k, D), and key_bias (P_k,) or None by its place, since
        gradients reach nothing else where layers are checkpointed. All patches are keys; returns (P, D) of queries.
        """
        if spans is None:
            return super().forward(hidden_states, *arguments, **kwargs)
        norm1, attention, norm2 = (getattr(self, self.names[index]) for index in (0, 1, 3))
        scaling, dropout = (getattr(attention, name) for name in self.options)
        dropout, kernel = dropout if self.training else 0.0, attention.config._attn_implementation
        projected = self.project(norm1(hidden_states), spans.queries, *rotation)
        attended = packed_attention(*projected, spans, scaling, arguments[0], dropout, kernel)
        del projected  # with what else is unused, it would lie beside the MLP's much wider states
        if spans.queries is not None:
            hidden_states = hidden_states[spans.queries]
        hidden_states = hidden_states + getattr(attention, self.names[2])(attended.flatten(1))
        del attended
        return hidden_states + self.mlp(norm2(hidden_states))


class PruningTower(PreTrainedModel):
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
        self,
        blocks: torch.Tensor,
        pruning: PruningPlan,
        valid: torch.Tensor | None,
        window_to_raster: torch.Tensor | None,
        padding_bias: torch.Tensor | None,
    ) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor | None]:
        """
        Scores blocks (G, S, D), padding slots zero where `valid` (G, S) is False. Returns fields of `VideoFeatures`,
        the kept blocks (K,), and the bias (G * S,) of layer `l + 1` in the sequence's order: `padding_bias` alone for
        the untrained selectors, without `score_bias`, and where no video loses anything.
        """
        selector, given = SELECTORS[self.config.selector], pruning.block_scores
        scores = selector.rank(self, blocks, pruning.grids, valid) if given is None else given.to(blocks.device)
        is_learned = selector.is_learned and given is None
        pruning.count(scores, is_learned)
        keep_mask, kept_blocks = select_blocks(scores, pruning.grids, pruning.num_kept)
        found: dict[str, Any] = {"token_scores": pruning.per_video(scores), "keep_mask": pruning.per_video(keep_mask)}
        if pruning.with_temporal_loss and is_learned:
            errors = temporal_errors(scores, blocks, pruning.grids, pruning.detach_temporal_target)
            found |= {"temporal_loss": mean_error(errors), "temporal_errors": errors}
        biased = [pruning.keep.threshold is not None or dropped > 0 for dropped in pruning.counts[2]]
        if not is_learned or not self.config.score_bias or not any(biased):
            return found, kept_blocks, padding_bias
        bias = reorder(score_bias(scores, pruning.grids, self.config.score_rescaling, biased), window_to_raster)
        bias = bias[:, None].expand(blocks.shape[:2]).flatten()
        return found, kept_blocks, bias if padding_bias is None else bias + padding_bias

    def add_context(self, slots: torch.Tensor, spans: AttentionSpans, valid: torch.Tensor | None) -> torch.Tensor:
        """The slots (P,) that stay in the ViT, for those of kept blocks (P,): the same, or more as context."""
        return slots

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
        window_to_raster: torch.Tensor | None = None,
        valid: torch.Tensor | None = None,
    ) -> tuple[dict[str, Any], torch.Tensor, tuple[torch.Tensor, ...], list[torch.Tensor]]:
        """
        hidden_states: embeddings (G * S, D). spans: frames, and windows if `sees_window`. rotation: (G * S, ...) each.
        valid: (G, S) bool, or None without padding. window_to_raster: (G,) the caller's block at each place of the
        sequence, or None where they are the same, as with `valid`. Returns fields of `VideoFeatures`, the kept blocks
        (K,), if it keeps_states the embeddings and each layer's output, and for each layer of `taps` the kept blocks'
        patches (K * S, D). All but the layers' outputs are in the caller's order.
        """
        layer, size = self.config.pruning_layer, pruning.block_patches.shape[1]
        raster_to_window = None if window_to_raster is None else window_to_raster.argsort()
        key_bias = padding_bias = None if valid is None else PADDING_BIAS * (~valid).flatten().float()
        wanted, cache = {*taps, len(layers) - 1}, None if keeps_states else pruning.tower_cache
        states = {-1: hidden_states} if keeps_states else {}  # outputs of layers by their index

        def run(index: int) -> torch.Tensor:
            seen = spans[int(self.sees_window(index))]
            output = layers[index](hidden_states, key_bias, spans=seen, rotation=rotation)
            states.update({index: output} if keeps_states or index in wanted else {})
            return output

        states.update({} if cache is None else cache.states)
        for index in range(layer + 1):
            hidden_states = states[layer] if cache is not None and cache.states else run(index)
        blocks = reorder(hidden_states.unflatten(0, (-1, size)), raster_to_window)
        blocks = blocks if valid is None else blocks * valid[..., None].to(blocks.dtype)
        if cache is not None:
            cache.states, cache.blocks = {**states, layer: hidden_states}, blocks
        found, kept_blocks, key_bias = self.rank_blocks(blocks, pruning, valid, window_to_raster, padding_bias)
        places = kept_blocks if raster_to_window is None else raster_to_window[kept_blocks]
        kept = (size * places[:, None] + torch.arange(size, device=places.device)).flatten()
        left = self.add_context(kept if raster_to_window is None else kept.sort().values, spans[0], valid)
        if len(left) == 0:  # k = 1
            states.update(dict.fromkeys(range(layer + 1, len(layers)), hidden_states[:0]))
        else:
            dropping = [kind.drop(left) for kind in spans]
            spans = [during for during, _ in dropping]
            hidden_states = run(layer + 1)
            spans, rotation = [after for _, after in dropping], tuple(part[left] for part in rotation)
            key_bias = None if padding_bias is None else padding_bias[left]
            for index in range(layer + 2, len(layers)):
                hidden_states = run(index)

        among = None if left is kept else torch.searchsorted(left, kept)
        features = {i: states[i][kept] if i <= layer else reorder(states[i], among) for i in wanted}
        found["last_hidden_state"] = features[len(layers) - 1]
        return found, kept_blocks, tuple(states.values()) if keeps_states else (), [features[tap] for tap in taps]


def reorder(blocks: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """Rows (G, ...) in another order, or some of them; None leaves them as they are."""
    return blocks if order is None else blocks[order]
