"""Configuration of STTS on Molmo2: what is scored, how much is dropped, and how the survivors are laid out."""

from transformers.utils.versions import require_version

# Before imports that fail without a reason in older versions.
require_version("transformers>=5.20", "Upgrade it with `pip install -U transformers`.")
require_version("torch>=2.9", "Upgrade it with `pip install -U torch torchvision`.")

import math
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import SubConfigSpec
from transformers.models.molmo2.configuration_molmo2 import Molmo2Config, Molmo2VisionConfig
from transformers.utils import logging

from .settings_stts import (
    PACKINGS,
    POSITION_RULES,
    SCORE_RESCALINGS,
    SELECTORS,
    check_choice,
    check_pruning_ratio,
)

logger = logging.get_logger(__name__)


def check_vision_config(value) -> None:
    """Raises `ValueError` for a vision config that cannot prune, such as a stock Molmo2's."""
    if not hasattr(value, "pruning_ratio"):
        raise ValueError(f"`vision_config` has `model_type` {value.model_type!r}, but must be 'stts_vision'.")


AUTO_MAP = {
    "AutoConfig": "configuration_stts.STTSConfig",
    "AutoModel": "modeling_stts.STTSForConditionalGeneration",
    "AutoModelForImageTextToText": "modeling_stts.STTSForConditionalGeneration",
    "AutoModelForMultimodalLM": "modeling_stts.STTSForConditionalGeneration",
    "AutoProcessor": "processing_stts.STTSProcessor",
    "AutoVideoProcessor": "video_processing_stts.STTSVideoProcessor",
}


