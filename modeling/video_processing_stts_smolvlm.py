"""Frames of videos for STTS on SmolVLM2: native ones, with videos of unequal length and apart from images."""

from .settings_stts import require_version  # noqa: F401

# isort: split

import math
from typing import Any

import torch
from transformers.feature_extraction_utils import BatchFeature
from transformers.models.smolvlm.video_processing_smolvlm import (
    SmolVLMVideoProcessor,
    SmolVLMVideoProcessorInitKwargs,
)


class STTSSmolVLMVideoProcessorKwargs(SmolVLMVideoProcessorInitKwargs, total=False):
    """
    image_seq_len (`int`, *optional*):
        Tokens of a frame, a square number. The processor sets it to its own.
    """

    image_seq_len: int


class STTSSmolVLMVideoProcessor(SmolVLMVideoProcessor):
    """SmolVLM2's video processor without padding: each frame is one image, squared to `max_image_size`.

    Returns `pixel_values_videos` `(F, 3, height, width)`, F frames of all videos in their order, and `video_grids`
    `(V, 3)` = `(T, rows, columns)` in blocks.
    """

    image_seq_len = 64
    num_frames = 64  # the released checkpoints' `video_sampling`
    fps = 1
    valid_kwargs = STTSSmolVLMVideoProcessorKwargs
    model_input_names = ["pixel_values_videos", "video_grids"]  # noqa: RUF012

    def _preprocess(self, videos: list[torch.Tensor], return_tensors: Any = None, **kwargs: Any) -> BatchFeature:  # type: ignore[override]
        side = math.isqrt(self.image_seq_len)
        if side**2 != self.image_seq_len:
            raise ValueError(
                f"`image_seq_len` is {self.image_seq_len}, but a frame has a square number of blocks, such as 64."
            )
        for name in ("image_seq_len", "max_image_size"):
            if kwargs.get(name) not in (None, getattr(self, name)):
                raise ValueError(
                    f"`{name}` is {kwargs[name]!r} in a call, but the model's frames have {getattr(self, name)!r}. "
                    "Leave it out; for a model of other sizes, set it in `processor_config.json`."
                )
        kwargs |= {"do_pad": False}
        frames = [
            super(STTSSmolVLMVideoProcessor, self)._preprocess([one], **kwargs)["pixel_values"][0] for one in videos
        ]
        grids = torch.tensor([[len(some), side, side] for some in frames])
        return BatchFeature(
            {"pixel_values_videos": torch.cat(frames), "video_grids": grids}, tensor_type=return_tensors
        )


STTSSmolVLMVideoProcessor.register_for_auto_class("AutoVideoProcessor")
