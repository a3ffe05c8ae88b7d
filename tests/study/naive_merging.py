"""ToMe written straight from its paper, token by token: a token is a vector and the set of patches it stands for.

It shares no code with `token_merging`, and knows weights only by their native names (tests/naive.py).
"""

import itertools
import math
import operator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tests.naive import TOWER, NaiveGeometry, Weights, attention, embed, linear


@dataclass(frozen=True)
class Token:
    vector: torch.Tensor
    patches: frozenset[int]


def cosine(a: list[float], b: list[float]) -> float:
    return sum(map(operator.mul, a, b)) / (math.hypot(*a) * math.hypot(*b))


def naive_matching(keys: list[list[float]], num_merged: int) -> dict[int, int]:
    """Which token (even place) merges into which (odd place): ToMe section 3, "Bipartite Soft Matching"."""
    edges = []
    for a in range(0, len(keys), 2):
        likeness = [(cosine(keys[a], keys[b]), b) for b in range(1, len(keys), 2)]
        best, b = max(likeness, key=lambda edge: edge[0])
        edges.append((best, a, b))
    edges.sort(key=lambda edge: -edge[0])
    return {a: b for _, a, b in edges[:num_merged]}


def merge(tokens: list[Token], merged: dict[int, int]) -> list[Token]:
    """What is left: even places in their order, then odd places, each the mean of its patches' vectors."""
    groups = {place: [place] for place in range(len(tokens)) if place not in merged}
    for a, b in merged.items():
        groups[b].append(a)
    left = []
    for place in [*range(0, len(tokens), 2), *range(1, len(tokens), 2)]:
        if place in groups:
            copies = [token.vector for one in groups[place] for token in [tokens[one]] for _ in token.patches]
            patches = frozenset().union(*(tokens[one].patches for one in groups[place]))
            left.append(Token(torch.stack(copies).mean(dim=0), patches))
    return left


def naive_layer(
    weights: Weights, geometry: NaiveGeometry, layer: int, tokens: list[Token], num_left: int
) -> list[Token]:
    """A layer in which a token of s patches stands beside the queries as s equal keys and values."""
    name = f"{TOWER}.layers.{layer}"

    def norm(which: str, y: torch.Tensor) -> torch.Tensor:
        weight, bias = weights[f"{name}.{which}.weight"], weights[f"{name}.{which}.bias"]
        return F.layer_norm(y, y.shape[-1:], weight, bias, geometry.layer_norm_eps)

    x = torch.stack([token.vector for token in tokens])
    y = norm("layer_norm1", x)
    copies = torch.stack([row for row, token in zip(y, tokens, strict=True) for _ in token.patches])
    x = x + attention(weights, f"{name}.self_attn", geometry.num_heads, y, copies)
    keys = linear(weights, f"{name}.self_attn.k_proj", y.detach()).unflatten(-1, (geometry.num_heads, -1)).mean(dim=1)
    attended = [Token(row, token.patches) for row, token in zip(x, tokens, strict=True)]
    left = merge(attended, naive_matching(keys.tolist(), len(tokens) - num_left))
    x = torch.stack([token.vector for token in left])
    z = linear(weights, f"{name}.mlp.fc1", norm("layer_norm2", x))
    x = x + linear(weights, f"{name}.mlp.fc2", F.gelu(z, approximate="tanh"))
    return [Token(row, token.patches) for row, token in zip(x, left, strict=True)]


def naive_frame(
    weights: Weights,
    geometry: NaiveGeometry,
    pixels: torch.Tensor,
    table: torch.Tensor,
    num_tokens: int,
    counts: list[int],
) -> tuple[list[torch.Tensor], list[int], list[float]]:
    """
    One frame (N, pixels) with its blocks' patches (n, S), left with `counts` tokens after each layer.

    Returns `num_tokens` groups of at most S merged patches, each (at most S, D * feature layers), ascending blocks that
    they are nearest to, and of each block the mean of 1 / size over its patches.
    """
    vectors = embed(weights, pixels[None])[0]
    tokens = [Token(vector, frozenset([patch])) for patch, vector in enumerate(vectors)]
    after = []
    for layer, count in enumerate(counts):
        tokens = naive_layer(weights, geometry, layer, tokens, count)
        after.append(tokens)
    blocks = [[int(patch) for patch in row if patch >= 0] for row in table]
    place = {patch: (block, slot) for block, row in enumerate(table.tolist()) for slot, patch in enumerate(row)}
    cols = geometry.patch_grid[1]

    def home(token: Token) -> tuple[int, int]:
        row = round(sum(patch // cols for patch in token.patches) / len(token.patches))
        col = round(sum(patch % cols for patch in token.patches) / len(token.patches))
        return place[row * cols + col]

    def features(token: Token) -> torch.Tensor:
        parts = []
        for layer in geometry.feature_layers:
            of_patch = {patch: one.vector for one in after[layer] for patch in one.patches}
            parts.append(torch.stack([of_patch[patch] for patch in token.patches]).mean(dim=0))
        return torch.cat(parts)

    size_of = {patch: len(token.patches) for token in tokens for patch in token.patches}
    shares = [sum(1 / size_of[patch] for patch in block) / len(block) for block in blocks]
    if num_tokens == len(blocks):
        groups = [[token for patch in block for token in tokens if token.patches == {patch}] for block in blocks]
        return [torch.stack([features(token) for token in group]) for group in groups], list(range(num_tokens)), shares
    line = sorted(tokens, key=home)
    cuts = [len(line) * group // num_tokens for group in range(num_tokens + 1)]
    groups = [line[start:end] for start, end in itertools.pairwise(cuts)]
    middles = [home(line[(start + end) // 2])[0] for start, end in itertools.pairwise(cuts)]
    chosen: list[int] = []
    for group, block in enumerate(middles):
        last = len(blocks) - num_tokens + group  # so that the groups behind it find a block, too
        chosen.append(min(max([block, *(one + 1 for one in chosen[-1:])]), last))
    return [torch.stack([features(token) for token in group]) for group in groups], chosen, shares


def tokens_of_frames(num_frames: int, num_kept: int) -> list[int]:
    """`num_kept` tokens spread over the frames of a video, so that frames 0..t together have their share of it."""
    until = [math.floor(num_kept * frame / num_frames) for frame in range(num_frames + 1)]
    return [after - before for before, after in itertools.pairwise(until)]
