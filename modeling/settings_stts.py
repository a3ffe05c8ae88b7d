"""The settings that every backbone has, their checks, and how a config takes, loads and saves them."""

from transformers.utils.versions import require_version

# Every entry file of a checkpoint imports this file first: later imports fail without a reason in older versions.
OLDEST_TRANSFORMERS = "5.20"
require_version(f"transformers>={OLDEST_TRANSFORMERS}", "Upgrade it with `pip install -U transformers`.")
require_version("torch>=2.9", "Upgrade it with `pip install -U torch torchvision`.")

import difflib
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from huggingface_hub.dataclasses import validated_field
from transformers import PreTrainedConfig
from transformers.configuration_utils import SubConfigSpec
from transformers.utils import TransformersKwargs, logging

from .budget_stts import KEEP_ARGUMENTS, REPLACED, KeepRule, check_one_rule, check_setting
from .selectors_stts import SELECTORS

ScoreRescaling = Literal["row", "frame", "none"]
PositionRule = Literal["original", "compact"]
ScorerTarget = Literal["change", "answers"]
RANKING_ARGUMENTS = ("block_scores", "tower_cache")  # of a caller who ranks the blocks
CALL_ARGUMENTS = (*KEEP_ARGUMENTS, "pruned_length", "packed_rows", *RANKING_ARGUMENTS)
# Settings of frames that only some processors have, and which one to use in others.
FRAME_SETTINGS = {"max_frames": "num_frames", "max_fps": "fps"}
FRAME_SETTINGS |= dict.fromkeys(("min_frames", "cap_pixels_per_frame", "max_video_tokens"), "")
NATIVE_ARGUMENTS = {*TransformersKwargs.__annotations__, "use_cache", "return_dict", "mm_encoder_outputs"}


def keep_field(name: str, default: float | None) -> Any:
    return validated_field(lambda value: None if value is default else check_setting(name, value), default=default)


def check_seed(value: int) -> None:
    if not 0 <= value < 2**63:
        raise ValueError(f"`selector_seed` is {value}, but must be from 0 to 2**63 - 1.")


def check_selector(value: str) -> None:
    if value not in SELECTORS:
        raise ValueError(f"`selector` is {value!r}, but must be one of {', '.join(map(repr, SELECTORS))}.")


def check_loss_weight(value: float) -> None:
    if not 0.0 <= value < math.inf:
        raise ValueError(f"`temporal_loss_weight` is {value!r}, but must be a finite number of at least 0.")


def check_worth_unit(value: float | None) -> None:
    if value is not None and not 0.0 < value < math.inf:
        raise ValueError(f"`worth_unit` is {value!r}, but must be a finite number above 0, or None.")


@dataclass(kw_only=True, repr=False, eq=False)
class PruningSettings:
    r"""
    Pruning fields of a vision config. Goes beside a native vision config, under `@strict`.

    pruning_ratio (`float`, *optional*, defaults to 0.5):
        Share `k` in [0, 1] of each video's blocks that is dropped. Every call may override it.
    score_threshold (`float`, *optional*):
        In place of a ratio: blocks of later frames stay if their score is at least this.
    min_pruning_ratio, max_pruning_ratio (`float`, *optional*, default to 0.0 and 1.0):
        Bounds of the share of a video that a threshold drops.
    video_token_budget (`int`, *optional*):
        Maximum number of tokens that a video keeps, in place of a ratio or beside a threshold.
    pruning_layer (`int`, *optional*, defaults to 3):
        Zero-based layer `l`: layers `0..l` run on all patches, layer `l + 1` takes the bias, later ones see survivors.
    selector (`str`, *optional*, defaults to `"scorer"`):
        `"scorer"` (learned), `"cosine"` (most similar to the previous frame goes first, untrained) or `"random"`.
    selector_seed (`int`, *optional*, defaults to 0):
        Seed of `"random"`, the same for each video. In training mode the global generator is used instead.
    score_rescaling (`str`, *optional*, defaults to `"row"`):
        Range over which scores are stretched to `[e^-2, 1]` before the logarithm: each `"row"` of the patch grid
        (released checkpoints), each `"frame"`, or `"none"` (the paper's plain logarithm).
    score_bias (`bool`, *optional*, defaults to `True`):
        Whether scores bias the attention of layer `l + 1`, which carries the task's gradient to them (paper 3.2).
        `False` suits a frozen model that was never trained with it.
    """

    pruning_ratio: float | int = keep_field("pruning_ratio", 0.5)
    score_threshold: float | int | None = keep_field("score_threshold", None)
    min_pruning_ratio: float | int = keep_field("min_pruning_ratio", 0.0)
    max_pruning_ratio: float | int = keep_field("max_pruning_ratio", 1.0)
    video_token_budget: int | None = keep_field("video_token_budget", None)
    pruning_layer: int = 3
    selector: str = validated_field(check_selector, default="scorer")
    selector_seed: int = validated_field(check_seed, default=0)
    score_rescaling: ScoreRescaling = "row"
    score_bias: bool = True

    if TYPE_CHECKING:  # the native config's
        num_hidden_layers: int = 0

    def validate_pruning(self) -> None:
        """Raises `ValueError` where fields do not fit each other: at construction, saving and each use by a tower."""
        if not 0 <= self.pruning_layer <= self.num_hidden_layers - 2:
            raise ValueError(
                f"`pruning_layer` is {self.pruning_layer}, but the layer after it drops blocks, so with "
                f"`num_hidden_layers` = {self.num_hidden_layers} it must be from 0 to {self.num_hidden_layers - 2}."
            )
        KeepRule.of(self)


