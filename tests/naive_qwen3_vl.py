"""STTS on Qwen3-VL written straight from its formulas: dense, masked, one video and one token at a time.

The tower shares no code with ours and takes nothing but weights from the model; what follows it is native Qwen3-VL's
text model on embeddings, positions and deepstack features that are put together token by token.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from tests.naive import NaiveRule, naive_bias, naive_is_biased, naive_keep_mask, naive_scores, naive_similarity
from tests.tiny_qwen3_vl import IMAGE_ID, VIDEO_ID, Inputs


@dataclass
class NaiveVideo:
    """features, and deepstack per tap: (K, text width). scores: (T, n), or None without a scorer. keep_mask: (T, n)."""

    features: torch.Tensor
    deepstack: list[torch.Tensor]
    keep_mask: torch.Tensor
    scores: torch.Tensor | None
    similarity: torch.Tensor


def block_order(rows: int, cols: int, side: int) -> torch.Tensor:
    """Places in a raster of patches, (rows * cols,), in the order in which patches come: block by block."""
    raster = torch.arange(rows * cols).view(rows // side, side, cols // side, side)
    return raster.transpose(1, 2).flatten()


@dataclass
class NaiveRanking:
    """
    keep_mask, scores, similarity: as in `NaiveVideo`. kept: (T * N,) bool, patches of kept blocks. bias: (T * N,) of
    the keys of layer `l + 1`.
    """

    keep_mask: torch.Tensor
    scores: torch.Tensor | None
    similarity: torch.Tensor
    kept: torch.Tensor
    bias: torch.Tensor


def naive_ranking(tower: Any, config: Any, states: torch.Tensor, grid: list[int], ratio: NaiveRule) -> NaiveRanking:
    """After layer `l`: patches (T, N, D) block by block, and their grid (T, rows, cols) in patches."""
    num_frames, rows, cols = grid
    size, block_size = rows * cols, config.spatial_merge_size**2
    blocks = torch.arange(num_frames * size).view(-1, block_size)
    similarity, scores = naive_similarity(states, blocks), None
    if config.selector == "scorer":
        scorer = {f"vision_tower.scorer.{name}": weight for name, weight in tower.scorer.named_parameters()}
        scores = naive_scores(scorer, config.num_heads, states, blocks)
    keep_mask = naive_keep_mask(1 - similarity if scores is None else scores, ratio)
    bias = torch.zeros(num_frames * size)
    if scores is not None and naive_is_biased(ratio, num_frames, size // block_size):
        order = block_order(rows, cols, config.spatial_merge_size)
        raster = torch.cat([frame * size + order.view(-1, block_size) for frame in range(num_frames)])
        by_raster = naive_bias(scores, raster, (rows, cols), config.score_rescaling)  # (T, N)
        bias = by_raster[:, order].flatten()
    return NaiveRanking(keep_mask, scores, similarity, keep_mask.flatten().repeat_interleave(block_size), bias)


def rotation(order: torch.Tensor, cols: int, num_frames: int, head_dim: int, base: float) -> Callable[..., Any]:
    """Turns queries and keys (T * N, heads, head_dim) by the rows and columns of their patches. order: (N,)."""
    frequencies = base ** -(torch.arange(0, head_dim // 2, 2) / (head_dim // 2))
    angles = torch.cat([(order // cols)[:, None] * frequencies, (order % cols)[:, None] * frequencies], dim=-1)
    angles = angles.repeat(num_frames, 2)[:, None]  # (T * N, 1, head_dim)

    def rotate(states: torch.Tensor) -> torch.Tensor:
        first, second = states.chunk(2, dim=-1)
        return states * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()

    return rotate


def naive_video(model: Any, pixels: torch.Tensor, grid: list[int], ratio: NaiveRule) -> NaiveVideo:
    """One video (T * N, values) with its grid (T, rows, cols) in patches."""
    tower, config = model.model.visual, model.config.vision_config
    num_frames, rows, cols = grid
    side, heads = config.spatial_merge_size, config.num_heads
    order, size = block_order(rows, cols, side), rows * cols
    kernel = tower.patch_embed.proj
    x = pixels @ kernel.weight.flatten(1).T + kernel.bias
    table_side = math.isqrt(config.num_position_embeddings)
    table = tower.pos_embed.weight.T.view(1, -1, table_side, table_side)
    learned = F.interpolate(table, (rows, cols), mode="bilinear", align_corners=True)[0].flatten(1).T
    x = x + learned[order].repeat(num_frames, 1)

    head_dim = config.hidden_size // heads
    rotate = rotation(order, cols, num_frames, head_dim, config.rope_parameters["rope_theta"])
    frame = torch.arange(num_frames).repeat_interleave(size)
    same_frame = frame[:, None] == frame[None]
    kept = torch.ones(num_frames * size, dtype=torch.bool)
    bias = torch.zeros(num_frames * size)
    outputs = []
    for index, block in enumerate(tower.blocks):
        query, key, value = block.attn.qkv(block.norm1(x)).view(-1, 3, heads, head_dim).unbind(1)
        logits = torch.einsum("qhd,khd->hqk", rotate(query), rotate(key)) / math.sqrt(head_dim)
        if index == config.pruning_layer + 1:
            logits = logits + bias
        allowed = same_frame & kept if index > config.pruning_layer + 1 else same_frame
        # A frame that lost everything has nothing to attend to, and nothing comes of it.
        weights = logits.masked_fill(~allowed, -math.inf).softmax(-1).nan_to_num()
        x = x + block.attn.proj(torch.einsum("hqk,khd->qhd", weights, value).flatten(1))
        x = x + block.mlp.linear_fc2(F.gelu(block.mlp.linear_fc1(block.norm2(x)), approximate="tanh"))
        outputs.append(x)
        if index == config.pruning_layer:
            ranking = naive_ranking(tower, config, x.view(num_frames, size, -1), grid, ratio)
            kept, bias = ranking.kept, ranking.bias

    def merge(merger: Any, states: torch.Tensor, norm_first: bool) -> torch.Tensor:
        if norm_first:
            blocks = merger.norm(states).view(-1, side * side * config.hidden_size)
        else:
            blocks = merger.norm(states.view(-1, side * side * config.hidden_size))
        return merger.linear_fc2(F.gelu(merger.linear_fc1(blocks)))[ranking.keep_mask.flatten()]

    taps = zip(tower.deepstack_merger_list, config.deepstack_visual_indexes, strict=True)
    deepstack = [merge(merger, outputs[index], False) for merger, index in taps]
    return NaiveVideo(merge(tower.merger, x, True), deepstack, ranking.keep_mask, ranking.scores, ranking.similarity)


@dataclass
class NaiveOutput:
    """kept: places of the tokens that are left. logits: (L', vocabulary). labels: (L',). positions: (3, L')."""

    kept: list[int]
    logits: torch.Tensor
    labels: list[int]
    positions: torch.Tensor
    videos: list[NaiveVideo] = field(default_factory=list)

    @property
    def task_losses(self) -> torch.Tensor:
        """Cross entropy of each label from the token before it; the first has none."""
        labels = torch.tensor(self.labels[1:])
        losses = F.cross_entropy(self.logits[:-1], labels, reduction="none", ignore_index=-100)
        return losses[labels != -100]


def per_token(encoded: list[tuple[torch.Tensor, list[torch.Tensor]]]) -> Iterator[Any]:
    """Features of each token (text width,), and those of its taps."""
    for features, taps in encoded:
        yield from ((feature, [tap[place] for tap in taps]) for place, feature in enumerate(features))


def naive_forward(
    model: Any,
    row: Inputs,
    ratio: NaiveRule | None = None,
    shift: int = 0,
    encode: Callable[[Any, torch.Tensor, list[int], NaiveRule], NaiveVideo] = naive_video,
) -> NaiveOutput:
    """
    One sample, whose videos `encode` encodes. Positions are native `get_rope_index`'s of the whole prompt, those of
    the tokens that are left; `shift` moves every token after the first dropped one, for tests that must notice it.
    """
    native = model.model
    ratio = model.config.vision_config.pruning_ratio if ratio is None else ratio
    of_videos, of_images = row.get("video_grid_thw"), row.get("image_grid_thw")
    videos: list[NaiveVideo] = []
    if of_videos is not None:
        pixels = row["pixel_values_videos"].split(of_videos.prod(-1).tolist())
        videos = [encode(model, some, grid, ratio) for some, grid in zip(pixels, of_videos.tolist(), strict=True)]
    video_tokens = per_token([(video.features, video.deepstack) for video in videos])
    keep = iter([kept for video in videos for kept in video.keep_mask.flatten().tolist()])
    image_tokens: Iterator[Any] = iter(())
    if of_images is not None:
        images = native.get_image_features(row["pixel_values"], of_images, return_dict=True)
        taps_of_images = [torch.cat(list(tap)) for tap in images.get("deepstack_features") or ()]
        image_tokens = per_token([(torch.cat(list(images.pooler_output)), taps_of_images)])
    timing = {name: row[name] for name in row if name == "second_per_grid_ts"}
    positions, _ = native.get_rope_index(row["input_ids"], row["mm_token_type_ids"], of_images, of_videos, **timing)

    kept: list[int] = []
    embeddings, is_vision, taps, shifts = [], [], [], []
    for place, token in enumerate(row["input_ids"][0].tolist()):
        embedding = native.language_model.embed_tokens.weight[token]
        if token in (IMAGE_ID, VIDEO_ID):
            if token == VIDEO_ID and not next(keep):
                continue
            embedding, tap = next(video_tokens if token == VIDEO_ID else image_tokens)
            taps.append(tap)
        is_vision.append(token in (IMAGE_ID, VIDEO_ID))
        embeddings.append(embedding)
        shifts.append(shift if len(kept) < place else 0)
        kept.append(place)
    assert next(keep, None) is None
    assert next(video_tokens, None) is None
    of_kept = positions[:, :, kept] + torch.tensor(shifts)
    deepstack: dict[str, Any] = {}
    if any(taps):
        deepstack["deepstack_visual_embeds"] = [torch.stack(tap) for tap in zip(*taps, strict=True)]
        deepstack["visual_pos_masks"] = torch.tensor([is_vision])
    hidden_states = native.language_model(
        inputs_embeds=torch.stack(embeddings)[None],
        position_ids=of_kept,
        attention_mask=torch.ones(1, len(kept), dtype=torch.long),
        use_cache=False,
        **deepstack,
    ).last_hidden_state
    labels = row["labels"][0, kept].tolist() if "labels" in row else []
    return NaiveOutput(kept, model.lm_head(hidden_states)[0], labels, of_kept[:, 0], videos)
