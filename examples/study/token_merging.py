"""ToMe (Bolya et al. 2023, "Token Merging: Your ViT But Faster"), adapted to Molmo2's videos as the paper's baseline.

Every ViT layer merges similar patches of a frame between its attention and its MLP: bipartite soft matching on the mean
of the attention keys over the heads, averages weighted by size, proportional attention. "We apply the merging method
within the ViT and pass the modified, pooled patches to the LLM" (paper, "Comparison with ViT-Only Pruning Baselines").

The LLM gets `K` tokens of a video, as from the other methods, spread evenly over its frames, frame 0 like any other. A
frame of `n` blocks that gets `m` tokens ends the ViT with `N * m / n` merged patches, which the connector pools `S` at
a time. ToMe merges equally many in each layer, so more of the ViT's FLOPs are left than with STTS: on one frame of
Molmo2 (25 layers, `l = 3`) 0.74 and 0.58 of the unpruned ones at `k = 0.5`.

Letters as in `modeling/`: F frames, N patches of each, n blocks of S patches, D width; here also M tokens that a frame
has in a layer, each the mean of one or more patches.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from stts_hf.modeling.attention_stts import AttentionSpans, packed_attention
from stts_hf.modeling.configuration_stts import STTSConfig, STTSVisionConfig
from stts_hf.modeling.modeling_stts import STTSForConditionalGeneration, STTSModel
from stts_hf.modeling.raster_tower_stts import RasterOutput, RasterPlan
from stts_hf.modeling.vision_stts import STTSVisionEncoderLayer, STTSVisionModel


@torch.no_grad()
def match_tokens(keys: torch.Tensor, num_left: int) -> torch.Tensor:
    """
    Bipartite soft matching (ToMe, section 3): of the tokens 0, 2, 4, ... of a frame those that are most like one of the
    tokens 1, 3, 5, ... merge into that one, until `num_left` are left.

    keys: (F, M, d), compared by cosine similarity. Of equals, the earlier merges. num_left: at least M / 2.
    Returns (F, M): for each token its place among those that are left, which are what is left of the first set and then
    the second, each in its order (as in the authors' code for a ViT with a class token; without one it leaves the first
    set in the order of likeness, which makes other pairs in the next layer).
    """
    unit = F.normalize(keys.float(), dim=-1)
    similarity, nearest = (unit[:, ::2] @ unit[:, 1::2].transpose(1, 2)).max(dim=-1)  # (F, first set)
    order = similarity.argsort(dim=-1, descending=True, stable=True)
    merges = torch.zeros_like(nearest, dtype=torch.bool)
    merges.scatter_(1, order[:, : keys.shape[1] - num_left], True)
    num_second = keys.shape[1] // 2
    before_second = num_left - num_second
    places = nearest.new_empty(keys.shape[:2])
    places[:, ::2] = torch.where(merges, before_second + nearest, (~merges).cumsum(-1) - 1)
    places[:, 1::2] = before_second + torch.arange(num_second, device=keys.device)
    return places


def count_patches(token_of_patch: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Sizes (F, M) float32 of `M = num_tokens` tokens. token_of_patch: (F, N) the token of every patch."""
    ones = torch.ones_like(token_of_patch, dtype=torch.float32)
    return ones.new_zeros(ones.shape[0], num_tokens).scatter_add(1, token_of_patch, ones)


def merge_tokens(hidden_states: torch.Tensor, sizes: torch.Tensor, places: torch.Tensor, num_left: int) -> torch.Tensor:
    """
    The mean, weighted by `sizes` (F, M), of those of the tokens (F, M, D) that have the same of `places` (F, M), from 0
    to `num_left - 1`. Returns (F, num_left, D).
    """
    weighted = hidden_states * sizes[..., None]  # float32 at least, as a mean of means of bfloat16 would drift
    sums = weighted.new_zeros(weighted.shape[0], num_left, weighted.shape[-1])
    sums = sums.scatter_add(1, places[..., None].expand_as(weighted), weighted)
    totals = sizes.new_zeros(sizes.shape[0], num_left).scatter_add(1, places, sizes)
    return (sums / totals[..., None]).to(hidden_states.dtype)


