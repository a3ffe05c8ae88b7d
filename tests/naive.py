"""The vision side of STTS written straight from its formulas: slow, loop by loop, and differentiable.

It is the yardstick of the optimised code, so it shares none with it and knows neither transformers nor stts_hf.
Letters in shapes: V videos, T frames of one video, F frames of all videos, N patches and n blocks per frame, w pooling
width, D ViT width, K kept blocks of all videos. Weights are a flat dict whose names are native Molmo2's without the
leading `model.` (`vision_tower.layers.0.self_attn.q_proj.weight`, `multi_modal_projector.image_projector...`).

A block is a row of the pooling table: indices into the flattened (F * N) patches, -1 where a border block has no patch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

Weights = dict[str, torch.Tensor]
TOWER = "vision_tower"
SCORER = "vision_tower.scorer"
PROJECTOR = "multi_modal_projector"
LOWEST_RESCALED_SCORE = math.exp(-2)


@dataclass(frozen=True)
class NaiveGeometry:
    """What cannot be read off the weights: `feature_layers` in the connector's order, `patch_grid` as (rows, cols)."""

    num_heads: int
    pruning_layer: int
    feature_layers: Sequence[int]
    patch_grid: tuple[int, int]
    connector_heads: int | None = None  # None: the ViT's
    layer_norm_eps: float = 1e-6


@dataclass(frozen=True)
class NaiveVisionOutput:
    """scores: per video (T, n), None without a scorer; keep_masks: per video bool (T, n); pooled_features: (K, text
    width) in the table's order; temporal_loss: scalar, unweighted; bins: frames (numbered over all videos) packed
    together; num_refilled_patches: dropped patches that stayed on as context."""

    scores: list[torch.Tensor] | None
    keep_masks: list[torch.Tensor]
    pooled_features: torch.Tensor
    temporal_loss: torch.Tensor | None
    bins: list[list[int]]
    num_refilled_patches: int


@dataclass(frozen=True)
class NaiveThreshold:
    """
    In place of a ratio: blocks with at least this score stay. lowest, highest: the least and the largest share that
    goes. budget: most blocks that stay.
    """

    score: float
    lowest: float = 0.0
    highest: float = 1.0
    budget: int | None = None


NaiveRule = float | NaiveThreshold


