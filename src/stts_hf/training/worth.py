"""What blocks are worth to the answers: keep masks are drawn, the answer loss under each measured, the scorer fitted.

The loss under a mask is taken to be the sum of what the dropped blocks are worth, and one network says it for all
blocks of all videos, as in amortised Shapley values (Jethani et al. 2022, "FastSHAP", section 3):
`loss(mask) = sum over dropped blocks of block_worth(score)`. So the choice of blocks needs no gradient and no
relaxation, and nothing but the scorer is differentiated.
"""

import itertools
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from stts_hf.model_parts import SCORER, find_backbone, is_scorer_trained, parts_of, video_placeholders
from stts_hf.modeling.plan_stts import assign_to_rows
from stts_hf.modeling.scoring_stts import block_worth, num_kept_blocks, temporal_similarity
from stts_hf.training.answer_loss import AnswerLoss
from stts_hf.training.arguments import DEPLOYED_RATIOS, STTSTrainingArguments
from stts_hf.training.masks import Masks, MaskStore

GROUPS = 2  # of the masks of a round: those of a random order, and those of the policy
POLICY_SPREAD = 1.5  # standard deviation of the policy's values beside Gumbel noise of scale 1
LEVEL_WEIGHT = 0.1  # of a group's mean in the fit: blocks that replace each other cost less together than one by one
NUM_EVAL_RATIOS = 4


def draw_scores(
    values: torch.Tensor, num_first: int, num_kept: Sequence[int], num_masks: int, generator: torch.Generator
) -> torch.Tensor:
    """
    Scores (GROUPS, num_masks, G) of one video's blocks, whose highest `num_kept[group]` make a keep mask. num_first:
    blocks of frame 0, which always stay.

    The first group cuts a random order of the blocks into pieces, over and over, so that all blocks are kept equally
    often, with less noise than independent draws. The second is a policy's: Gumbel-top-k by `values` (G,).
    """
    later = values[num_first:]
    scores = torch.zeros(GROUPS, num_masks, len(values))
    if len(later) == 0:
        return scores
    order = torch.randperm(len(later), generator=generator)
    starts = max(num_kept[0] - num_first, 0) * torch.arange(num_masks)[:, None]
    scores[0, :, num_first:] = -((order - starts) % len(later)).float()
    noise = torch.rand(num_masks, len(later), generator=generator).clamp(1e-9, 1 - 1e-7)
    centred = (later - later.mean()) / later.std(correction=0).clamp_min(1e-6)
    scores[1, :, num_first:] = POLICY_SPREAD * centred - (-noise.log()).log()
    return scores


def measure(
    model: PreTrainedModel,
    batch: Mapping[str, Any],
    seeds: Sequence[int],
    *,
    num_masks: int,
    ratios: tuple[float, float],
    kind: str = "divergence",
    on_policy: bool = False,
) -> list[Masks]:
    """
    Draws masks for each row of a batch (B, L), and measures the answer loss under each. `Masks.none()` without videos.

    seeds: of each row's draws. num_masks: of each group. ratios: lowest and highest share dropped; each group of a row
    draws one, evenly over the logarithm of the share kept. kind: of `AnswerLoss`. on_policy: whether the second group
    follows the model's scorer; else it follows the change between frames. Raises `ValueError` as the model does.
    """
    if find_backbone(model)[1].video_inputs[0] not in batch:
        return [Masks.none()] * len(seeds)
    loss = AnswerLoss(model, batch, kind)
    token_scores = loss.whole.token_scores  # (T, n) of each video
    sizes = [scores.numel() for scores in token_scores]
    rows = assign_to_rows("video", video_placeholders(loss.backbone, batch).sum(-1).tolist(), sizes)
    if on_policy:
        values = torch.logit(torch.cat([scores.flatten() for scores in token_scores]), eps=1e-6)
    else:
        assert loss.cache.blocks is not None  # there are videos
        change = 1 - temporal_similarity(loss.cache.blocks, [(*scores.shape, 1) for scores in token_scores])
        values = change.clamp_min(1e-6).log()
    per_video = values.float().cpu().split(sizes)
    drawn: list[torch.Tensor] = []
    dropped: list[list[float]] = []  # share of each video, in each group
    for videos, seed in zip(rows, seeds, strict=True):
        generator = torch.Generator().manual_seed(seed)
        shares = draw_ratios(ratios, torch.rand(GROUPS, generator=generator).tolist())
        for video in videos:
            frames, number = token_scores[video].shape
            num_kept = [num_kept_blocks(frames, number, share) for share in shares]
            drawn.append(draw_scores(per_video[video], number, num_kept, num_masks, generator))
            dropped.append(shares)
    scores, device = torch.cat(drawn, dim=-1), values.device  # (GROUPS, num_masks, G)
    found, losses = [], []
    for group, index in itertools.product(range(GROUPS), range(num_masks)):
        ratio = [shares[group] for shares in dropped]
        outputs = loss.run(block_scores=scores[group, index].to(device), pruning_ratio=ratio)
        losses.append(loss.of(outputs))
        found.append(torch.cat([~mask.flatten() for mask in outputs.keep_mask]))
    of_masks = torch.stack(found).cpu().unflatten(0, (GROUPS, num_masks))
    of_rows = torch.stack(losses).cpu().unflatten(0, (GROUPS, num_masks))  # (GROUPS, num_masks, B)
    parts = of_masks.split([sum(sizes[video] for video in videos) for videos in rows], dim=-1)
    return [Masks(part, of_rows[..., row]) if part.shape[-1] else Masks.none() for row, part in enumerate(parts)]