class MropeSettings(PruningSettings):
    """`PruningSettings` of a tower that takes each video in its own resolution."""

    # Native configs have it since transformers 5.23.
    attribute_map: ClassVar[dict] = {"num_attention_heads": "num_heads", "num_hidden_layers": "depth"}


@dataclass(kw_only=True, repr=False, eq=False)
class TrainingSettings:
    r"""
    Fields of a model config about training and the pruned sequence.

    temporal_loss_weight (`float`, *optional*, defaults to 1.0):
        Weight of the temporal loss in the total loss: 1.0 in the paper, 0.5 in the released training code.
    detach_temporal_target (`bool`, *optional*, defaults to `True`):
        Whether similarities, the targets of the scores, pass no gradient. In the released code they pass one.
    scorer_target (`str`, *optional*, defaults to `"change"`):
        What the scorer learns: `"change"` by the temporal loss (paper 3.4); `"answers"`, how much dropping a block
        changes the answers, without a temporal loss (docs/worth.md).
    worth_unit (`float`, *optional*):
        With `"answers"`: nats of answer loss by which a score's logit grows by 1 (`block_worth`).
    pruned_position_ids (`str`, *optional*, defaults to `"original"`):
        RoPE positions of kept tokens: `"original"`, those of the full prompt, or `"compact"`, without gaps.
    """

    temporal_loss_weight: float | int = validated_field(check_loss_weight, default=1.0)
    detach_temporal_target: bool = True
    scorer_target: ScorerTarget = "change"
    worth_unit: float | None = validated_field(check_worth_unit, default=None)
    pruned_position_ids: PositionRule = "original"


# The last two are of frames of one size: others refuse to refill.
PRUNING_FIELDS = (*(field.name for field in fields(PruningSettings)), "packing", "refill_single_frame_bins")
TRAINING_FIELDS = tuple(field.name for field in fields(TrainingSettings))


