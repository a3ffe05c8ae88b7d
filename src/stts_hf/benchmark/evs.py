"""Pruning where the ViT ends, as vLLM's EVS does it: what STTS's training-free selectors are compared with.

EVS (Efficient Video Sampling, arXiv 2510.14624) compares what two neighbouring frames hand to the language model at
the same place, and drops the tokens that are most like the one before. The whole ViT has run by then, so only the
language model has less to do. As in vLLM, a token is all that it hands on: deepstack's features stand behind the merged
one. The budget, frame 0 that stays, and equal scores are as for every selector of STTS, so that methods differ in
nothing but what they rank by; vLLM's own budget, `floor((1 - k) * T * n)`, is a token less where that is no whole
number.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from stts_hf.modeling.plan_stts import PruningPlan, VideoFeatures
from stts_hf.modeling.pruning_stts import PruningBackbone
from stts_hf.modeling.scoring_stts import select_blocks, temporal_similarity

AFTER_TOWER = "evs"  # beside the selectors of STTS


@contextlib.contextmanager
def prune_after_tower(model: PruningBackbone) -> Iterator[None]:
    """
    Within the block, the `model` without a head drops a video's tokens after its ViT and connector. Its selector ranks
    nothing then, but runs: set "random", which costs nothing.
    """
    model.encode_videos = functools.partial(encode_then_prune, model.encode_videos)
    try:
        yield
    finally:
        del model.encode_videos


def encode_then_prune(
    encode: Callable[..., VideoFeatures], pixel_values: torch.Tensor, plan: PruningPlan, **kwargs: object
) -> VideoFeatures:
    """What `encode_videos` returns, of videos that are encoded whole and then lose what the plan says."""
    whole = encode(pixel_values, replace(plan, pruning_ratio=0.0), **kwargs)
    merged = torch.cat(whole.pooler_output)  # (G, text hidden size)
    taps = [torch.cat(tap) for tap in whole.deepstack_features or ()]
    ranking = 1 - temporal_similarity(torch.cat([merged, *taps], dim=-1).detach()[:, None], plan.grids)
    keep_mask, kept_blocks = select_blocks(ranking, plan.grids, plan.num_kept)

    def keep(features: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return features[kept_blocks].split(plan.num_kept)

    return replace(
        whole,
        pooler_output=keep(merged),
        deepstack_features=None if whole.deepstack_features is None else [keep(tap) for tap in taps],
        token_scores=plan.per_video(ranking),
        keep_mask=plan.per_video(keep_mask),
    )
