"""Attention over packed frames: one door, the fastest kernel that the machine has behind it.

Pure tensors and plain numbers. Queries, keys and values are flat, `(P, heads, head_dim)`: the patches of all frames of
a call, block by block. `AttentionSpans` cuts them into spans, called frames below; no frame sees another.
"""

import functools
import inspect
import itertools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers.modeling_flash_attention_utils import _flash_attention_forward
from transformers.utils import logging
from transformers.utils.generic import is_flash_attention_requested

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None  # type: ignore[assignment]
# Its first versions take neither a scale, and their own is another once a bias is folded in, nor a window.
if varlen_attn is not None and "scale" not in inspect.signature(varlen_attn).parameters:
    varlen_attn = None  # type: ignore[assignment]

HALF_PRECISION = (torch.float16, torch.bfloat16)
logger = logging.get_logger(__name__)


@dataclass
class AttentionSpans:
    """
    What attends to what in a layer: each query to all keys of its span.

    cu_seqlens_q, cu_seqlens_k: (spans + 1,) int32, where spans start and end among queries and keys; a span that lost
    everything is empty. max_seqlen: upper bound of a span's length. queries: (P,) the keys that are queries, or None.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen: int
    queries: torch.Tensor | None = None

    @classmethod
    def of_lengths(cls, lengths: list[int], device: torch.device) -> "AttentionSpans":
        """Consecutive spans of these lengths in patches; every patch is a query and a key."""
        runs, start = [torch.zeros(1, dtype=torch.int64, device=device)], 0
        for length, same in itertools.groupby(lengths):  # made on the device: a copy would force a sync
            number = len(list(same))
            runs.append(start + length * torch.arange(1, number + 1, device=device))
            start += length * number
        bounds = torch.cat(runs).to(torch.int32)
        return cls(bounds, bounds, max(lengths))

    def drop(self, slots: torch.Tensor) -> tuple["AttentionSpans", "AttentionSpans"]:
        """Spans of layer `l + 1`, where the patches at slots (P,), ascending, are queries, and spans of these alone."""
        ends = torch.searchsorted(slots, self.cu_seqlens_k.long()).to(torch.int32)
        dropping = AttentionSpans(ends, self.cu_seqlens_k, self.max_seqlen, slots)
        return dropping, AttentionSpans(ends, ends, self.max_seqlen)


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    spans: AttentionSpans,
    scaling: float,
    key_bias: torch.Tensor | None = None,
    dropout: float = 0.0,
    implementation: str = "sdpa",
) -> torch.Tensor:
    """
    Every query of a span attends to all keys of that span: `softmax(scaling * q k + key_bias) v` (paper 3.2).

    query: (P_q, heads, d). key, value: (P_k, heads, d). key_bias: (P_k,) float32, added to the logits of every query
    towards that key; gradients reach it. implementation: a transformers attention name. Those with "flash" in them
    ("flash_attention_2", "kernels-community/flash-attn2", ...) are that kernel, every other the fastest that PyTorch
    has on this device. Returns (P_q, heads, d).
    """
    head_dim = query.shape[-1]
    if key_bias is not None:
        query, key, value = fold_bias_into_keys(query, key, value, key_bias, scaling)
    backend, longest = choose_backend(implementation, query, dropout), spans.max_seqlen
    is_whole = query.shape[0] == key.shape[0] == longest * (len(spans.cu_seqlens_k) - 1)
    if backend == "flash":
        output = _flash_attention_forward(  # of every version and source that transformers knows
            query[None],
            key[None],
            value[None],
            None,
            query.shape[0],
            is_causal=False,
            dropout=dropout,
            softmax_scale=scaling,
            cu_seq_lens_q=spans.cu_seqlens_q,  # type: ignore[arg-type]
            cu_seq_lens_k=spans.cu_seqlens_k,  # type: ignore[arg-type]
            max_length_q=longest,
            max_length_k=longest,
            attn_implementation=implementation,
        )[0]
    elif backend == "torch_varlen" and not is_whole:
        if missing := -query.shape[-1] % 8:
            query, key, value = (F.pad(states, (0, missing)) for states in (query, key, value))
        # PyTorch prefers cuDNN on Hopper and Blackwell, but before 9.25 it returns NaN for empty frames. cuDNN takes no
        # window, so one that is wider than any span hides nothing and selects flash attention for this call alone.
        bounds = (spans.cu_seqlens_q, spans.cu_seqlens_k, longest, longest)
        output = varlen_attn(query, key, value, *bounds, scale=scaling, window_size=(2 * longest,) * 2)
    else:  # spans of one length are one batch on every device
        attend = frame_by_frame if backend == "frame_by_frame" and not is_whole else padded_frames
        output = attend(query, key, value, spans, scaling, dropout)
    return output[..., :head_dim]


def choose_backend(implementation: str, query: torch.Tensor, dropout: float = 0.0) -> str:
    """
    "flash", "torch_varlen", "frame_by_frame" or "padded". Raises `ValueError` for a flash kernel that cannot run here.

    A CPU reads the frames' lengths for free, so there it attends frame by frame. Anywhere else that would force a
    host-device sync, and in a graph it would break the graph, so there frames are padded to one length.
    """
    half = query.dtype in HALF_PRECISION
    if is_flash_attention_requested(requested_attention_implementation=implementation):
        if query.device.type == "cpu" or not half:
            raise ValueError(
                f"`attn_implementation` is {implementation!r} for the vision tower, which needs a GPU and float16 or "
                f"bfloat16, but the patches are {query.dtype} on {query.device}. "
                "Use attn_implementation='sdpa' or change dtype and device."
            )
        return "flash"
    fits = half and query.shape[-1] <= 256 and dropout == 0.0
    if query.is_cuda and fits and has_flash(query.device.index):
        if varlen_attn is not None:
            return "torch_varlen"
        warn_of_padding()
    return "frame_by_frame" if query.device.type == "cpu" and not torch.compiler.is_compiling() else "padded"


@functools.lru_cache
@torch.compiler.assume_constant_result
def has_flash(device_index: int) -> bool:
    """Whether PyTorch's flash attention runs on this GPU: Ampere and newer, and AMD's."""
    return torch.version.hip is not None or torch.cuda.get_device_capability(device_index) >= (8, 0)


@torch.compiler.assume_constant_result
def warn_of_padding() -> None:
    """Says once that this GPU could do better than this PyTorch."""
    logger.warning_once(
        f"PyTorch {torch.__version__} has no attention over frames of different lengths that takes a scale, so video "
        "frames are padded to full length in every layer, and dropping tokens saves no attention there. Upgrade "
        "PyTorch, or install flash-attn and use attn_implementation='flash_attention_2'."
    )


def fold_bias_into_keys(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, key_bias: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Turns a bias per key into more of `q k`: `scaling * (q k + 1 * bias / scaling)`, so any kernel can take it.

    Half precision splits the bias over three entries, which together carry all 24 bits of a float32. Zeros fill up to
    a multiple of 8, which flash kernels need (72 -> 80). Returns query, key, value with the longer head_dim.
    """
    bias = key_bias.float() / scaling
    parts = [bias.to(key.dtype)]
    if key.dtype in HALF_PRECISION:
        for _ in range(2):
            bias = bias - parts[-1].float()
            parts.append(bias.to(key.dtype))
    head_dim = key.shape[-1]
    extra = 8 * math.ceil((head_dim + len(parts)) / 8) - head_dim
    columns = F.pad(torch.stack(parts, dim=-1), (0, extra - len(parts)))  # (P_k, extra)
    ones = F.pad(query.new_ones(len(parts)), (0, extra - len(parts)))  # (extra,)
    return (
        torch.cat([query, ones.expand(*query.shape[:-1], extra)], dim=-1),
        torch.cat([key, columns[:, None, :].expand(*key.shape[:-1], extra)], dim=-1),
        F.pad(value, (0, extra)),
    )


