"""What a call must hold to make sense: each check raises a `ValueError` that names argument, value and remedy."""

import torch

from .sequence_stts import any_row_is_packed

MASKED_TEXT_ATTENTION = ("eager", "sdpa", "flex_attention")


def read_grids(video_grids: torch.Tensor) -> list[tuple[int, int, int]]:
    """(V, 3) -> `(T, rows, cols)` of each video on the host; everything after this is of known size."""
    return [(int(frames), int(rows), int(cols)) for frames, rows, cols in video_grids.tolist()]


def check_text_attention(text_config) -> None:
    """Raises `ValueError` for a text attention that would silently be causal among the vision tokens."""
    implementation = text_config._attn_implementation
    if implementation not in MASKED_TEXT_ATTENTION:
        raise ValueError(
            f"`attn_implementation` is {implementation!r} for the text model, but Molmo2's vision tokens attend to "
            "each other in both directions, which it cannot express. Use 'sdpa' or 'flex_attention' there, for example "
            "attn_implementation={'text_config': 'sdpa', 'vision_config': 'flash_attention_2'}."
        )


def packed_without_videos(
    tokens: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None, past_key_values
) -> bool:
    """
    Whether rows of a call without videos hold several samples, which stock Molmo2 would let see each other's images.
    Asked only where `position_ids` are given: looking at them waits for the device.
    """
    if position_ids is None or position_ids.dim() != 2 or tokens is None or position_ids.shape[1] != tokens.shape[1]:
        return False
    if tokens.shape[1] == 1:  # a step of decoding; a static cache's length lies on the device
        return False
    if past_key_values is not None and past_key_values.get_seq_length() > 0:
        return False
    if attention_mask is not None and (attention_mask.dim() != 2 or attention_mask.shape[1] != tokens.shape[1]):
        return False
    return any_row_is_packed(position_ids.expand(tokens.shape[:2]), attention_mask)


def flash_tells_samples_apart(text_config, tokens: torch.Tensor, attention_mask: torch.Tensor | None) -> bool:
    """
    Whether the text model has flash attention, which goes by the positions of a packed row of text itself. Raises
    `ValueError` where it would not, and no mask can say so.
    """
    if text_config._attn_implementation in MASKED_TEXT_ATTENTION:
        return False
    if tokens.shape[0] > 1 or attention_mask is not None:
        raise ValueError(
            "`position_ids` start over, as for several samples in a row, but with `attn_implementation` "
            f"{text_config._attn_implementation!r} they are told apart only in a batch of one row and without "
            "`attention_mask`. Pass it like that, or use 'sdpa' or 'flex_attention' for the text model."
        )
    return True


def check_pruned_length(value) -> None:
    """Raises `ValueError` for anything but a positive int."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"`pruned_length` is {value!r}, but must be a positive int: tokens of a row after dropping.")


def check_image_inputs(pixel_values, image_token_pooling, image_grids) -> None:
    """Raises `ValueError` for images without what the processor returns beside them."""
    if pixel_values is not None and (image_token_pooling is None or image_grids is None):
        raise ValueError("`pixel_values` needs `image_token_pooling` and `image_grids` from the processor.")


def check_video_inputs(pixel_values_videos, video_token_pooling, video_grids, vision_config) -> torch.Tensor:
    """Returns the frames as (F, N, pixels); raises `ValueError` where they, grids and pooling do not fit each other."""
    for name, value in (("video_token_pooling", video_token_pooling), ("video_grids", video_grids)):
        if value is None:
            raise ValueError(
                f"`pixel_values_videos` needs `{name}`, but it is None; pass all that the processor returns."
            )
    if video_grids.dim() != 2 or video_grids.shape[1] != 3:
        raise ValueError(
            f"`video_grids` has shape {tuple(video_grids.shape)}, but must be (videos, 3): frames, rows, columns."
        )
    pixels = vision_config.patch_size**2 * vision_config.num_channels
    expected = (vision_config.num_position_embeddings, pixels)
    if pixel_values_videos.dim() == 4:
        pixel_values_videos = pixel_values_videos.flatten(0, 1)
    if pixel_values_videos.dim() != 3 or tuple(pixel_values_videos.shape[1:]) != expected:
        raise ValueError(
            f"`pixel_values_videos` has shape {tuple(pixel_values_videos.shape)}, but must be (frames, "
            f"{expected[0]}, {expected[1]}): patches of a frame and values of a patch by `vision_config`."
        )
    grids = read_grids(video_grids)
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
    return pixel_values_videos


def check_finite(pixel_values_videos: torch.Tensor) -> None:
    """Raises `ValueError` for NaN or infinite pixels in CPU memory; elsewhere the look would wait for the device."""
    if pixel_values_videos.device.type != "cpu" or pixel_values_videos.sum(dtype=torch.float32).isfinite():
        return  # one pass and nothing to store; only a sum that is not finite, or overflows, is worth a closer look
    if not pixel_values_videos.isfinite().all():
        raise ValueError("`pixel_values_videos` holds NaN or infinite values; check how the frames were decoded.")


def check_shape(name: str, value: torch.Tensor, batch_size: int, length: int) -> torch.Tensor:
    """Returns a value per token as (B, L), given like that or as (1, L); raises `ValueError` for other shapes."""
    if tuple(value.shape) not in ((batch_size, length), (1, length)):
        raise ValueError(
            f"`{name}` has shape {tuple(value.shape)}, but must be ({batch_size}, {length}): one entry for every token "
            "of the sequence, also for those that will be dropped."
        )
    return value.expand(batch_size, length)


def check_none_hidden(num_hidden: int) -> None:
    """Raises `ValueError` where a mask hides video placeholders: their features would go to other places."""
    if num_hidden:
        raise ValueError(
            f"`attention_mask` hides {num_hidden} video placeholder tokens, but may hide only padding. Take the videos "
            "themselves out of the call."
        )


def check_image_placeholders(placeholders: torch.Tensor, num_features: int) -> None:
    """Raises `ValueError` where placeholders (B, L) and features differ in number; off the CPU it asserts there."""
    if placeholders.device.type != "cpu":
        torch._assert_async(placeholders.sum() == num_features)
    elif int(placeholders.sum()) != num_features:
        raise ValueError(
            f"`pixel_values` make {num_features} image tokens by `image_grids`, but the text has "
            f"{int(placeholders.sum())} image placeholders. Text and images must come from the same call."
        )
