"""What a call of any backbone must hold to make sense: each check raises an error that names argument, value and
remedy.
"""

import difflib
from collections.abc import Collection
from typing import Any

import torch
from transformers.cache_utils import Cache
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import TransformersKwargs

from .sequence_stts import Tokens, find_samples, token_order
from .settings_stts import PRUNING_FIELDS, TRAINING_FIELDS, check_pruning_ratio

MASKED_TEXT_ATTENTION = ("eager", "sdpa", "flex_attention")
RANKING_ARGUMENTS = ("block_scores", "tower_cache")  # of a caller who ranks the blocks
CALL_ARGUMENTS = ("pruning_ratio", "pruned_length", "packed_rows", *RANKING_ARGUMENTS)
NATIVE_ARGUMENTS = {*TransformersKwargs.__annotations__, "use_cache", "return_dict", "mm_encoder_outputs"}


def check_settings(pruning_ratio: Any, pruned_length: Any = None) -> None:
    """
    Raises `ValueError` for a ratio, or one of several, outside [0, 1] and a length that is no positive int. None is
    left out.
    """
    for ratio in pruning_ratio if isinstance(pruning_ratio, list | tuple) else [pruning_ratio]:
        if ratio is not None:
            check_pruning_ratio(ratio)
    if pruned_length is None:
        return
    if isinstance(pruned_length, bool) or not isinstance(pruned_length, int) or pruned_length < 1:
        raise ValueError(
            f"`pruned_length` is {pruned_length!r}, but must be a positive int: tokens of a row after dropping."
        )


def check_names(kwargs: dict[str, Any], given: Collection[str] = ()) -> dict[str, Any]:
    """
    The arguments of a call. Raises `ValueError` for a field of our configs and for what is nearly an argument of ours,
    which native code would skip, and `TypeError` for one that is `given` already, by its place.
    """
    if twice := {name for name in given if name in kwargs}:
        raise TypeError(f"`{min(twice)}` is given by its place and by its name; pass it once.")
    for name in kwargs.keys() - NATIVE_ARGUMENTS - set(CALL_ARGUMENTS):
        if name in (*PRUNING_FIELDS, *TRAINING_FIELDS):
            raise ValueError(
                f"`{name}` is a field of the config and no argument of a call: set it there, or in `from_pretrained`."
            )
        near = difflib.get_close_matches(name, (*CALL_ARGUMENTS, *PRUNING_FIELDS, *TRAINING_FIELDS), 1, 0.8)
        if near:
            raise ValueError(f"`{name}` is no argument of a call; did you mean `{near[0]}`?")
    return kwargs


def holds_packed_rows(
    tokens: Tokens,
    cache: Cache | None,
    num_axes: int,
    text_config: PreTrainedConfig | None = None,
    has_vision: bool = True,
) -> bool:
    """
    Whether rows hold several samples, which a native model may let see each other's images. It looks only where
    `position_ids` are given, since that forces a host-device sync. With flash attention rows of text need no mask: it
    goes by the positions itself; raises `ValueError` where it would not.
    """
    batch_size, length = tokens.shape
    positions, mask = token_order(tokens.position_ids, num_axes), tokens.padding_mask
    if positions is None or positions.dim() != 2 or positions.shape[1] != length or length == 1:
        return False  # a step of decoding too; a static cache's length lies on the device
    if tokens.attention_mask is not None and (mask is None or mask.shape[1] != length):
        return False
    if cache is not None and cache.get_seq_length() > 0:
        return False
    samples = find_samples(positions.expand(batch_size, length), mask)
    if not bool((samples.amax(-1) > 1).any()):
        return False
    if has_vision or text_config is None or text_config._attn_implementation in MASKED_TEXT_ATTENTION:
        return True
    if batch_size > 1 or mask is not None:
        raise ValueError(
            "`position_ids` start over, as for several samples in a row, but with `attn_implementation` "
            f"{text_config._attn_implementation!r} they are told apart only in a batch of one row and without "
            "`attention_mask`. Pass it like that, or use 'sdpa' or 'flex_attention' for the text model."
        )
    return False


def check_exclusive(kwargs: dict[str, Any], changes: bool = True) -> None:
    """
    Raises `ValueError` for arguments that describe what is no more once tokens are dropped. changes: whether this call
    encodes pixels itself, drops tokens, or lays rows out anew.
    """
    if kwargs.get("mm_encoder_outputs") and changes:
        raise ValueError(
            "`mm_encoder_outputs` came with pixels, `pruned_length`, packed rows, or `past_key_values` of a call that "
            "dropped video tokens. Pass the pixels instead of it."
        )
    if "cu_seq_lens_q" in kwargs:
        raise ValueError(
            "`cu_seq_lens_q` describes the sequence before video tokens are dropped. Leave out the flash-attention "
            "arguments; packed samples are told apart by `position_ids` that start over."
        )


def check_tensors(vision: dict[str, Any], *names: str) -> tuple[torch.Tensor, ...]:
    """
    The arguments of these names, of which the first is there; raises `ValueError` where another is None, `TypeError`
    where one is no tensor.
    """
    for name in names:
        value = vision.get(name)
        if value is None:
            raise ValueError(
                f"`{names[0]}` needs `{name}`, but it is None; pass all that this model's processor returns."
            )
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"`{name}` is a {type(value).__name__}, but must be a torch.Tensor; call the processor with "
                "return_tensors='pt'."
            )
    return tuple(vision[name] for name in names)


def check_grids(name: str, grids: torch.Tensor) -> list[tuple[int, int, int]]:
    """
    The grid `(T, rows, cols)` of each video or image, on the host; raises `ValueError` or `TypeError` where `grids`
    (V, 3) are none.
    """
    kind = name.partition("_")[0]
    if grids.dim() != 2 or grids.shape[1] != 3:
        raise ValueError(f"`{name}` has shape {tuple(grids.shape)}, but must be ({kind}s, 3): frames, rows, columns.")
    if grids.is_floating_point():
        raise TypeError(
            f"`{name}` is {grids.dtype}, but must count frames, rows and columns in whole numbers; pass what the "
            "processor returns."
        )
    read = [(int(frames), int(rows), int(cols)) for frames, rows, cols in grids.tolist()]
    if not read or min(min(grid) for grid in read) < 1:
        raise ValueError(f"`{name}` is {read}, but every {kind} needs at least one frame, row and column.")
    return read


def check_runs(name: str, grids: torch.Tensor, found: list[int], block: int, run_per_frame: bool) -> None:
    """
    Raises `ValueError` where the runs of placeholders in the text, `found` tokens long, are not those of videos or
    images with `grids` (V, 3) in patches, of which a token takes a `block`: one run for each, or for each frame.
    """
    expected: list[int] = []
    for frames, rows, cols in check_grids(name, grids):
        tokens = rows * cols // block
        expected += [tokens] * frames if run_per_frame else [frames * tokens]
    if found != expected:
        raise ValueError(
            f"`{name}` makes runs of {expected} placeholder tokens, but in the text they have {found}. Text and "
            f"{name.partition('_')[0]}s must come from the same call of this model's processor."
        )


def check_finite(pixel_values_videos: torch.Tensor) -> None:
    """Raises `ValueError` for NaN or infinite pixels in CPU memory; elsewhere looking would force a sync."""
    if pixel_values_videos.device.type != "cpu" or pixel_values_videos.sum(dtype=torch.float32).isfinite():
        return  # one pass and nothing to store; only a sum that is not finite, or overflows, is worth a closer look
    if not pixel_values_videos.isfinite().all():
        raise ValueError("`pixel_values_videos` holds NaN or infinite values; check how the frames were decoded.")