def take_given(kwargs: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Takes the arguments of these names that are not None out of a call's."""
    given = {name: kwargs.pop(name, None) for name in names}
    return {name: value for name, value in given.items() if value is not None}


def check_names(names: Collection[str]) -> None:
    """Raises `ValueError` for names that are fields of our configs, or nearly ours, which native code would skip."""
    for name in {*names} - NATIVE_ARGUMENTS - {*CALL_ARGUMENTS}:
        if name in (*PRUNING_FIELDS, *TRAINING_FIELDS):
            raise ValueError(
                f"`{name}` is a field of the config, not an argument of a call: set it there, or in `from_pretrained`."
            )
        near = difflib.get_close_matches(name, (*CALL_ARGUMENTS, *PRUNING_FIELDS, *TRAINING_FIELDS), 1, 0.8)
        if near:
            raise ValueError(f"`{name}` is not an argument of a call; did you mean `{near[0]}`?")


def check_frame_settings(video_processor: Any, call: Mapping[str, Any]) -> None:
    """Raises `ValueError` for what only other video processors know: transformers ignores it, or names no argument."""
    given = {**call, **(call.get("videos_kwargs") or {})}
    for name in FRAME_SETTINGS.keys() - video_processor.valid_kwargs.__annotations__.keys():
        if (value := given.get(name)) is not None:
            use = FRAME_SETTINGS[name]
            advice = f"Pass `{use}` instead." if use else "Leave it out."
            raise ValueError(f"`{name}` is {value!r}, but {type(video_processor).__name__} has no `{name}`. {advice}")


def with_settings(vision_config: Mapping[str, Any] | PreTrainedConfig | None, given: Mapping[str, Any]) -> Any:
    """A vision config, its contents or None with the `given` settings in it, as contents; as it is without any."""
    if not given:
        return vision_config
    contents = vision_config.to_dict() if isinstance(vision_config, PreTrainedConfig) else dict(vision_config or {})
    return contents | dict(given)


def check_vision_config(value: object, model_type: str | None = None) -> None:
    """Raises `ValueError` for a vision config that cannot prune, such as a stock model's."""
    if not hasattr(value, "pruning_ratio"):
        kind = getattr(value, "model_type", type(value).__name__)
        wanted = "that of an STTS model" if model_type is None else repr(model_type)
        raise ValueError(f"`vision_config` has `model_type` {kind!r}, but must be {wanted}.")


class PruningConfig(TrainingSettings, PreTrainedConfig):
    """
    Mixin that goes before a native model config, under `@strict`: takes settings of the vision config as arguments,
    loads stock checkpoints, and saves an entry for every auto class.

    native: the stock config's class. family: its name in messages. vision_class: of the vision config.
    vision_settings: fields of the vision config that are arguments too. vision_names: what files call the vision
    config. auto_classes: the `auto_map` of a checkpoint, by default the classes of this file and its `modeling_...`.
    needs_transformers: the oldest version whose native code has what ours stands on.
    """

    needs_transformers: ClassVar[str] = OLDEST_TRANSFORMERS
    native: ClassVar[type[PreTrainedConfig]]
    family: ClassVar[str]
    vision_class: ClassVar[type[PreTrainedConfig]]
    vision_settings: ClassVar[tuple[str, ...]] = PRUNING_FIELDS
    vision_names: ClassVar[tuple[str, ...]] = ("vision_config",)
    auto_classes: ClassVar[dict[str, str]]
    keys_to_ignore_at_inference: ClassVar[list[str]] = [
        "past_key_values",
        "image_hidden_states",
        "task_loss",
        "temporal_loss",
        "token_scores",
        "keep_mask",
        "kept_indices",
        "aux_loss",
        "router_logits",
    ]

    if TYPE_CHECKING:  # the native config's
        vision_config: Any = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if "native" in vars(cls):  # a backbone's, and not a subclass of one
            spec = {"vision_config": SubConfigSpec(config_class=cls.vision_class)}
            cls.sub_configs_defaults = {**cls.native.sub_configs_defaults, **spec}
            file = cls.__module__.rpartition(".")[2]
            model = cls.__name__.replace("Config", "ForConditionalGeneration")
            names = ("AutoModel", "AutoModelForImageTextToText", "AutoModelForMultimodalLM")
            models = dict.fromkeys(names, f"{file.replace('configuration', 'modeling')}.{model}")
            cls.auto_classes = {"AutoConfig": f"{file}.{cls.__name__}", **models, **vars(cls).get("auto_classes", {})}
            cls.register_for_auto_class()
        super().__init_subclass__(**kwargs)

    def __post_init__(self, **kwargs: Any) -> None:
        remedy = f"{self.family} needs it: `pip install -U transformers`."
        require_version(f"transformers>={self.needs_transformers}", remedy)
        given = {name: kwargs.pop(name) for name in self.vision_settings if name in kwargs}
        check_one_rule(given, REPLACED)
        if given.get("pruning_ratio") is not None:  # in place of what the vision config says
            given |= dict.fromkeys(REPLACED)
        other = next((name for name in self.vision_names if name in kwargs), None)
        if self.vision_config is None and other is not None:
            kwargs[other] = with_settings(kwargs[other], given)
        elif not isinstance(self.vision_config, PreTrainedConfig) or hasattr(self.vision_config, "pruning_ratio"):
            # A stock model's would become one that can prune: `validate_vision_config` refuses it.
            self.vision_config = with_settings(self.vision_config, given)
        super().__post_init__(**kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        """Settings of the vision config, which are arguments too, are set there."""
        if name in self.vision_settings and self.vision_config is not None:
            setattr(self.vision_config, name, value)
        else:
            super().__setattr__(name, value)

    def validate_vision_config(self) -> None:
        """Raises `ValueError` for a stock vision config, and where the pruning fields do not fit each other."""
        check_vision_config(self.vision_config, self.vision_class.model_type)
        self.vision_config.validate_pruning()
        self.keep_rule()

    def keep_rule(self, *given: Mapping[str, Any]) -> KeepRule:
        """`KeepRule.of` the vision config; raises `ValueError` too for a threshold on scores without a common unit."""
        rule, is_learned = KeepRule.of(self.vision_config, *given), SELECTORS[self.vision_config.selector].is_learned
        if rule.threshold is not None and is_learned and self.scorer_target == "answers" and self.worth_unit is None:
            raise ValueError(
                f"`score_threshold` is {rule.threshold}, but with `scorer_target` = 'answers' and `worth_unit` = None "
                "scores are not comparable between videos. Train the scorer with a unit, or use `pruning_ratio`."
            )
        return rule

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Self:
        """
        As in transformers; `kwargs` may hold settings of the vision config. They and those of training are set before
        the config is checked; transformers would set them afterwards.
        """
        given = {name: kwargs.pop(name) for name in (*cls.vision_settings, *TRAINING_FIELDS) if name in kwargs}
        return super().from_dict(config_dict | given, **kwargs)

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """
        As in transformers; a stock checkpoint's configuration becomes an STTS one, with a warning about the scorer.
        Raises `OSError` where there is no `config.json` and `ValueError` for another model's.
        """
        config, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        if not config:
            raise OSError(
                f"{pretrained_model_name_or_path} holds no config.json. Pass a checkpoint's folder or Hub id."
            )
        model_type = config.get("model_type", cls.model_type)
        if model_type not in (cls.model_type, cls.native.model_type):
            raise ValueError(
                f"{pretrained_model_name_or_path} is a {model_type!r} model, but must be an STTS or {cls.family} "
                f"checkpoint: {cls.model_type!r} or {cls.native.model_type!r}."
            )
        if model_type == cls.native.model_type:
            selector = SELECTORS.get(kwargs.get("selector", PruningSettings.selector))
            if selector is not None and selector.is_learned and kwargs.get("pruning_ratio") != 0:
                logging.get_logger(cls.__module__).warning(
                    f"{pretrained_model_name_or_path} is a {cls.family} checkpoint: all its weights are used, but "
                    "STTS's scorer is new and untrained, and what it drops means nothing. Train it, or pass "
                    "selector='cosine', which needs no training, or pruning_ratio=0."
                )
            config = cls.as_stts(config)
        return config, kwargs

    @classmethod
    def as_stts(cls, config: dict[str, Any]) -> dict[str, Any]:
        """The contents of a stock checkpoint's `config.json` as those of an STTS checkpoint."""
        config = {key: value for key, value in config.items() if key not in ("auto_map", "architectures")}
        config["model_type"] = cls.model_type
        for key in cls.vision_names:
            if isinstance(config.get(key), dict):
                config[key] = config[key] | {"model_type": cls.vision_class.model_type}
        return config

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any) -> None:
        """As in transformers, with an entry in `auto_map` for every auto class that a checkpoint serves."""
        self.auto_map = dict(self.auto_classes)  # those of a Hub repository it was loaded from would point back there
        super().save_pretrained(save_directory, push_to_hub, **kwargs)


class MropeConfig(PruningConfig):
    """`PruningConfig` of tokens with a position in time, height and width: a dropped block leaves no gap to close."""

    pruned_position_ids: Literal["original"] = "original"
