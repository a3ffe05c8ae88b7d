"""What a video's blocks are worth: token pooler, scorer, attention bias, temporal loss, and which blocks stay.

Pure tensors and plain numbers. A block is a window of `S` patches (`S = w^2`, padding
slots included) of one frame. The blocks of all videos follow each other, ordered by (video, frame, block); `G` is
their number. A video of `T` frames with `rows x cols = n` blocks each is described by its grid `(T, rows, cols)`.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

MIN_RESCALED_SCORE = math.exp(-2)
# Scores begin near the small values they are to learn (paper 3.4: `1 - similarity`). From 0.5 all of them would fall
# at once, as far as the sigmoid's flat end, and there they would stay: see docs/training.md.
FIRST_LOGIT = -2.0
SIMILARITY_CHUNK = 16


class TokenPooler(nn.Module):
    """Multi-head attention of each block's mean over its own patches (paper 3.1; no norm, no residual)."""

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int | None = None):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim if head_dim is not None else hidden_size // num_heads
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim)
        self.k_proj = nn.Linear(hidden_size, num_heads * self.head_dim)
        self.v_proj = nn.Linear(hidden_size, num_heads * self.head_dim)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size)

    def forward(self, patches: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        """patches: (G, S, D), padding slots zero. valid: (G, S) bool, or None without padding. Returns (G, D)."""
        if valid is None:
            mean = patches.mean(dim=1)
        else:
            mean = patches.sum(dim=1) / valid.sum(dim=1, keepdim=True).to(patches.dtype)
        query, key, value = (
            projection(states).unflatten(-1, (self.num_heads, self.head_dim))
            for projection, states in ((self.q_proj, mean), (self.k_proj, patches), (self.v_proj, patches))
        )  # (G, H, d), (G, S, H, d), (G, S, H, d)
        logits = torch.einsum("ghd,gshd->ghs", query * self.head_dim**-0.5, key).float()
        if valid is not None:
            logits = logits.masked_fill(~valid[:, None, :], -math.inf)
        weights = logits.softmax(dim=-1).to(value.dtype)
        return self.o_proj(torch.einsum("ghs,gshd->ghd", weights, value).flatten(1))


class TokenScorer(nn.Module):
    """
    Token pooler and three-layer MLP on `[previous frame | current frame]` (paper 3.1): one score in (0, 1) per block.

    Until `score_layer` is trained its weights are zero and its bias `FIRST_LOGIT`: every score is 0.12, and the bias of
    attention the same for all keys of a frame.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, num_heads: int, head_dim: int | None = None):
        super().__init__()
        self.token_pooler = TokenPooler(hidden_size, num_heads, head_dim)
        self.input_layer = nn.Linear(2 * hidden_size, intermediate_size)
        self.hidden_layer = nn.Linear(intermediate_size, intermediate_size)
        self.score_layer = nn.Linear(intermediate_size, 1)

    def forward(
        self, patches: torch.Tensor, grids: list[tuple[int, int, int]], valid: torch.Tensor | None = None
    ) -> torch.Tensor:
        """
        patches: (G, S, D). grids: `(T, rows, cols)` of each video. valid: (G, S) bool or None.
        Returns raw scores (G,) in float32. Frame 0 of each video is scored against zeros.
        """
        pooled = self.token_pooler(patches, valid)  # (G, D)
        pairs = torch.cat([previous_frame(pooled, grids), pooled], dim=-1)  # (G, 2D)
        hidden = F.silu(self.input_layer(pairs))
        hidden = F.silu(self.hidden_layer(hidden))
        return self.score_layer(hidden).squeeze(-1).float().sigmoid()


def previous_frame(blocks: torch.Tensor, grids: list[tuple[int, int, int]]) -> torch.Tensor:
    """For blocks (G, ...): the same block one frame earlier, zeros for each video's first frame. Returns (G, ...)."""
    shifted = []
    for video, (num_frames, rows, cols) in zip(split_videos(blocks, grids), grids, strict=True):
        shifted.append(torch.zeros_like(video[: rows * cols]))
        shifted.append(video[: (num_frames - 1) * rows * cols])
    return torch.cat(shifted)


def split_videos(blocks: torch.Tensor, grids: list[tuple[int, int, int]]) -> tuple[torch.Tensor, ...]:
    """Cuts (G, ...) into one (T * n, ...) view per video."""
    return blocks.split([num_frames * rows * cols for num_frames, rows, cols in grids])


def score_bias(
    scores: torch.Tensor, grids: list[tuple[int, int, int]], rescaling: str = "row", biased: list[bool] | None = None
) -> torch.Tensor:
    """
    The bias that the scores (G,) add to the attention logits of layer `l + 1`, per key (paper 3.2, log of the score).

    `rescaling` "row" or "frame" first stretches the scores linearly to `[e^-2, 1]` between the minimum and maximum of
    each row of the patch grid or of each frame (`+1e-6` in the denominator); "none" takes the plain logarithm. All
    patches of a block share its score, so a row of patches and a row of blocks have the same extremes. Frame 0 of each
    video gets no bias, nor does a video that is not `biased`: one that loses nothing, as in the released code.
    Returns (G,) in float32.
    """
    biases = []
    for index, (video, grid) in enumerate(zip(split_videos(scores.float(), grids), grids, strict=True)):
        if biased is not None and not biased[index]:
            biases.append(torch.zeros_like(video))
            continue
        weights = video.view(grid)[1:]  # (T - 1, rows, cols)
        if rescaling != "none":
            over = (-1,) if rescaling == "row" else (-2, -1)
            low, high = weights.amin(over, keepdim=True), weights.amax(over, keepdim=True)
            unit = (weights - low) / (high - low + 1e-6)
            weights = MIN_RESCALED_SCORE + (1 - MIN_RESCALED_SCORE) * unit
        biases.append(video.new_zeros(grid[1] * grid[2]))
        # A saturated score is 0 in float32, and minus infinity would become NaN on its way through the kernels.
        biases.append(weights.clamp_min(torch.finfo(torch.float32).tiny).log().flatten())
    return torch.cat(biases)


def temporal_similarity(patches: torch.Tensor, grids: list[tuple[int, int, int]]) -> torch.Tensor:
    """
    Cosine similarity of each block's concatenated patches (G, S, D) with the same block one frame earlier (paper 3.4).
    Returns (G,) in float32; frame 0 of each video has nothing to resemble and gets 0.
    """
    similarities = []
    for video, (_, rows, cols) in zip(split_videos(patches, grids), grids, strict=True):
        step = rows * cols
        flat = video.flatten(1)  # (T * n, S * D)
        similarities.append(flat.new_zeros(step, dtype=torch.float32))
        # Some frames at a time: in float32, the products of a long video alone would be as large as all its patches.
        for start in range(step, flat.shape[0], SIMILARITY_CHUNK * step):
            stop = min(start + SIMILARITY_CHUNK * step, flat.shape[0])
            some = flat[start - step : stop].float()  # with the frame before them
            norms = torch.linalg.vector_norm(some, dim=-1).clamp_min(1e-12)
            products = (some[step:] * some[:-step]).sum(-1)
            similarities.append(products / (norms[step:] * norms[:-step]))
    return torch.cat(similarities)


def temporal_errors(
    scores: torch.Tensor, patches: torch.Tensor, grids: list[tuple[int, int, int]], detach_target: bool = True
) -> list[torch.Tensor]:
    """
    Squared errors between scores (G,) and `1 - similarity` (paper 3.4) in frames `t >= 1`, per video ((T - 1) * n,),
    float32. Their mean is the temporal loss. `detach_target` keeps the gradient out of patches (G, S, D).
    """
    target = 1 - temporal_similarity(patches.detach() if detach_target else patches, grids)
    errors = (scores.float() - target).square()
    return [video[rows * cols :] for video, (_, rows, cols) in zip(split_videos(errors, grids), grids, strict=True)]


def mean_error(errors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Mean over the blocks of one video or more, 0 where no video has a second frame."""
    return torch.cat(list(errors)).sum() / max(sum(video.numel() for video in errors), 1)


def block_worth(scores: torch.Tensor, unit: float) -> torch.Tensor:
    """
    What leaving a block out costs, in nats of answer loss, by a scorer that was trained towards answers: `unit` times
    the logit of its score, from that of an untrained scorer on. Scores and result have one shape, in float32.
    """
    return unit * (torch.logit(scores.float(), eps=1e-6) - FIRST_LOGIT)


def random_ranking(grids: list[tuple[int, int, int]], device: torch.device, seed: int | None = None) -> torch.Tensor:
    """Uniform random scores (G,); with a `seed`, each video draws from a generator of its own with that seed."""
    draws = []
    for num_frames, rows, cols in grids:
        generator = None if seed is None else torch.Generator(device).manual_seed(seed)
        draws.append(torch.rand(num_frames * rows * cols, device=device, generator=generator))
    return torch.cat(draws)


def num_kept_blocks(num_frames: int, blocks_per_frame: int, pruning_ratio: float) -> int:
    """
    How many of a video's blocks stay: all but `floor(k * n * T)`, but never less than frame 0; none at all for `k = 1`,
    the paper's text-only control.
    """
    if pruning_ratio >= 1:
        return 0
    num_blocks = num_frames * blocks_per_frame
    # The nudge undoes binary fractions: 0.7 * 5670 is 3968.9999999999995, where 7/10 of 5670 is 3969.
    dropped = math.floor(pruning_ratio * num_blocks + 1e-9)
    return num_blocks - min(dropped, num_blocks - blocks_per_frame)


def select_blocks(
    ranking: torch.Tensor, grids: list[tuple[int, int, int]], num_kept: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Keeps the `num_kept[v]` highest-ranked blocks of each video; frame 0 outranks all (paper 3.3).

    ranking: (G,), higher stays. Of equals, the earlier in (frame, block) order is dropped first. All sizes are known
    on the host, so nothing forces a host-device sync. Returns `keep_mask` (G,) bool and `kept_blocks`
    (sum(num_kept),), the indices of the kept blocks in ascending order.
    """
    keep_masks, kept_blocks, start = [], [], 0
    for video, (_, rows, cols), kept in zip(split_videos(ranking.detach(), grids), grids, num_kept, strict=True):
        # Blocks of a score that is no number go first, and none, infinite or not, outranks frame 0.
        video = video.float().nan_to_num(nan=-math.inf, neginf=-math.inf)
        video[: rows * cols] = math.inf
        dropped_first = torch.sort(video, stable=True).indices  # (T * n,)
        survivors = dropped_first[video.numel() - kept :].sort().values  # (K,)
        keep_masks.append(torch.zeros_like(video, dtype=torch.bool).index_fill_(0, survivors, True))
        kept_blocks.append(survivors + start)
        start += video.numel()
    return torch.cat(keep_masks), torch.cat(kept_blocks)
