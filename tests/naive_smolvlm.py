"""STTS on SmolVLM2 written straight from its formulas: dense, masked, one video and one token at a time.

The tower shares no code with ours and takes nothing but weights from the model; what follows it is the native text
model on embeddings and positions that are put together token by token.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from tests.naive import NaiveRule, naive_bias, naive_is_biased, naive_keep_mask, naive_scores, naive_similarity
from tests.naive_qwen3_vl import NaiveOutput, NaiveVideo
from tests.tiny_smolvlm import PLACEHOLDER, Inputs


def naive_video(model: Any, pixels: torch.Tensor, ratio: NaiveRule) -> NaiveVideo:
    """One video (T, 3, height, width)."""
    tower, config, w = model.model.vision_model, model.config.vision_config, model.config.scale_factor
    side = config.image_size // config.patch_size
    size = side * side
    table = torch.arange(size).view(side // w, w, side // w, w).transpose(1, 2).reshape(-1, w * w)
    table = torch.cat([frame * size + table for frame in range(len(pixels))])  # (T * n, w^2)
    embeddings = tower.embeddings
    kernel, shift = embeddings.patch_embedding.weight, embeddings.patch_embedding.bias
    x = F.conv2d(pixels, kernel, shift, stride=config.patch_size).flatten(2).transpose(1, 2)
    x = x + embeddings.position_embedding.weight  # (T, N, D)
    allowed, bias = torch.ones(x.shape[:2], dtype=torch.bool), torch.zeros(x.shape[:2])
    heads = config.num_attention_heads
    for index, layer in enumerate(tower.encoder.layers):
        normed, attention = layer.layer_norm1(x), layer.self_attn
        query, key, value = (
            projection(normed).unflatten(-1, (heads, -1))
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        logits = torch.einsum("tqhd,tkhd->thqk", query, key) / math.sqrt(query.shape[-1])
        if index == config.pruning_layer + 1:
            logits = logits + bias[:, None, None]
        if index > config.pruning_layer + 1:
            logits = logits.masked_fill(~allowed[:, None, None], -math.inf)
        # A frame that lost everything has nothing to attend to, and nothing comes of it.
        attended = torch.einsum("thqk,tkhd->tqhd", logits.softmax(-1).nan_to_num(), value)
        x = x + attention.out_proj(attended.flatten(2))
        x = x + layer.mlp.fc2(F.gelu(layer.mlp.fc1(layer.layer_norm2(x)), approximate="tanh"))
        if index == config.pruning_layer:
            similarity, scores = naive_similarity(x, table), None
            if config.selector == "scorer":
                weights = {f"vision_tower.scorer.{name}": weight for name, weight in tower.scorer.named_parameters()}
                scores = naive_scores(weights, heads, x, table)
            keep_mask = naive_keep_mask(1 - similarity if scores is None else scores, ratio)
            if scores is not None and naive_is_biased(ratio, *scores.shape):
                bias = naive_bias(scores, table, (side, side), config.score_rescaling)
            kept = torch.zeros(x.shape[:2].numel(), dtype=torch.bool)
            kept[table[keep_mask.flatten()].flatten()] = True
            allowed = kept.view(x.shape[:2])
    blocks = tower.post_layernorm(x).flatten(0, 1)[table[keep_mask.flatten()]]  # (K, w^2, D)
    features = blocks.flatten(1) @ model.model.connector.modality_projection.proj.weight.T
    return NaiveVideo(features, [], keep_mask, scores, similarity)


def naive_forward(model: Any, row: Inputs, ratio: NaiveRule | None = None, shift: int = 0) -> NaiveOutput:
    """One sample; `shift` moves every token after the first dropped one, for tests that must notice it."""
    ratio = model.config.vision_config.pruning_ratio if ratio is None else ratio
    grids = row.get("video_grids", torch.zeros(0, 3, dtype=torch.long))
    pixels = row.get("pixel_values_videos", torch.zeros(0)).split(grids[:, 0].tolist())
    videos = [naive_video(model, some, ratio) for some in pixels if len(some)]
    of_videos = iter([feature for video in videos for feature in video.features])
    keep = iter([kept for video in videos for kept in video.keep_mask.flatten().tolist()])
    of_images: Iterator[Any] = iter(())
    if "pixel_values" in row:
        of_images = iter(torch.cat(model.model.get_image_features(row["pixel_values"]).pooler_output))
    kept: list[int] = []
    positions: list[int] = []
    embeddings = []
    types = row["mm_token_type_ids"][0].tolist()
    for place, token in enumerate(row["input_ids"][0].tolist()):
        embedding = model.get_input_embeddings().weight[token]
        if token == PLACEHOLDER and types[place] == 2:
            if not next(keep):
                continue
            embedding = next(of_videos)
        elif token == PLACEHOLDER:
            embedding = next(of_images)
        of_kept = len(kept) if model.config.pruned_position_ids == "compact" else place
        positions.append(of_kept + (shift if len(kept) < place else 0))
        embeddings.append(embedding)
        kept.append(place)
    assert next(keep, None) is None
    assert next(of_videos, None) is None
    hidden_states = model.model.text_model(
        inputs_embeds=torch.stack(embeddings)[None],
        position_ids=torch.tensor([positions]),
        attention_mask=torch.ones(1, len(kept), dtype=torch.long),
        use_cache=False,
    ).last_hidden_state
    labels = row["labels"][0, kept].tolist() if "labels" in row else []
    return NaiveOutput(kept, model.lm_head(hidden_states)[0], labels, torch.tensor([positions]), videos)
