"""The losses over an optimizer step, and the statistics that a run logs.

A mean of micro-batch means would give a label more weight the fewer labels share its micro-batch. So each loss is a sum
over the step, its micro-batches and processes, divided by a count over the step: label tokens for the task loss, blocks
in frames `t >= 1` for the temporal loss, rows with videos for the scorer's loss by answers. The loss of a mixture's
routers, which is no sum over tokens, counts by the label tokens of its micro-batch. Counts and sums stay on the
device until a log reads them.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.nn.utils.rnn import pad_sequence

from stts_hf.model_parts import video_placeholders
from stts_hf.modeling.outputs_stts import PruningOutput
from stts_hf.modeling.pruning_stts import PruningBackbone
from stts_hf.modeling.scoring_stts import split_videos, temporal_similarity
from stts_hf.modeling.sequence_stts import find_samples, token_order

COUNTS = ("labels", "blocks", "rows")
LOSSES = {"task_loss": "labels", "temporal_loss": "blocks", "worth_loss": "rows", "router_loss": "labels"}
SUMS = (*LOSSES, *COUNTS, "scores", "llm_tokens", "video_tokens", "kept_tokens", "skipped_rows", "ranked", "clips")


def predicted_labels(batch: Mapping[str, Any], num_axes: int = 0) -> torch.Tensor:
    """Mask (B, L) of the label tokens that a previous token of their sample predicts. num_axes: of positions."""
    labels = batch.get("labels")
    if labels is None:
        raise ValueError("A batch has no `labels`: the collator must add them, -100 for tokens without a loss.")
    predicted = labels != -100
    predicted[:, 0] = False
    position_ids = token_order(batch.get("position_ids"), num_axes)
    if position_ids is not None:
        attention_mask = batch.get("attention_mask")
        padding_mask = attention_mask if attention_mask is not None and attention_mask.dim() == 2 else None
        samples = find_samples(position_ids.expand(labels.shape), padding_mask)
        predicted = predicted & (samples.diff(dim=-1, prepend=samples[:, :1]) == 0)
    return predicted


def count(batch: Mapping[str, Any], backbone: PruningBackbone, with_labels: bool = True) -> torch.Tensor:
    """
    Denominators of a batch's losses, (3,) float32: predicted label tokens, blocks in frames `t >= 1`, and rows with
    videos and labels. backbone: the model without a head. with_labels: False counts 0 labels, for a run that does not
    learn them. Raises `ValueError` without labels otherwise.
    """
    labels = predicted_labels(batch, backbone.num_axes).sum() if with_labels else torch.tensor(0)
    grids, blocks = batch.get(backbone.video_inputs[-1]), torch.zeros_like(labels)
    if grids is not None:
        side = getattr(backbone.config.vision_config, "spatial_merge_size", 1)  # of those that count patches
        blocks = ((grids[:, 0] - 1) * (grids[:, 1] // side) * (grids[:, 2] // side)).sum()
    rows, ids, given = torch.zeros_like(blocks), batch.get("input_ids"), batch.get("labels")
    if grids is not None and ids is not None and given is not None:
        rows = (video_placeholders(backbone, batch).any(-1) & (given != -100).any(-1)).sum()
    return torch.stack([labels.to(blocks.device), blocks, rows.to(blocks.device)]).float()


def rank_correlation(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Spearman's of two vectors, without a host-device sync. Equals share their mean rank; 0 where one is constant."""

    def rank(values: torch.Tensor) -> torch.Tensor:
        ordered = values.detach().sort().values
        below, up_to = (torch.searchsorted(ordered, values, right=right) for right in (False, True))
        ranks = (below + up_to).float()
        return ranks - ranks.mean()

    return F.cosine_similarity(rank(first), rank(second), dim=0)


