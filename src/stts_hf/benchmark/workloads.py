"""What is measured: a workload is one kind of pass over one shape of input, by stock Molmo2 and by STTS."""

import dataclasses
from typing import Any

import torch

from stts_hf.modeling.configuration_stts import STTSConfig
from stts_hf.modeling.settings_stts import Packing

CHOICES = {
    "mode": ("tower", "inference", "training"),
    "layout": ("varlen", "first_fit_descending"),
    "backend": ("sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3"),
    "dtype": ("float32", "bfloat16", "float16"),
}


@dataclasses.dataclass(frozen=True)
class Workload:
    """
    mode: "tower" (tower and connector), "inference" (pixels to logits, then `decode_tokens` tokens one by one) or
        "training" (forward, backward, optimiser step). frames: of each video. batch: rows, each with one video.
    ratios: pruning ratios `k`; stock Molmo2 always runs beside them. layout: `packing` of the survivors.
    backend: `attn_implementation`. text_tokens: of a row besides the video's. timestamp_tokens: before each frame.
    checkpointing: recompute activations in the backward pass, on both sides.

    Raises `ValueError` for values that cannot be.
    """

    mode: str
    geometry: str
    frames: int
    ratios: tuple[float, ...] = (0.0, 0.3, 0.4, 0.5)
    batch: int = 1
    layout: Packing = "varlen"
    backend: str = "sdpa"
    dtype: str = "float32"
    text_tokens: int = 64
    timestamp_tokens: int = 7
    decode_tokens: int = 4
    checkpointing: bool = False

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(f"`{name}` is {getattr(self, name)!r}, but must be one of {', '.join(known)}.")
        for name in ("frames", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}, but must be at least 1.")
        for ratio in self.ratios:
            if not 0 <= ratio <= 1:
                raise ValueError(f"`ratios` holds {ratio}, but may hold shares from 0 (drop nothing) to 1 (drop all).")

    @property
    def title(self) -> str:
        rows = f"{self.batch} x " if self.batch > 1 else ""
        extra = ", gradient checkpointing" if self.checkpointing and self.mode == "training" else ""
        how = f"{self.geometry}, {self.layout}, {self.backend}, {self.dtype}{extra}"
        return f"{self.mode}, {rows}{self.frames} frames, {how}"

    @property
    def total_frames(self) -> int:
        return self.batch * self.frames

    @property
    def cost(self) -> float:
        """Rough weight of one round of passes among a preset's, to share out the time."""
        passes = 1 + sum(1 - 0.85 * ratio for ratio in self.ratios)
        return self.total_frames * passes * (3 if self.mode == "training" else 1)


def workload_inputs(workload: Workload, config: STTSConfig, device: torch.device) -> dict[str, Any]:
    """
    Arguments of `model(...)`, laid out as the processor does: each row has 3 text tokens, one video, more text.

    Pixels and ids are random, never zeros. Returns input_ids, attention_mask, mm_token_type_ids (B, L),
    pixel_values_videos (F, N, pixels), video_token_pooling (G, S), video_grids (V, 3), and labels (B, L) for training:
    the text after the video.
    """
    vision = config.vision_config
    generator = torch.Generator(device).manual_seed(0)
    patch_rows, patch_cols = (side // vision.patch_size for side in vision.image_size)
    rows, cols = vision.block_grid
    height, width = vision.pooling_size
    if patch_rows % height or patch_cols % width:
        raise ValueError(f"`image_size` {vision.image_size} makes windows that hang over, which are not measured here.")
    patches = torch.arange(patch_rows * patch_cols, device=device).view(rows, height, cols, width)
    windows = patches.transpose(1, 2).reshape(rows * cols, height * width)  # (n, S)
    first = torch.arange(workload.total_frames, device=device) * (patch_rows * patch_cols)
    pixels = vision.patch_size**2 * vision.num_channels
    text = config.text_config.vocab_size

    frame = torch.full((workload.timestamp_tokens + rows * cols + 2,), config.image_patch_id, device=device)
    frame[: workload.timestamp_tokens] = 1
    frame[workload.timestamp_tokens] = config.frame_start_token_id
    frame[-1] = config.frame_end_token_id
    lead = torch.ones(3, dtype=torch.long, device=device)
    tail = torch.ones(max(workload.text_tokens - 3, 1), dtype=torch.long, device=device)
    row = torch.cat([lead, frame.repeat(workload.frames), tail])
    input_ids = row.repeat(workload.batch, 1)
    drawn = torch.randint(1, text, input_ids.shape, generator=generator, device=device)
    input_ids = torch.where(input_ids < text, drawn, input_ids)
    inputs = {
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        "mm_token_type_ids": (input_ids >= text).long(),
        "pixel_values_videos": torch.randn(
            workload.total_frames, patch_rows * patch_cols, pixels, generator=generator, device=device
        ).to(getattr(torch, workload.dtype)),
        "video_token_pooling": (windows + first[:, None, None]).flatten(0, 1),
        "video_grids": torch.tensor([[workload.frames, rows, cols]] * workload.batch),
    }
    if workload.mode == "training":
        labels = torch.full_like(input_ids, -100)
        labels[:, -tail.numel() :] = input_ids[:, -tail.numel() :]
        inputs["labels"] = labels
    return inputs
