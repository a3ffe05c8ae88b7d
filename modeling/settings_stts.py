"""The pruning settings that every backbone has, and their checks."""

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from huggingface_hub.dataclasses import validated_field
from transformers import PreTrainedConfig

Selector = Literal["scorer", "cosine", "random"]
ScoreRescaling = Literal["row", "frame", "none"]
Packing = Literal["varlen", "first_fit_descending"]
PositionRule = Literal["original", "compact"]
SELECTORS = get_args(Selector)
SCORE_RESCALINGS = get_args(ScoreRescaling)
PACKINGS = get_args(Packing)
POSITION_RULES = get_args(PositionRule)


def check_pruning_ratio(value: object, name: str = "pruning_ratio") -> float:
    """Returns `value` as a float in [0, 1]; raises `ValueError` for anything else (NaN and bools included)."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0.0 <= float(value) <= 1.0:
        raise ValueError(
            f"`{name}` is {value!r}, but must be a number in [0, 1]: the share of a video's blocks to drop, "
            "0 to keep all of them, 1 to drop every video token."
        )
    return float(value)


def check_ratio_field(value: float) -> None:
    check_pruning_ratio(value)


def check_seed(value: int) -> None:
    if not 0 <= value < 2**63:
        raise ValueError(f"`selector_seed` is {value}, but must be from 0 to 2**63 - 1.")


def check_loss_weight(value: float) -> None:
    if not 0.0 <= value < math.inf:
        raise ValueError(f"`temporal_loss_weight` is {value!r}, but must be a finite number of at least 0.")


@dataclass(kw_only=True, repr=False, eq=False)
class PruningSettings:
    r"""
    What a vision config says of pruning. Goes beside a native vision config, under `@strict`.

    pruning_ratio (`float`, *optional*, defaults to 0.5):
        Share `k` in [0, 1] of each video's blocks that is dropped. Every call may override it.
    pruning_layer (`int`, *optional*, defaults to 3):
        Zero-based layer `l`: layers `0..l` run on all patches, layer `l + 1` takes the bias, later ones see survivors.
    selector (`str`, *optional*, defaults to `"scorer"`):
        What ranks the blocks: `"scorer"` (learned), `"cosine"` (most similar to the previous frame goes first, needs
        no training) or `"random"`.
    selector_seed (`int`, *optional*, defaults to 0):
        Seed of `selector="random"`. Every video is drawn from this seed, so that a video's result does not depend on
        its batch. In training mode the global generator is used instead.
    score_rescaling (`str`, *optional*, defaults to `"row"`):
        Range over which scores are stretched to `[e^-2, 1]` before the logarithm: each `"row"` of the patch grid
        (released checkpoints), each `"frame"`, or `"none"` (the paper's plain logarithm).
    packing (`str`, *optional*, defaults to `"varlen"`):
        Layout of the surviving patches: `"varlen"` (one flat sequence) or `"first_fit_descending"` (Algorithm 1).
    refill_single_frame_bins (`bool`, *optional*, defaults to `False`):
        Whether a frame that is alone in its bin keeps its dropped patches as context until the ViT ends, as the
        released training code does. Needs `packing="first_fit_descending"`.
    """

    pruning_ratio: float | int = validated_field(check_ratio_field, default=0.5)
    pruning_layer: int = 3
    selector: Selector = "scorer"
    selector_seed: int = validated_field(check_seed, default=0)
    score_rescaling: ScoreRescaling = "row"
    packing: Packing = "varlen"
    refill_single_frame_bins: bool = False

    if TYPE_CHECKING:  # the native config's
        num_hidden_layers: int = 0

    def validate_pruning(self) -> None:
        """Raises `ValueError` where fields do not fit each other: at construction, saving and each use by a tower."""
        if not 0 <= self.pruning_layer <= self.num_hidden_layers - 2:
            raise ValueError(
                f"`pruning_layer` is {self.pruning_layer}, but the layer after it takes the score bias, so with "
                f"`num_hidden_layers` = {self.num_hidden_layers} it must be from 0 to {self.num_hidden_layers - 2}."
            )
        if self.refill_single_frame_bins and self.packing != "first_fit_descending":
            raise ValueError(
                "`refill_single_frame_bins` is True, which needs `packing` = 'first_fit_descending', "
                f"but `packing` is {self.packing!r}."
            )


@dataclass(kw_only=True, repr=False, eq=False)
class TrainingSettings:
    r"""
    What a model config says of training and of the shortened sequence. Goes beside a native config, under `@strict`.

    temporal_loss_weight (`float`, *optional*, defaults to 1.0):
        Weight of the temporal loss in the total loss: 1.0 in the paper, 0.5 in the released training code.
    detach_temporal_target (`bool`, *optional*, defaults to `True`):
        Whether the similarities that the scores are trained towards pass no gradient. The released code lets them.
    pruned_position_ids (`str`, *optional*, defaults to `"original"`):
        RoPE positions of the tokens that are left: `"original"` keeps those they had, `"compact"` closes the gaps.
    """

    temporal_loss_weight: float | int = validated_field(check_loss_weight, default=1.0)
    detach_temporal_target: bool = True
    pruned_position_ids: PositionRule = "original"


PRUNING_FIELDS = tuple(field.name for field in fields(PruningSettings))
TRAINING_FIELDS = tuple(field.name for field in fields(TrainingSettings))


def with_settings(vision_config: Mapping[str, Any] | PreTrainedConfig | None, given: Mapping[str, Any]) -> Any:
    """A vision config, its contents or None with the `given` settings in it, as contents; as it is without any."""
    if not given:
        return vision_config
    contents = vision_config.to_dict() if isinstance(vision_config, PreTrainedConfig) else dict(vision_config or {})
    return contents | dict(given)