def frame_by_frame(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spans: AttentionSpans, scaling: float, dropout: float
) -> torch.Tensor:
    """One call per frame: on a CPU faster than masked bins, since no masked product is ever computed."""
    lengths_q, lengths_k = spans.cu_seqlens_q.diff().tolist(), spans.cu_seqlens_k.diff().tolist()
    outputs = []
    for q, k, v in zip(query.split(lengths_q), key.split(lengths_k), value.split(lengths_k), strict=True):
        if k.shape[0] == 0:  # nothing to attend to: padding slots of the biased layer
            outputs.append(torch.zeros_like(q))
        elif q.shape[0]:
            q, k, v = (states.transpose(0, 1)[None] for states in (q, k, v))  # (1, heads, frame, d)
            output = F.scaled_dot_product_attention(q, k, v, None, dropout, scale=scaling)
            outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


def padded_frames(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spans: AttentionSpans, scaling: float, dropout: float
) -> torch.Tensor:
    """One call for all frames, padded to `max_seqlen` and masked: no size depends on the frames' lengths."""
    num_queries, bounds, longest = query.shape[0], spans.cu_seqlens_q, spans.max_seqlen
    query, valid_queries = gather_frames(query, bounds, longest)  # (F, heads, max_seqlen, d)
    (key, valid), (value, _) = (gather_frames(states, spans.cu_seqlens_k, longest) for states in (key, value))
    mask = None
    if valid is not None:  # a frame without keys: its values are zero, so its output is
        mask = (valid | ~valid.any(-1, keepdim=True))[:, None, None, :]
    output = F.scaled_dot_product_attention(query, key, value, mask, dropout, scale=scaling)
    if valid_queries is None:
        return output.transpose(1, 2).flatten(0, 1)
    slots = torch.arange(num_queries, device=output.device, dtype=bounds.dtype)
    # Over all bounds: torch 2.11 compiles a slice of them as if it were the whole.
    frame = torch.searchsorted(bounds, slots, right=True) - 1
    return output[frame, :, slots - bounds[frame]]


def gather_frames(
    states: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """
    (P, heads, d) -> (F, heads, max_seqlen, d), zero behind each frame's end, and (F, max_seqlen) bool before it; a view
    and None where all frames are whole.
    """
    num_frames = cu_seqlens.numel() - 1
    if states.shape[0] == num_frames * max_seqlen:  # no frame is longer, so none is shorter
        return states.unflatten(0, (num_frames, max_seqlen)).transpose(1, 2), None
    offsets = torch.arange(max_seqlen, device=states.device)
    valid = offsets < cu_seqlens.diff()[:, None]
    index = (cu_seqlens[:-1, None] + offsets).clamp_max(max(states.shape[0] - 1, 0))
    padded = states[index].masked_fill(~valid[..., None, None], 0)  # zero, so that no frame's NaN reaches another
    return padded.transpose(1, 2), valid