class PruningMetrics:
    """Sums since the last `reset`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.reset()

    def reset(self) -> None:
        """Sets all sums to 0, and starts the clock."""
        self.sums = dict.fromkeys(SUMS, torch.zeros((), device=self.device))
        self.frames = torch.zeros(0, 2, device=self.device)  # (T, 2) blocks kept at each frame position, and all
        self.steps = 0
        self.started = time.perf_counter()
        self.paused: float | None = None

    def pause(self) -> None:
        """Stops the clock until `resume`, so that tokens per second exclude evaluations and saves."""
        if self.paused is None:
            self.paused = time.perf_counter()

    def resume(self) -> None:
        if self.paused is not None:
            self.started += time.perf_counter() - self.paused
            self.paused = None

    def add(self, name: str, value: torch.Tensor | float) -> None:
        value = value.detach().float().to(self.device) if isinstance(value, torch.Tensor) else value
        self.sums[name] = self.sums[name] + value

    def observe(self, outputs: PruningOutput, batch: Mapping[str, Any], blocks: torch.Tensor | None = None) -> None:
        """
        Counts tokens, scores and kept blocks of one call; the scores alone if no language model ran. blocks: (G, S, D)
        that were scored, to correlate the scores with what the cosine selector ranks by.
        """
        for scores in outputs.token_scores or ():
            self.add("scores", scores.sum())
            self.add("video_tokens", scores.numel())
        if blocks is not None and outputs.token_scores:
            grids = [(*scores.shape, 1) for scores in outputs.token_scores]
            changes = split_videos(1 - temporal_similarity(blocks.detach(), grids), grids)
            for scores, change in zip(outputs.token_scores, changes, strict=True):
                if len(scores) > 1:
                    self.add("ranked", rank_correlation(scores[1:].flatten(), change[scores.shape[1] :]))
                    self.add("clips", 1)
        if outputs.kept_indices is None:
            return
        tokens, attention_mask = batch["input_ids"], batch.get("attention_mask")
        has_mask = attention_mask is not None and attention_mask.dim() == 2
        self.add("llm_tokens", batch["attention_mask"].sum() if has_mask else tokens.numel())
        for keep_mask in outputs.keep_mask or ():
            kept = keep_mask.sum(dim=1).to(self.device)  # (T,)
            self.add("kept_tokens", kept.sum())
            self.add("llm_tokens", kept.sum() - keep_mask.numel())
            frames = torch.stack([kept, torch.full_like(kept, keep_mask.shape[1])], dim=1).float()  # (T, 2)
            self.frames = pad_sequence([self.frames, frames]).sum(dim=1)

    def read(self, accelerator: Accelerator) -> tuple[dict[str, float], list[float]]:
        """The sums over all processes, with `seconds` as their mean; and the share kept at each frame position."""
        seconds = torch.tensor((self.paused or time.perf_counter()) - self.started, device=self.device)
        sums = torch.stack([torch.as_tensor(self.sums[name], device=self.device) for name in SUMS])
        frames = self.frames
        if accelerator.num_processes > 1:
            sums = accelerator.reduce(sums, reduction="sum")
            seconds = accelerator.reduce(seconds, reduction="mean")
            frames = accelerator.pad_across_processes(frames[None], dim=1)
            frames = accelerator.gather(frames).sum(0)
        values = dict(zip(SUMS, sums.tolist(), strict=True)) | {"seconds": seconds.item()}
        return values, [kept / max(seen, 1) for kept, seen in frames.tolist()]


class LossHistory:
    """The losses of all micro-batches since the last `check`, which reads them with one host-device sync."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.batches: list[tuple[int, Sequence[str] | None, dict[str, torch.Tensor]]] = []

    def add(self, step: int, losses: Mapping[str, torch.Tensor], ids: Sequence[str] | None) -> None:
        """losses: float32 scalars by name. ids: of the batch's rows, None if the collator adds none."""
        self.batches.append((step, ids, dict(losses)))

    def check(self) -> None:
        """Raises `FloatingPointError` on every process if a loss on any is not finite; names the first such batch."""
        batches, self.batches = self.batches, []
        losses = [loss.to(self.accelerator.device) for _, _, losses in batches for loss in losses.values()]
        bad = (~torch.stack([*losses, torch.zeros((), device=self.accelerator.device)]).isfinite()).any().float()
        if not self.accelerator.reduce(bad, reduction="sum").item():
            return
        found = [
            (step, self.accelerator.process_index, ids, {name: loss.item() for name, loss in losses.items()})
            for step, ids, losses in batches
            if not all(loss.isfinite() for loss in losses.values())
        ]
        step, process, ids, values = min(gather_object(found[:1]), key=lambda batch: batch[:2])
        parts = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in values.items())
        rows = "unknown (the collator adds no `sample_ids`)" if ids is None else ", ".join(map(str, ids))
        raise FloatingPointError(
            f"The loss of step {step} is not finite on process {process}: {parts}. Rows of the batch: {rows}. Resume "
            "from the last checkpoint: the optimizer has taken the step."
        )


def describe(sums: Mapping[str, float]) -> dict[str, float]:
    """Mean score, rank correlation and, if a language model ran, share of blocks kept; empty without videos."""
    tokens = sums["video_tokens"]
    if not tokens:
        return {}
    kept = {"kept_share": sums["kept_tokens"] / tokens} if sums["llm_tokens"] else {}
    ranked = {"rank_correlation": sums["ranked"] / sums["clips"]} if sums["clips"] else {}
    return {"mean_score": sums["scores"] / tokens} | ranked | kept
