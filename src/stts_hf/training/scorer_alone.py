"""
Trainings of the scorer alone: what they need, and the temporal loss by itself (paper 3.4).

That loss compares a block's score with the ViT's states after layer `l`, so where nothing else is learnt, neither the
ViT's later layers nor connector and language model run, and no gradient passes through the layers before.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from stts_hf.model_parts import PARTS, SCORER, find_backbone, module_of, parts_of
from stts_hf.modeling.outputs_stts import TaskOutput
from stts_hf.modeling.pruning_stts import PruningOutput
from stts_hf.selectors import SELECTORS
from stts_hf.training.arguments import STTSTrainingArguments


def trained_parts(model: nn.Module) -> set[str]:
    """The parts of which some parameter requires a gradient."""
    parts = parts_of(model)
    return {parts[name] for name, parameter in model.named_parameters() if parameter.requires_grad}


def only_scorer_is_trained(model: nn.Module) -> bool:
    """Whether some parameters require a gradient, all of them the scorer's."""
    return trained_parts(model) == {SCORER}


def check_scorer_alone(model: PreTrainedModel, arguments: STTSTrainingArguments) -> None:
    """
    Raises `ValueError` if `arguments` train the scorer alone, but other parts of `model` would be trained too, or the
    scores would get no gradient.
    """
    if not arguments.scorer_alone:
        return
    setting, config = arguments.scorer_alone, model.config
    if not only_scorer_is_trained(model):
        raise ValueError(
            f"{setting}, which trains the scorer alone, but {sorted(trained_parts(model))} would be trained. Set "
            f"`freeze: {[part for part in PARTS if part != SCORER]}`, without an adapter, or take that setting out."
        )
    if not SELECTORS[config.vision_config.selector].is_learned:
        raise ValueError(
            f"{setting}, but `selector` is {config.vision_config.selector!r}, which has nothing to learn. Set "
            "`selector: scorer`."
        )
    if arguments.temporal_loss_only and not config.temporal_loss_weight:
        raise ValueError(
            f"{setting}, but `temporal_loss_weight` is 0, so there would be no loss at all. Set `temporal_loss_weight: "
            "1.0`."
        )
    ratio = config.vision_config.pruning_ratio
    if arguments.distillation_weight and not 0 < ratio < 1:
        does = "nothing, so it is the unpruned model" if ratio == 0 else "every video token"
        raise ValueError(
            f"{setting}, but `pruning_ratio` is {ratio:g}: the model drops {does}, and its scores change no output. "
            "Set a ratio between 0 and 1."
        )


@dataclass
class ScoringOutput(PruningOutput, TaskOutput):
    """Outputs of a call in which no language model runs."""


def score_videos(model: nn.Module, batch: Mapping[str, Any]) -> ScoringOutput:
    """
    `temporal_loss` and `token_scores` of a batch's videos; `task_loss` is 0. A batch without videos has a loss of 0
    that depends on the whole scorer, as DDP needs it.
    """
    _, backbone = find_backbone(model)
    pixels = batch.get(backbone.video_inputs[0])
    if pixels is None:
        scorer = module_of(model, SCORER).parameters()
        nothing = sum((0 * parameter.float().sum() for parameter in scorer), torch.zeros(()))
        return ScoringOutput(task_loss=torch.zeros_like(nothing), temporal_loss=nothing)
    videos = {name: batch[name] for name in backbone.video_inputs if batch.get(name) is not None}
    # At `k = 1` nothing is encoded past the scorer.
    found = backbone.get_video_features(**videos, pruning_ratio=1.0, with_temporal_loss=True)
    loss = found.temporal_loss
    return ScoringOutput(task_loss=torch.zeros_like(loss), temporal_loss=loss, token_scores=found.token_scores)


@contextlib.contextmanager
def redirected(module: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """
    Makes a call of `module` run `function` with the same arguments. DDP reduces gradients only of calls through it, so
    a pass other than `forward` must go through it too.
    """
    own = vars(module).get("forward")  # of accelerate, with autocast around the class's
    module.forward = function
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