@strict
class STTSVisionConfig(Molmo2VisionConfig):
    r"""
    Molmo2's vision tower with a scorer after layer `pruning_layer` (paper section 3). Values are checked whenever they
    are set and raise `ValueError`, wrong types transformers' `StrictDataclassFieldValidationError`; the value set
    before stays.

    pruning_ratio (`float`, *optional*, defaults to 0.5):
        Share `k` in [0, 1] of each video's `w x w` blocks that is dropped. Every call may override it.
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
    pooling_size (`list[int]`, *optional*, defaults to `[3, 3]`):
        `[height, width]` in patches of a block, which is also the connector's pooling window `w x w`. Must equal the
        video processor's.
    """

    model_type = "stts_vision"
    base_config_key = "vision_config"

    pruning_ratio: Any = 0.5  # `check_pruning_ratio` says more of a wrong type than `@strict` would
    pruning_layer: int = 3
    selector: str = "scorer"
    selector_seed: int = 0
    score_rescaling: str = "row"
    packing: str = "varlen"
    refill_single_frame_bins: bool = False
    pooling_size: list[int] | None = None

    def __post_init__(self, **kwargs):
        if self.pooling_size is None:
            self.pooling_size = [3, 3]
        super().__post_init__(**kwargs)
        self.check_pruning()
        self._checks_on_set = True

    def __setattr__(self, key, value):
        settled = self.__dict__.get("_checks_on_set", False) and key in self.__dataclass_fields__
        before = self.__dict__.get(key)
        super().__setattr__(key, value)
        if settled:
            try:
                self.check_pruning()
            except Exception:
                super().__setattr__(key, before)
                raise

    def to_dict(self):
        output = super().to_dict()
        output.pop("_checks_on_set", None)
        return output

    def to_diff_dict(self):
        output = super().to_diff_dict()
        output.pop("_checks_on_set", None)
        return output

    def check_pruning(self) -> None:
        """Raises `ValueError`, naming field, value and remedy, where the pruning fields do not fit each other."""
        check_pruning_ratio(self.pruning_ratio)
        check_choice("selector", self.selector, SELECTORS)
        check_choice("score_rescaling", self.score_rescaling, SCORE_RESCALINGS)
        check_choice("packing", self.packing, PACKINGS)
        if not 0 <= self.selector_seed < 2**63:
            raise ValueError(f"`selector_seed` is {self.selector_seed}, but must be from 0 to 2**63 - 1.")
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
        sizes = self.image_size or []
        if len(sizes) != 2 or not 1 <= self.patch_size <= min(sizes):
            raise ValueError(
                f"`image_size` is {self.image_size} and `patch_size` {self.patch_size}, but they must be "
                "[height, width] and the side of a patch, in pixels, with room for at least one patch."
            )
        grid = [side // self.patch_size for side in sizes]
        windows = self.pooling_size or []
        fits = len(windows) == 2 and all(1 <= window <= side for window, side in zip(windows, grid, strict=True))
        if not fits:
            raise ValueError(
                f"`pooling_size` is {self.pooling_size}, but must be [height, width] in patches, each from 1 up to "
                f"the side of the patch grid {grid} (`image_size` {self.image_size} over `patch_size` "
                f"{self.patch_size})."
            )

    @property
    def block_grid(self) -> tuple[int, int]:
        """Rows and columns of blocks in a frame; `n` is their product. A window over the border counts in full."""
        rows, cols = (
            math.ceil(side // self.patch_size / window)
            for side, window in zip(self.image_size or (), self.pooling_size or (), strict=True)
        )
        return rows, cols


@strict
class STTSConfig(Molmo2Config):
    r"""
    Molmo2's configuration with an `STTSVisionConfig` and the settings of training and of the shortened sequence.

    temporal_loss_weight (`float`, *optional*, defaults to 1.0):
        Weight of the temporal loss in the total loss: 1.0 in the paper, 0.5 in the released training code.
    detach_temporal_target (`bool`, *optional*, defaults to `True`):
        Whether the similarities that the scores are trained towards pass no gradient. The released code lets them.
    pruned_position_ids (`str`, *optional*, defaults to `"original"`):
        RoPE positions of the tokens that are left: `"original"` keeps those they had, `"compact"` closes the gaps.
    """

    model_type = "stts"
    keys_to_ignore_at_inference: ClassVar[list[str]] = [
        "past_key_values",
        "image_hidden_states",
        "task_loss",
        "temporal_loss",
        "token_scores",
        "keep_mask",
        "kept_indices",
    ]
    sub_configs_defaults: ClassVar[dict] = {
        **Molmo2Config.sub_configs_defaults,
        "vision_config": SubConfigSpec(config_class=STTSVisionConfig),
    }

    temporal_loss_weight: float | int = 1.0
    detach_temporal_target: bool = True
    pruned_position_ids: str = "original"

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        check_vision_config(self.vision_config)

    def __setattr__(self, key, value):
        if key == "pruned_position_ids":
            check_choice(key, value, POSITION_RULES)
        if key == "temporal_loss_weight" and not 0.0 <= value < math.inf:
            raise ValueError(f"`temporal_loss_weight` is {value!r}, but must be a finite number of at least 0.")
        if key == "vision_config" and value is not None and not isinstance(value, dict):
            check_vision_config(value)
        super().__setattr__(key, value)

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs):
        """
        As in transformers; a Molmo2 checkpoint's configuration becomes an STTS one, with a note on the scorer. Raises
        `OSError` where there is no `config.json` (transformers would go on with the sizes of an 8B model) and
        `ValueError` for any other model's.
        """
        config, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        if not config:
            raise OSError(
                f"{pretrained_model_name_or_path} holds no config.json. Pass a checkpoint's folder or Hub id."
            )
        model_type = config.get("model_type", cls.model_type)
        if model_type not in (cls.model_type, Molmo2Config.model_type):
            raise ValueError(
                f"{pretrained_model_name_or_path} is a {model_type!r} model, but must be an STTS or Molmo2 checkpoint."
            )
        if model_type == Molmo2Config.model_type:
            logger.warning(
                f"{pretrained_model_name_or_path} is a Molmo2 checkpoint: all its weights are used, but STTS's scorer "
                "is new and untrained, and what it drops means nothing. Train it, or set "
                "`config.vision_config.selector` to 'cosine', which needs no training, or `pruning_ratio` to 0."
            )
            config = as_stts(config)
        return config, kwargs

    def save_pretrained(self, save_directory, push_to_hub: bool = False, **kwargs):
        """As in transformers, with an entry in `auto_map` for every auto class that a checkpoint serves."""
        self.auto_map = dict(AUTO_MAP)  # entries of a Hub repository it was loaded from would point back there
        return super().save_pretrained(save_directory, push_to_hub, **kwargs)


def as_stts(config: dict[str, Any]) -> dict[str, Any]:
    """The contents of a Molmo2 checkpoint's `config.json`, native or original, as those of an STTS checkpoint."""
    config = {key: value for key, value in config.items() if key not in ("auto_map", "architectures")}
    config["model_type"] = STTSConfig.model_type
    for key in ("vision_config", "vit_config"):  # the original's name is the latter
        if isinstance(config.get(key), dict):
            config[key] = config[key] | {"model_type": STTSVisionConfig.model_type}
    return config


STTSConfig.register_for_auto_class()

__all__ = ["STTSConfig", "STTSVisionConfig"]
