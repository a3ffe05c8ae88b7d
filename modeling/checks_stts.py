"""What a call of Molmo2 must hold to make sense: each check raises an error that names argument, value and remedy."""

from typing import Any

import torch
from transformers.cache_utils import Cache
from transformers.configuration_utils import PreTrainedConfig

from .configuration_stts import STTSVisionConfig
from .sequence_stts import Tokens, any_row_is_packed
from .settings_stts import check_pruning_ratio

MASKED_TEXT_ATTENTION = ("eager", "sdpa", "flex_attention")


def check_settings(pruning_ratio: Any, pruned_length: Any = None) -> None:
    """Raises `ValueError` for a ratio outside [0, 1] and a length that is no positive int. None is left out."""
    if pruning_ratio is not None:
        check_pruning_ratio(pruning_ratio)
    if pruned_length is None:
        return
    if isinstance(pruned_length, bool) or not isinstance(pruned_length, int) or pruned_length < 1:
        raise ValueError(
            f"`pruned_length` is {pruned_length!r}, but must be a positive int: tokens of a row after dropping."
        )


def check_text_attention(text_config: PreTrainedConfig) -> None:
    """Raises `ValueError` for a text attention that would silently be causal among the vision tokens."""
    implementation = text_config._attn_implementation
    if implementation not in MASKED_TEXT_ATTENTION:
        raise ValueError(
            f"`attn_implementation` is {implementation!r} for the text model, but Molmo2's vision tokens attend to "
            "each other in both directions, which it cannot express. Use 'sdpa' or 'flex_attention' there, for example "
            "attn_implementation={'text_config': 'sdpa', 'vision_config': 'flash_attention_2'}."
        )


def holds_packed_rows(tokens: Tokens, cache: Cache | None, text_config: PreTrainedConfig, has_vision: bool) -> bool:
    """
    Whether rows hold several samples, which stock Molmo2 would let see each other's images. It looks only where
    `position_ids` are given, since that forces a host-device sync. With flash attention rows of text need no mask: it
    goes by the positions itself; raises `ValueError` where it would not.
    """
    batch_size, length = tokens.shape
    positions, mask = tokens.position_ids, tokens.attention_mask
    if positions is None or positions.dim() != 2 or positions.shape[1] != length or length == 1:
        return False  # a step of decoding too; a static cache's length lies on the device
    if mask is not None and (mask.dim() != 2 or mask.shape[1] != length):
        return False
    if cache is not None and cache.get_seq_length() > 0:
        return False
    if not any_row_is_packed(positions.expand(batch_size, length), mask):
        return False
    if text_config._attn_implementation in MASKED_TEXT_ATTENTION or has_vision:
        return True
    if batch_size > 1 or mask is not None:
        raise ValueError(
            "`position_ids` start over, as for several samples in a row, but with `attn_implementation` "
            f"{text_config._attn_implementation!r} they are told apart only in a batch of one row and without "
            "`attention_mask`. Pass it like that, or use 'sdpa' or 'flex_attention' for the text model."
        )
    return False


def check_tensors(vision: dict[str, Any], *names: str) -> tuple[torch.Tensor, ...]:
    """
    The arguments of these names, of which the first is there; raises `ValueError` where another is None, `TypeError`
    where one is no tensor.
    """
    for name in names:
        value = vision.get(name)
        if value is None:
            raise ValueError(f"`{names[0]}` needs `{name}`, but it is None; pass all that the processor returns.")
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"`{name}` is a {type(value).__name__}, but must be a torch.Tensor; call the processor with "
                "return_tensors='pt'."
            )
    return tuple(vision[name] for name in names)


def check_video_inputs(vision: dict[str, Any], vision_config: STTSVisionConfig) -> list[tuple[int, int, int]]:
    """
    Returns the grid `(T, rows, cols)` of each video, on the host; raises `ValueError` or `TypeError` where frames
    (F, N, pixels), pooling and grids do not fit each other.
    """
    pixel_values_videos, video_token_pooling, video_grids = check_tensors(
        vision, "pixel_values_videos", "video_token_pooling", "video_grids"
    )
    if video_grids.dim() != 2 or video_grids.shape[1] != 3:
        raise ValueError(
            f"`video_grids` has shape {tuple(video_grids.shape)}, but must be (videos, 3): frames, rows, columns."
        )
    pixels = vision_config.patch_size**2 * vision_config.num_channels
    expected = (int(vision_config.num_position_embeddings or 0), pixels)
    if pixel_values_videos.dim() == 4:
        pixel_values_videos = pixel_values_videos.flatten(0, 1)
    if pixel_values_videos.dim() != 3 or tuple(pixel_values_videos.shape[1:]) != expected:
        raise ValueError(
            f"`pixel_values_videos` has shape {tuple(pixel_values_videos.shape)}, but must be (frames, "
            f"{expected[0]}, {expected[1]}): patches of a frame and values of a patch by `vision_config`."
        )
    grids = [(int(frames), int(rows), int(cols)) for frames, rows, cols in video_grids.tolist()]
    if video_grids.is_floating_point():
        raise TypeError(
            f"`video_grids` is {video_grids.dtype}, but must count frames, rows and columns in whole numbers; pass "
            "what the processor returns."
        )
    if not grids or min(min(grid) for grid in grids) < 1:
        raise ValueError(f"`video_grids` is {grids}, but every video needs at least one frame, row and column.")
    num_frames = sum(frames for frames, _, _ in grids)
    if num_frames != pixel_values_videos.shape[0]:
        raise ValueError(
            f"`video_grids` counts {num_frames} frames, but `pixel_values_videos` holds {pixel_values_videos.shape[0]}."
        )
    num_blocks = sum(frames * rows * cols for frames, rows, cols in grids)
    window = vision_config.pooling_size[0] * vision_config.pooling_size[1]
    if tuple(video_token_pooling.shape) != (num_blocks, window):
        raise ValueError(
            f"`video_token_pooling` has shape {tuple(video_token_pooling.shape)}, but `video_grids` and "
            f"`vision_config.pooling_size` = {vision_config.pooling_size} make it ({num_blocks}, {window}). The video "
            "processor's `pooling_size` must equal the config's."
        )
    if video_token_pooling.device.type == "cpu":
        lowest, highest = (int(bound) for bound in video_token_pooling.aminmax())
        if lowest < -1 or highest >= num_frames * expected[0]:
            raise ValueError(
                f"`video_token_pooling` goes from {lowest} to {highest}, but must hold rows of the "
                f"{num_frames * expected[0]} patches in `pixel_values_videos`, or -1 for padding."
            )
    check_finite(pixel_values_videos)
    return grids


def check_finite(pixel_values_videos: torch.Tensor) -> None:
    """Raises `ValueError` for NaN or infinite pixels in CPU memory; elsewhere looking would force a sync."""
    if pixel_values_videos.device.type != "cpu" or pixel_values_videos.sum(dtype=torch.float32).isfinite():
        return  # one pass and nothing to store; only a sum that is not finite, or overflows, is worth a closer look
    if not pixel_values_videos.isfinite().all():
        raise ValueError("`pixel_values_videos` holds NaN or infinite values; check how the frames were decoded.")