def merging_schedule(num_patches: int, num_left: int, num_layers: int) -> list[int]:
    """
    How many of a frame's patches are left after each layer: equally many merge in each, as in ToMe, but where the last
    layers could not merge so many, which is half of what they have at most, earlier ones merge more.

    Raises `ValueError` where that many layers cannot get from `num_patches` to `num_left`.
    """
    merged = num_patches - num_left
    counts = [num_patches - merged * (layer + 1) // num_layers for layer in range(num_layers)]
    for layer in reversed(range(num_layers - 1)):
        counts[layer] = min(counts[layer], 2 * counts[layer + 1])
    if num_patches > 2 * counts[0]:
        raise ValueError(
            f"`pruning_ratio` leaves {num_left} of a frame's {num_patches} patches, but a layer merges half of them at "
            f"most, and the connector takes the output of layer {num_layers - 1}. Lower `pruning_ratio`, or let "
            "`vision_feature_layer` name a later layer."
        )
    return counts


class MergingEncoderLayer(STTSVisionEncoderLayer):
    """Native layer that can merge tokens between attention and MLP."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        *args: Any,
        sizes: torch.Tensor | None = None,
        num_left: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """
        With `num_left`: (F, M, D) -> (F, num_left, D), and (F, M) the new place of every token. A token of `sizes`
        (F, M) `s` attends and is merged as `s` equal ones. Without `num_left` as in STTS.
        """
        if num_left is None:
            return super().forward(hidden_states, *args, **kwargs)
        attended, keys = self.attend(self.layer_norm1(hidden_states), None if sizes is None else sizes.log())
        hidden_states = hidden_states + attended
        places = torch.arange(keys.shape[1], device=keys.device).expand(keys.shape[:2])
        if num_left < keys.shape[1]:
            places = match_tokens(keys, num_left)
            weights = torch.ones_like(places, dtype=torch.float32) if sizes is None else sizes
            hidden_states = merge_tokens(hidden_states, weights, places, num_left)
        return hidden_states + self.mlp(self.layer_norm2(hidden_states)), places

    def attend(self, states: torch.Tensor, key_bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention within frames (F, M, D) with key_bias (F, M), and the mean of its keys over the heads (F, M, d)."""
        attention = self.self_attn
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        query, key, value = (p(states).unflatten(-1, (-1, attention.head_dim)).flatten(0, 1) for p in projections)
        means = key.mean(dim=1).view(*states.shape[:2], -1)
        if attention.num_key_value_groups > 1:
            key = key.repeat_interleave(attention.num_key_value_groups, dim=1)
            value = value.repeat_interleave(attention.num_key_value_groups, dim=1)
        spans = AttentionSpans.of_lengths([states.shape[1]] * states.shape[0], states.device)
        output = packed_attention(
            query,
            key,
            value,
            spans,
            attention.scaling,
            None if key_bias is None else key_bias.flatten(),
            attention.attention_dropout if self.training else 0.0,
            attention.config._attn_implementation,
        )
        return attention.o_proj(output.flatten(1)).view_as(states), means


class MergingVisionModel(STTSVisionModel):
    """Molmo2's ViT, which merges the patches of video frames where STTS drops blocks."""

    _no_split_modules: ClassVar[list[str]] = ["MergingEncoderLayer", "TokenScorer"]  # type: ignore[misc]

    def __init__(self, config: STTSVisionConfig):
        super().__init__(config)
        self.layers = nn.ModuleList([MergingEncoderLayer(config) for _ in range(config.num_hidden_layers)])
        self.post_init()

    def forward(self, pixel_values: torch.Tensor, pruning: RasterPlan | None = None, **kwargs: Any) -> Any:
        """
        pixel_values: (F, N, patch_size^2 * channels). Images, and videos that lose nothing or everything, go through
        the unpruned layers. Else returns a `RasterOutput`: `features` are groups of merged patches,
        `keep_mask` the blocks in whose places they go, `token_scores` of a block how many tokens each of its patches
        makes: 1 where it is by itself, 1 / s in a token of s patches, 0 in a frame that gets no token. Raises
        `ValueError` where the blocks of `pruning` leave out patches or there are too few layers to merge so much, and
        for `output_attentions` and `output_hidden_states`.
        """
        if pruning is None or pruning.num_kept == pruning.num_blocks or not any(pruning.num_kept):
            return super().forward(pixel_values, pruning, **kwargs)
        for name in ("output_attentions", "output_hidden_states"):
            if kwargs.get(name):
                raise ValueError(f"`{name}` is True, but a tower that merges tokens has none to return; leave it out.")
        num_patches = pixel_values.shape[1]
        pruning.check_blocks(num_patches)
        hidden_states = self.embed(pixel_values)  # (F, N, D)

        budgets = [  # blocks and tokens of each frame
            (rows * cols, kept * (frame + 1) // frames - kept * frame // frames)
            for (frames, rows, cols), kept in zip(pruning.grids, pruning.num_kept, strict=True)
            for frame in range(frames)
        ]
        tables = pruning.block_patches.split([blocks for blocks, _ in budgets])
        parts: list[Any] = [None] * len(budgets)
        for budget in dict.fromkeys(budgets):  # frames of one budget merge in one batch
            frames = [frame for frame, other in enumerate(budgets) if other == budget]
            table = torch.stack([torch.where(tables[f] < 0, -1, tables[f] - f * num_patches) for f in frames])
            merged = self.merge_frames(hidden_states[frames], table, budget[1], pruning.feature_layers)
            for frame, *part in zip(frames, *merged, strict=True):
                parts[frame] = part
        features, valid, keep_mask, token_scores = (torch.cat(part) for part in zip(*parts, strict=True))
        window_size = tables[0].shape[1]
        padded = any(num_patches * tokens // blocks < tokens * window_size for blocks, tokens in budgets)
        return RasterOutput(
            features=features,
            valid=valid if padded else None,
            token_scores=pruning.per_video(token_scores.flatten()),
            keep_mask=pruning.per_video(keep_mask.flatten()),
        )

    def merge_frames(
        self, hidden_states: torch.Tensor, table: torch.Tensor, num_tokens: int, feature_layers: list[int]
    ) -> tuple[torch.Tensor, ...]:
        """
        The layers on the embeddings of frames (F, N, D), each of which ends as `m = num_tokens` groups of merged
        patches. table: (F, n, S) the patches of its blocks, -1 for padding. Returns the groups (F, m, S, D * feature
        layers), which of their slots are no padding (F, m, S), the blocks that they stand for (F, n) bool, and how many
        tokens each of a block's patches makes (F, n).
        """
        num_frames, num_patches, width = hidden_states.shape
        num_blocks, window_size = table.shape[1:]
        if num_tokens == 0:
            nothing = hidden_states.new_zeros(num_frames, 0, window_size, width * len(feature_layers))
            none = torch.zeros_like(table[..., 0], dtype=torch.bool)
            return nothing, nothing[..., 0].bool(), none, none.float()
        num_left = num_patches * num_tokens // num_blocks
        token_of_patch = torch.arange(num_patches, device=table.device).expand(num_frames, -1)
        sizes, outputs = None, {}
        for index, count in enumerate(merging_schedule(num_patches, num_left, max(feature_layers) + 1)):
            hidden_states, places = self.layers[index](hidden_states, None, sizes=sizes, num_left=count)
            token_of_patch = places.gather(1, token_of_patch)
            sizes = count_patches(token_of_patch, count) if count < num_patches else None
            if index in feature_layers:
                outputs[index] = hidden_states, token_of_patch
        features = []
        for states, earlier in (outputs[index] for index in feature_layers):
            if states.shape[1] > num_left:  # these tokens take part in the merges of later layers
                onward = torch.zeros_like(earlier[:, : states.shape[1]]).scatter(1, earlier, token_of_patch)
                states = merge_tokens(states, count_patches(earlier, states.shape[1]), onward, num_left)
            features.append(states)
        columns = self.config.image_size[1] // self.config.patch_size
        groups, valid, blocks = group_tokens(token_of_patch, num_left, table, num_tokens, columns)
        frame = torch.arange(num_frames, device=table.device)[:, None, None]
        taken = torch.cat(features, dim=-1)[frame, groups] * valid[..., None]
        shares = 1 / count_patches(token_of_patch, num_left).gather(1, token_of_patch)  # (F, N)
        shares = shares[frame, table.clamp_min(0)] * (table >= 0)
        return (
            taken,
            valid,
            torch.zeros_like(table[..., 0], dtype=torch.bool).scatter(1, blocks, True),
            shares.sum(-1) / (table >= 0).sum(-1),
        )


def group_tokens(
    token_of_patch: torch.Tensor, num_left: int, table: torch.Tensor, num_tokens: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Cuts the `num_left` merged patches of each frame into `m = num_tokens` groups of neighbours, as even as can be.

    A merged patch lies where the patch nearest to the centroid of its patches lies, and groups follow each other block
    by block. token_of_patch: (F, N). table: (F, n, S) the patches of each block, -1 for padding. columns: of the patch
    grid. Returns the merged patches of each group and whether a slot holds one, (F, m, S), and (F, m) for each group a
    block: that of its middle patch, or the nearest that makes all different and ascending.
    """
    num_frames, num_patches = token_of_patch.shape
    num_blocks, window_size = table.shape[1:]
    device = table.device
    if num_tokens == num_blocks:  # nothing was merged
        return table.clamp_min(0), table >= 0, torch.arange(num_blocks, device=device).expand(num_frames, -1)
    slots = torch.arange(num_blocks * window_size, device=device).expand(num_frames, -1)
    flat = torch.where(table < 0, num_patches, table).flatten(1)  # one spare patch takes the padding slots
    slot_of_patch = slots.new_zeros(num_frames, num_patches + 1).scatter(1, flat, slots)
    patches = torch.arange(num_patches, device=device)
    rows_and_columns = torch.stack([patches // columns, patches % columns], dim=-1).float()  # (N, 2)
    centroids = merge_tokens(
        rows_and_columns.expand(num_frames, -1, -1), torch.ones_like(token_of_patch).float(), token_of_patch, num_left
    )
    nearest = (centroids.round() * centroids.new_tensor([columns, 1])).sum(-1).long()  # (F, num_left)
    slot, order = slot_of_patch.gather(1, nearest).sort(dim=-1, stable=True)

    group = torch.arange(num_tokens, device=device)
    start, end = group * num_left // num_tokens, (group + 1) * num_left // num_tokens
    members = start[:, None] + torch.arange(window_size, device=device)  # (m, S)
    valid = members < end[:, None]
    blocks = slot[:, (start + end) // 2] // window_size  # (F, m), ascending
    blocks = ((blocks - group).cummax(dim=-1).values + group).minimum(num_blocks - num_tokens + group)
    return order[:, members.clamp_max(num_left - 1)], valid.expand(num_frames, -1, -1), blocks


class MergingModel(STTSModel):
    """`STTSModel` with the tower that merges."""

    vision_tower: MergingVisionModel

    def __init__(self, config: STTSConfig):
        super().__init__(config)
        self.vision_tower = MergingVisionModel(config.vision_config)


class MergingForConditionalGeneration(STTSForConditionalGeneration):
    """
    Molmo2 with ToMe, called, trained and saved like STTS; `pruning_layer` and `selector` have no effect.

    A checkpoint of it holds an STTS model's weights and is loaded by this class's `from_pretrained`; the Auto classes
    would give an STTS model.
    """

    _auto_class = None  # so that no code of this file goes into a checkpoint, where it could not run
    model: MergingModel

    def __init__(self, config: STTSConfig):
        super().__init__(config)
        self.model = MergingModel(config)