def linear(weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    """`x W^T + b`, the bias if there is one."""
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def attention(
    weights: Weights,
    name: str,
    num_heads: int,
    queries: torch.Tensor,
    context: torch.Tensor,
    key_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multi-head attention of `queries` (Q, D) over `context` (M, D), with `key_bias` (M,) added to all logits: (Q, D).

    One head at a time: softmax(q k^T / sqrt(head_dim) + bias) v, paper section 3.2."""
    q = linear(weights, f"{name}.q_proj", queries)
    k = linear(weights, f"{name}.k_proj", context)
    v = linear(weights, f"{name}.v_proj", context)
    heads = []
    for q_head, k_head, v_head in zip(*(t.chunk(num_heads, dim=-1) for t in (q, k, v)), strict=True):
        logits = q_head @ k_head.T / math.sqrt(q_head.shape[-1])  # (Q, M)
        if key_bias is not None:
            logits = logits + key_bias
        heads.append(logits.softmax(dim=-1) @ v_head)
    return linear(weights, f"{name}.o_proj", torch.cat(heads, dim=-1))


def vit_layer(
    weights: Weights,
    geometry: NaiveGeometry,
    layer: int,
    x: torch.Tensor,
    key_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """One pre-norm encoder layer over the patches of one frame: (M, D) -> (M, D)."""
    name = f"{TOWER}.layers.{layer}"

    def norm(which: str, y: torch.Tensor) -> torch.Tensor:
        weight, bias = weights[f"{name}.{which}.weight"], weights[f"{name}.{which}.bias"]
        return F.layer_norm(y, y.shape[-1:], weight, bias, geometry.layer_norm_eps)

    y = norm("layer_norm1", x)
    x = x + attention(weights, f"{name}.self_attn", geometry.num_heads, y, y, key_bias)
    y = linear(weights, f"{name}.mlp.fc1", norm("layer_norm2", x))
    return x + linear(weights, f"{name}.mlp.fc2", F.gelu(y, approximate="tanh"))


def embed(weights: Weights, pixel_patches: torch.Tensor) -> torch.Tensor:
    """Patch embedding plus learned positions: (F, N, pixels) -> (F, N, D)."""
    return linear(weights, f"{TOWER}.patch_embedding", pixel_patches) + weights[f"{TOWER}.positional_embedding"]


def block_patches(hidden_states: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """The patches of one table row, out of (F, N, D): (at most w*w, D)."""
    return hidden_states.flatten(0, 1)[block[block >= 0]]


def naive_scores(weights: Weights, num_heads: int, hidden_states: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Scores of one video from its layer-l output (T, N, D) and its table (T*n, w*w): (T, n) in (0, 1).

    Paper section 3.1: the block's mean asks, its patches answer; an MLP on [previous frame | this frame]."""
    pooled = []
    for block in table:
        patches = block_patches(hidden_states, block)
        query = patches.mean(dim=0, keepdim=True)
        pooled.append(attention(weights, f"{SCORER}.token_pooler", num_heads, query, patches))
    frames = torch.stack(pooled).reshape(len(hidden_states), -1, hidden_states.shape[-1])  # (T, n, D)

    scores = []
    previous = torch.zeros_like(frames[0])
    for current in frames:
        y = torch.cat([previous, current], dim=-1)  # (n, 2D)
        y = F.silu(linear(weights, f"{SCORER}.input_layer", y))
        y = F.silu(linear(weights, f"{SCORER}.hidden_layer", y))
        scores.append(linear(weights, f"{SCORER}.score_layer", y).squeeze(-1).sigmoid())
        previous = current
    return torch.stack(scores)


def naive_similarity(hidden_states: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Cosine similarity of each block's concatenated patches with the previous frame's: (T, n), frame 0 is 0."""
    num_frames = len(hidden_states)
    blocks = table.reshape(num_frames, -1, table.shape[-1])  # (T, n, w*w)
    rows = [hidden_states.new_zeros(blocks.shape[1])]
    for t in range(1, num_frames):
        row = []
        for before, now in zip(blocks[t - 1], blocks[t], strict=True):
            a, b = block_patches(hidden_states, before).flatten(), block_patches(hidden_states, now).flatten()
            row.append(a @ b / (a.norm() * b.norm()))
        rows.append(torch.stack(row))
    return torch.stack(rows)


def naive_temporal_loss(
    scores: Sequence[torch.Tensor],
    similarities: Sequence[torch.Tensor],
    detach_target: bool = True,
) -> torch.Tensor:
    """Mean of (score - (1 - similarity))^2 over frames t >= 1, blocks and videos, paper section 3.4: a scalar.

    Both arguments hold one (T, n) tensor per video. Zero where no video has a second frame."""
    errors = []
    for score, similarity in zip(scores, similarities, strict=True):
        target = 1 - (similarity.detach() if detach_target else similarity)
        errors.append((score[1:] - target[1:]).square().flatten())
    errors_of_all = torch.cat(errors)
    return errors_of_all.mean() if len(errors_of_all) else errors_of_all.sum()


def naive_bias(
    scores: torch.Tensor, table: torch.Tensor, patch_grid: tuple[int, int], rescaling: str = "row"
) -> torch.Tensor:
    """Key bias of layer l+1 for one video: log of the rescaled scores (T, n), spread to the patches: (T, N).

    `rescaling` maps [minimum, maximum] of each "row" of the patch grid or of each "frame" to [e^-2, 1]; "none" takes
    the scores as they are. The first frame gets no bias."""
    num_frames, num_patches = len(scores), patch_grid[0] * patch_grid[1]
    block_of_patch = {
        patch: index for index, block in enumerate(table.tolist()) for patch in block if patch >= 0
    }  # patches of one block share its score
    order = torch.tensor([block_of_patch[patch] for patch in range(num_frames * num_patches)])
    spread = scores.flatten()[order].reshape(num_frames, *patch_grid)

    bias = [scores.new_zeros(num_patches)]
    for frame in spread[1:]:
        groups = {"row": list(frame), "frame": [frame.flatten()], "none": []}[rescaling]
        if groups:
            frame = torch.cat([_rescale(group) for group in groups])
        bias.append(frame.flatten().log())
    return torch.stack(bias)


def _rescale(values: torch.Tensor) -> torch.Tensor:
    unit = (values - values.min()) / (values.max() - values.min() + 1e-6)
    return LOWEST_RESCALED_SCORE + (1 - LOWEST_RESCALED_SCORE) * unit


def naive_budget(pruning_ratio: float, num_frames: int, num_blocks: int) -> int:
    """Blocks to drop from one video of T frames of n blocks: floor(ratio * n * T), frame 0 apart; all at ratio 1."""
    if pruning_ratio == 1:
        return num_frames * num_blocks
    # 0.7 * (81 * 70) is 3968.9999999999995 in binary: the nudge keeps the count of the ratio as it was written.
    return min(math.floor(pruning_ratio * num_frames * num_blocks + 1e-9), (num_frames - 1) * num_blocks)


def naive_is_biased(rule: NaiveRule, num_frames: int, num_blocks: int) -> bool:
    """Whether the scores bias layer l+1: with a ratio where it drops something, with a threshold in every video."""
    return isinstance(rule, NaiveThreshold) or naive_budget(rule, num_frames, num_blocks) > 0


def naive_num_dropped(scores: torch.Tensor, rule: NaiveRule) -> int:
    """Blocks to drop from one video by its scores (T, n). Frame 0 stays, but at ratio 1."""
    num_frames, num_blocks = scores.shape
    if not isinstance(rule, NaiveThreshold):
        return naive_budget(rule, num_frames, num_blocks)
    later = (num_frames - 1) * num_blocks
    dropped = sum(1 for frame in scores.tolist()[1:] for score in frame if score < rule.score)
    dropped = max(dropped, min(later, naive_budget(rule.lowest, num_frames, num_blocks)))
    dropped = min(dropped, later, naive_budget(rule.highest, num_frames, num_blocks))
    if rule.budget is not None:
        dropped = max(dropped, num_frames * num_blocks - rule.budget)
    return dropped


def naive_keep_mask(scores: torch.Tensor, rule: NaiveRule) -> torch.Tensor:
    """Blocks of one video that survive: bool (T, n). `scores` (T, n): the lowest go first, ties by (frame, block).

    Frame 0 goes last: it loses blocks only at ratio 1, where everything goes."""
    num_frames, num_blocks = scores.shape
    order = sorted((t == 0, scores[t, i].item(), t, i) for t in range(num_frames) for i in range(num_blocks))
    keep_mask = torch.ones(scores.shape, dtype=torch.bool)
    for _, _, t, i in order[: naive_num_dropped(scores, rule)]:
        keep_mask[t, i] = False
    return keep_mask


def naive_first_fit_descending(counts: Sequence[int], capacity: int) -> list[list[int]]:
    """Algorithm 1 of the paper, the textbook's: bins of item indices, equal counts in their given order.

    Items without any token are left out."""
    bins: list[list[int]] = []
    room: list[int] = []
    for item in sorted((i for i, count in enumerate(counts) if count), key=lambda i: -counts[i]):
        for bin_index in range(len(bins)):
            if counts[item] <= room[bin_index]:
                break
        else:
            bin_index = len(bins)
            bins.append([])
            room.append(capacity)
        bins[bin_index].append(item)
        room[bin_index] -= counts[item]
    return bins


def naive_connector(weights: Weights, num_heads: int, patches: torch.Tensor) -> torch.Tensor:
    """One kept block through attention pooling and SwiGLU projector: (at most w*w, D * layers) -> (text width,)."""
    query = patches.mean(dim=0, keepdim=True)
    x = attention(weights, f"{PROJECTOR}.image_pooling_2d", num_heads, query, patches)
    name = f"{PROJECTOR}.image_projector"
    x = F.silu(linear(weights, f"{name}.gate_proj", x)) * linear(weights, f"{name}.up_proj", x)
    return linear(weights, f"{name}.down_proj", x).squeeze(0)


def naive_remaining_layers(
    weights: Weights, geometry: NaiveGeometry, hidden_states: torch.Tensor, patches_of_frame: Sequence[list[int]]
) -> dict[int, torch.Tensor]:
    """Outputs of layers l+2 to the deepest feature layer, each frame's listed patches among themselves.

    `hidden_states` (F, N, D) is layer l+1's output. Outputs are (F, N, D) too, NaN where nothing was computed, so that
    a wrong index cannot pass for a feature."""
    outputs = {}
    frames = [frame[patches] for frame, patches in zip(hidden_states, patches_of_frame, strict=True)]
    for layer in range(geometry.pruning_layer + 2, max(geometry.feature_layers) + 1):
        frames = [vit_layer(weights, geometry, layer, frame) if len(frame) else frame for frame in frames]
        output = torch.full_like(hidden_states, torch.nan)
        for t, patches in enumerate(patches_of_frame):
            output[t, patches] = frames[t]
        outputs[layer] = output
    return outputs


def naive_vision_tower(
    weights: Weights,
    geometry: NaiveGeometry,
    pixel_patches: torch.Tensor,
    num_frames: Sequence[int],
    table: torch.Tensor,
    rule: NaiveRule,
    *,
    selector: str = "scorer",
    given_scores: Sequence[torch.Tensor] | None = None,
    score_rescaling: str = "row",
    refill: bool = False,
    detach_target: bool = True,
) -> NaiveVisionOutput:
    """Pixels (F, N, pixels) to connector outputs of the kept blocks, by the steps of paper section 3.

    Args:
        num_frames: frames of each video. table: (blocks of all videos, w*w), indices over all F * N patches.
        selector: "scorer", "cosine" (most similar to the previous frame goes first) or "given", which ranks by
            `given_scores` (per video (T, n)) as the random selector does. Only the scorer biases layer l+1, and at a
            ratio only where something is dropped: a video that loses no block goes through the ViT of stock Molmo2.
        refill: a frame alone in its bin keeps its dropped patches as context for the rest of the ViT. All videos of
            the call are packed together, so with refill a video's features depend on its company.
    """
    dense, pruning_layer = {}, geometry.pruning_layer
    frames = list(embed(weights, pixel_patches))
    for layer in range(pruning_layer + 1):
        frames = [vit_layer(weights, geometry, layer, frame) for frame in frames]
        dense[layer] = torch.stack(frames)  # (F, N, D)

    scores, keep_masks, similarities = [], [], []
    biases: list[torch.Tensor | None] = []
    for video, (hidden_states, video_table) in enumerate(_videos(dense[pruning_layer], num_frames, table)):
        similarities.append(naive_similarity(hidden_states, video_table))
        if selector == "scorer":
            scores.append(naive_scores(weights, geometry.num_heads, hidden_states, video_table))
        if selector == "scorer" and naive_is_biased(rule, *scores[-1].shape):
            biases.extend(naive_bias(scores[-1], video_table, geometry.patch_grid, score_rescaling))
        else:
            biases.extend([None] * len(hidden_states))
        rankings = {"scorer": scores, "cosine": [1 - s for s in similarities], "given": given_scores or []}
        keep_masks.append(naive_keep_mask(rankings[selector][video], rule))

    dense[pruning_layer + 1] = torch.stack(
        [
            vit_layer(weights, geometry, pruning_layer + 1, frame, bias)
            for frame, bias in zip(frames, biases, strict=True)
        ]
    )
    kept_table = table[torch.cat([mask.flatten() for mask in keep_masks])]  # (K, w*w)
    num_patches = pixel_patches.shape[1]
    kept_of_frame: list[list[int]] = [[] for _ in frames]
    for patch in sorted(kept_table[kept_table >= 0].tolist()):
        kept_of_frame[patch // num_patches].append(patch % num_patches)
    bins = naive_first_fit_descending([len(kept) for kept in kept_of_frame], num_patches)
    context_of_frame = list(kept_of_frame)
    for members in bins:
        if refill and len(members) == 1:
            context_of_frame[members[0]] = list(range(num_patches))

    outputs = dense | naive_remaining_layers(weights, geometry, dense[pruning_layer + 1], context_of_frame)
    features = torch.cat([outputs[layer] for layer in geometry.feature_layers], dim=-1)  # (F, N, D * layers)
    heads = geometry.connector_heads or geometry.num_heads
    pooled = [naive_connector(weights, heads, block_patches(features, block)) for block in kept_table]
    text_width = weights[f"{PROJECTOR}.image_projector.down_proj.weight"].shape[0]
    return NaiveVisionOutput(
        scores=scores or None,
        keep_masks=keep_masks,
        pooled_features=torch.stack(pooled) if pooled else features.new_zeros(0, text_width),
        temporal_loss=naive_temporal_loss(scores, similarities, detach_target) if scores else None,
        bins=bins,
        num_refilled_patches=sum(map(len, context_of_frame)) - sum(map(len, kept_of_frame)),
    )


def _videos(hidden_states: torch.Tensor, num_frames: Sequence[int], table: torch.Tensor):
    """Each video's frames (T, N, D) and its rows of the table, counted from its own first patch."""
    num_patches, first = hidden_states.shape[1], 0
    for frames in num_frames:
        start, stop = first * num_patches, (first + frames) * num_patches
        rows = table[[start <= max(block) < stop for block in table.tolist()]]
        yield hidden_states[first : first + frames], torch.where(rows >= 0, rows - start, rows)
        first += frames


_ORIGINAL_NAMES = {
    "image_vit.transformer.temporal_token_scorer.patch_token_pooler.": "vision_tower.scorer.token_pooler.",
    "image_vit.transformer.temporal_token_scorer.mlp.w1.": "vision_tower.scorer.input_layer.",
    "image_vit.transformer.temporal_token_scorer.mlp.w2.": "vision_tower.scorer.hidden_layer.",
    "image_vit.transformer.temporal_token_scorer.mlp.w3.": "vision_tower.scorer.score_layer.",
    "image_vit.transformer.resblocks.": "vision_tower.layers.",
    "image_vit.": "vision_tower.",
    "image_pooling_2d.": "multi_modal_projector.image_pooling_2d.",
    "image_projector.w1.": "multi_modal_projector.image_projector.gate_proj.",
    "image_projector.w2.": "multi_modal_projector.image_projector.down_proj.",
    "image_projector.w3.": "multi_modal_projector.image_projector.up_proj.",
    ".attention.": ".self_attn.",
    ".attention_norm.": ".layer_norm1.",
    ".ffn_norm.": ".layer_norm2.",
    ".feed_forward.w1.": ".mlp.fc1.",
    ".feed_forward.w2.": ".mlp.fc2.",
    ".wq.": ".q_proj.",
    ".wk.": ".k_proj.",
    ".wv.": ".v_proj.",
    ".wo.": ".o_proj.",
}


def weights_from_original(state_dict: Weights) -> Weights:
    """From the authors' vision backbone (names as in the fixtures, without `weights.`)."""
    weights = {}
    for name, tensor in state_dict.items():
        for old, new in _ORIGINAL_NAMES.items():
            name = name.replace(old, new)
        weights[name] = tensor
    return weights


def weights_from_native(state_dict: Weights) -> Weights:
    """From a `Molmo2ForConditionalGeneration`-style state dict with a scorer; the language model is left out."""
    names = {name: name.removeprefix("model.") for name in state_dict}
    return {new: state_dict[old] for old, new in names.items() if new.startswith((f"{TOWER}.", f"{PROJECTOR}."))}