def draw_ratios(ratios: Sequence[float], places: Sequence[float]) -> list[float]:
    """Shares dropped between two, evenly over the logarithm of the share kept: one for each place in [0, 1)."""
    low, high = 1 - ratios[1], 1 - ratios[0]
    return [min(max(1 - low * (high / low) ** place, ratios[0]), ratios[1]) for place in places]


def num_free(masks: Masks) -> torch.Tensor:
    """(groups,) blocks that a group's masks leave to chance: the fewer of kept and dropped ones, at least 1."""
    dropped = masks.dropped.float().sum(-1).mean(-1)
    return torch.minimum(dropped, masks.dropped.shape[-1] - dropped).clamp_min(1)


def measure_unit(masks: Sequence[Masks]) -> float:
    """`worth_unit` with which logits of fitted scores spread by about 1: the losses' standard deviation over masks."""
    some = [mask for mask in masks if mask.losses.shape[-1] > 1]
    if not some:
        return 1e-3
    variance = torch.stack([(mask.losses.var(-1) / num_free(mask)).mean() for mask in some]).mean()
    return max(float(variance.sqrt()), 1e-6)


def worth_loss(token_scores: Sequence[torch.Tensor], masks: Sequence[Masks], unit: float) -> torch.Tensor:
    """
    Sum over rows of the squared error between the answer losses under masks and the summed worth of what they drop:
    within groups, and, weighted by `LEVEL_WEIGHT`, of the groups' means.

    token_scores: (T, n) of each video, with gradient. masks: of each row. Raises `ValueError` where they are not of
    these videos.
    """
    scores = torch.cat([scores.flatten() for scores in token_scores])
    sizes = [mask.dropped.shape[-1] for mask in masks]
    if sum(sizes) != len(scores):
        raise ValueError(f"The masks are of {sum(sizes)} blocks, but the videos have {len(scores)}: measure again.")
    total = scores.new_zeros(())
    for mask, some in zip(masks, scores.split(sizes), strict=True):
        predicted = mask.dropped.to(some.device, torch.float32) @ block_worth(some, unit)  # (groups, M)
        errors = (predicted - mask.losses.to(some.device)) / unit
        level = errors.mean(-1, keepdim=True)
        squared = (errors - level).square() + LEVEL_WEIGHT * level.square()
        total = total + (squared.mean(-1) / num_free(mask).to(some.device)).mean()
    return total


class AnswersTarget:
    """
    The scorer's loss in a run with `scorer_target="answers"`. With `scorer_only` the masks of a row are drawn
    `mask_rounds` times during the run, from the second on by the scorer as it is then, and kept in the output folder,
    also for a run with the same frozen weights and settings. Else the model itself changes: every step measures new
    masks.
    """

    def __init__(self, model: PreTrainedModel, args: STTSTrainingArguments) -> None:
        low, high = args.pruning_ratio_range or DEPLOYED_RATIOS
        num_masks, kind = max(args.num_masks // GROUPS, 2), args.answer_loss
        self.options: dict[str, Any] = {"num_masks": num_masks, "ratios": (low, high), "kind": kind}
        self.rounds, self.seed = args.mask_rounds, args.seed
        self.was_fitted = model.config.worth_unit is not None and is_scorer_trained(model)
        self.store: MaskStore | None = None
        if args.scorer_only:
            layer = model.config.vision_config.pruning_layer
            identity = frozen_identity(model, layer, self.seed, self.rounds, *self.options.values())
            self.store = MaskStore(Path(str(args.output_dir)), identity, args.process_index)
            model.config.worth_unit = model.config.worth_unit or self.store.unit

    def masks(self, model: PreTrainedModel, batch: Mapping[str, Any], keys: Sequence[str], done: float) -> list[Masks]:
        """Masks of each row of a batch, measured where they are missing. done: share of the run."""
        if self.store is None:
            seeds = torch.randint(2**31, (len(keys),)).tolist()
            return measure(model, batch, seeds, **self.options, on_policy=True)
        seeds = [zlib.crc32(f"{self.seed} {key}".encode()) for key in keys]
        number = min(int(done * self.rounds), self.rounds - 1)
        if any(self.store.lacks(key, number) for key in keys) and done > 0:
            self.store.reload()  # another process may have measured them
        while any(self.store.lacks(key, number) for key in keys):
            again = min(len(self.store.masks.get(key, ())) for key in keys)
            on_policy = again > 0 or self.was_fitted
            measured = measure(model, batch, [seed + again for seed in seeds], **self.options, on_policy=on_policy)
            for key, mask in zip(keys, measured, strict=True):
                if self.store.lacks(key, again):
                    self.store.add(key, mask)
        masks = [self.store.get(key, number) for key in keys]
        if model.config.worth_unit is None:
            model.config.worth_unit = measure_unit(masks)
            self.store.set_unit(model.config.worth_unit)
        return masks

    @torch.no_grad()
    def deployed(self, model: PreTrainedModel, batch: Mapping[str, Any]) -> torch.Tensor:
        """Sum over the rows of the answer loss of what the model itself drops, mean over ratios in the range."""
        loss = AnswerLoss(model, batch, self.options["kind"])
        low, high = self.options["ratios"]
        ratios = torch.linspace(low, high, NUM_EVAL_RATIOS).tolist()
        return torch.stack([loss.of(loss.run(pruning_ratio=ratio)).sum() for ratio in ratios]).mean()


def frozen_identity(model: PreTrainedModel, *settings: object) -> str:
    """A checksum of all weights but the scorer's, and of settings."""
    parts, found = parts_of(model), zlib.crc32(repr(settings).encode())
    for name, parameter in model.named_parameters():
        if parts[name] != SCORER:
            found = zlib.crc32(f"{name} {float(parameter.detach().float().sum()):.9g}".encode(), found)
    return f"{found:08x}"
