"""Configuration of STTS on Molmo2: what is scored, how much is dropped, and how the survivors are laid out."""

from .settings_stts import PRUNING_FIELDS, SELECTORS, PruningConfig, PruningSettings  # isort: split

import math
from dataclasses import field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict
from transformers.models.molmo2.configuration_molmo2 import (
    Molmo2AdapterConfig,
    Molmo2Config,
    Molmo2TextConfig,
    Molmo2VisionConfig,
)

Packing = Literal["varlen", "first_fit_descending"]


@strict
class STTSVisionConfig(PruningSettings, Molmo2VisionConfig):
    r"""
    Molmo2's vision tower with a scorer after layer `pruning_layer` (paper section 3). Fields are those of
    `PruningSettings` and

    pooling_size (`list[int]`, *optional*, defaults to `[3, 3]`):
        `[height, width]` in patches of a block, which is also the connector's pooling window `w x w`. Must equal the
        video processor's.
    packing (`str`, *optional*, defaults to `"varlen"`):
        `"varlen"`, or `"first_fit_descending"` (Algorithm 1), whose bins matter to `refill_single_frame_bins` alone.
    refill_single_frame_bins (`bool`, *optional*, defaults to `False`):
        Whether a frame alone in its bin keeps its dropped patches as context until the ViT ends, as in the released
        training code. Needs `packing="first_fit_descending"`.

    A value that a field cannot have is refused whenever it is set, and the one before stays: transformers'
    `StrictDataclassFieldValidationError`. Fields that do not fit each other are refused at construction, at loading and
    by `save_pretrained` with `StrictDataclassClassValidationError`, by the tower's next call with `ValueError`.
    """

    model_type = "stts_vision"

    pooling_size: list[int] = field(default_factory=lambda: [3, 3])
    packing: Packing = "varlen"
    refill_single_frame_bins: bool = False

    if TYPE_CHECKING:  # filled in where it is left out
        image_size: list[int]

        def __init__(self, **settings: Any) -> None: ...

    def validate_pruning(self) -> None:
        super().validate_pruning()
        if self.refill_single_frame_bins and self.packing != "first_fit_descending":
            raise ValueError(
                f"`refill_single_frame_bins` is True, but `packing` is {self.packing!r}. Set `packing` to "
                "'first_fit_descending', or leave the bins as they are (False)."
            )
        sizes, windows = self.image_size, self.pooling_size
        if len(sizes) != 2 or not 1 <= self.patch_size <= min(sizes):
            raise ValueError(
                f"`image_size` is {sizes} and `patch_size` {self.patch_size}, but they must be "
                "[height, width] and the side of a patch, in pixels, with room for at least one patch."
            )
        grid = [side // self.patch_size for side in sizes]
        fits = len(windows) == 2 and all(1 <= window <= side for window, side in zip(windows, grid, strict=True))
        if not fits:
            raise ValueError(
                f"`pooling_size` is {windows}, but must be [height, width] in patches, each from 1 up to "
                f"the side of the patch grid {grid} (`image_size` {sizes} over `patch_size` {self.patch_size})."
            )

    @property
    def block_grid(self) -> tuple[int, int]:
        """Rows and columns of blocks in a frame; `n` is their product. A window over the border counts in full."""
        rows, cols = (
            math.ceil(side // self.patch_size / window)
            for side, window in zip(self.image_size, self.pooling_size, strict=True)
        )
        return rows, cols


@strict
class STTSConfig(PruningConfig, Molmo2Config):
    r"""
    Molmo2's configuration with an `STTSVisionConfig` and the fields of `TrainingSettings`, checked like that one's.

    Settings of the vision config (`pruning_ratio`, `selector`, ...) are taken as arguments too, here and in
    `from_pretrained`, and go there.
    """

    model_type = "stts"
    native = Molmo2Config
    family = "Molmo2"
    vision_class = STTSVisionConfig
    vision_settings = (*PRUNING_FIELDS, "pooling_size")
    vision_names = ("vision_config", "vit_config")  # the released checkpoints' name is the latter
    auto_classes: ClassVar[dict[str, str]] = {
        "AutoProcessor": "processing_stts.STTSProcessor",
        "AutoVideoProcessor": "video_processing_stts.STTSVideoProcessor",
    }

    def validate_vision_config(self) -> None:
        """Raises `ValueError` also for a connector that reads no layer, and a scorer that none of them would train."""
        super().validate_vision_config()
        num_layers, layers = self.vision_config.num_hidden_layers, self.adapter_config.vision_feature_layer
        if not layers:
            raise ValueError(
                f"`vision_feature_layer` of `adapter_config` is {layers}, but must name at least one layer of the ViT."
            )
        if not SELECTORS[self.vision_config.selector].is_learned:
            return
        last = max((layer % num_layers for layer in layers if -num_layers <= layer < num_layers), default=num_layers)
        if self.vision_config.pruning_layer >= last:
            raise ValueError(
                f"`pruning_layer` is {self.vision_config.pruning_layer}, but must be below {last}, the last layer that "
                f"the connector reads (`vision_feature_layer` is {list(layers)}): otherwise nothing trains the scorer."
            )

    if TYPE_CHECKING:  # dicts and None become these
        vision_config: STTSVisionConfig
        adapter_config: Molmo2AdapterConfig
        text_config: Molmo2TextConfig

        def __init__(self, **settings: Any) -> None: ...


__all__ = ["STTSConfig", "STTSVisionConfig"]
