"""EVS (Efficient Video Sampling, arXiv 2510.14624) for every backbone: pruning after the ViT and connector, as in vLLM.

EVS drops the tokens most similar to the token at the same place one frame before; deepstack's features are part of a
token. The whole ViT runs, so only the language model saves work. Budget, frame 0 and ties are those of STTS's
selectors, so methods differ only in their ranking; vLLM's budget, `floor((1 - k) * T * n)`, may be one token smaller.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from stts_hf.modeling.budget_stts import KeepRule
from stts_hf.modeling.plan_stts import PruningPlan, VideoFeatures
from stts_hf.modeling.pruning_stts import PruningBackbone
from stts_hf.modeling.scoring_stts import select_blocks, temporal_similarity


@contextlib.contextmanager
def prune_after_tower(model: PruningBackbone) -> Iterator[None]:
    """
    Within the block, the `model` without a head drops a video's tokens after its ViT and connector. Its own selector
    still runs without effect: set "random", which costs nothing.
    """
    model.encode_videos = functools.partial(encode_then_prune, model.encode_videos)
    try:
        yield
    finally:
        del model.encode_videos


def encode_then_prune(
    encode: Callable[..., VideoFeatures], pixel_values: torch.Tensor, plan: PruningPlan, **kwargs: object
) -> VideoFeatures:
    """`encode_videos` of whole videos, then drops tokens by the plan."""
    whole = encode(pixel_values, replace(plan, keep=KeepRule(0.0)), **kwargs)
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
