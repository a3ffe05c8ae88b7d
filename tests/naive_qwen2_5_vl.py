"""STTS on Qwen2.5-VL written straight from its formulas: dense, masked, patches in the caller's order throughout.

The tower shares no code with ours and takes nothing but weights from the model. Windows are a mask: patches of a frame
whose blocks lie in the same square of the grid.
"""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from tests.naive import NaiveRule
from tests.naive_qwen3_vl import NaiveVideo, block_order, naive_ranking, rotation
from tests.naive_qwen3_vl import naive_forward as _naive_forward


def rms_norm(norm: Any, x: torch.Tensor) -> torch.Tensor:
    return norm.weight * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def naive_video(model: Any, pixels: torch.Tensor, grid: list[int], ratio: NaiveRule) -> NaiveVideo:
    """One video (T * N, values) with its grid (T, rows, cols) in patches."""
    tower, config = model.model.visual, model.config.vision_config
    num_frames, rows, cols = grid
    side, heads = config.spatial_merge_size, config.num_heads
    order, size = block_order(rows, cols, side), rows * cols
    x = pixels @ tower.patch_embed.proj.weight.flatten(1).T

    head_dim = config.hidden_size // heads
    rotate = rotation(order, cols, num_frames, head_dim, 10000.0)
    frame = torch.arange(num_frames).repeat_interleave(size)
    same_frame = frame[:, None] == frame[None]
    window = config.window_size // config.patch_size  # in patches
    place = torch.stack([order // cols // window, order % cols // window], dim=-1).repeat(num_frames, 1)
    same_window = same_frame & (place[:, None] == place[None]).all(-1)
    kept = torch.ones(num_frames * size, dtype=torch.bool)
    bias = torch.zeros(num_frames * size)
    for index, block in enumerate(tower.blocks):
        query, key, value = block.attn.qkv(rms_norm(block.norm1, x)).view(-1, 3, heads, head_dim).unbind(1)
        logits = torch.einsum("qhd,khd->hqk", rotate(query), rotate(key)) / math.sqrt(head_dim)
        if index == config.pruning_layer + 1:
            logits = logits + bias
        allowed = same_frame if index in config.fullatt_block_indexes else same_window
        if index > config.pruning_layer + 1:
            allowed = allowed & kept
        # A frame or window that lost everything has nothing to attend to, and nothing comes of it.
        weights = logits.masked_fill(~allowed, -math.inf).softmax(-1).nan_to_num()
        x = x + block.attn.proj(torch.einsum("hqk,khd->qhd", weights, value).flatten(1))
        normed = rms_norm(block.norm2, x)
        x = x + block.mlp.down_proj(F.silu(block.mlp.gate_proj(normed)) * block.mlp.up_proj(normed))
        if index == config.pruning_layer:
            ranking = naive_ranking(tower, config, x.view(num_frames, size, -1), grid, ratio)
            kept, bias = ranking.kept, ranking.bias

    first, _, second = tower.merger.mlp
    blocks = rms_norm(tower.merger.ln_q, x).view(-1, side * side * config.hidden_size)
    features = second(F.gelu(first(blocks)))[ranking.keep_mask.flatten()]
    return NaiveVideo(features, [], ranking.keep_mask, ranking.scores, ranking.similarity)


naive_forward = partial(_naive_forward, encode=naive_video)
