"""Attention over packed frames: one door, the fastest kernel that the machine has behind it.

Pure tensors and plain numbers; nothing here knows of Molmo2. Queries, keys and values are flat, `(P, heads, head_dim)`,
and cut into frames by `cu_seqlens`; nothing is padded and no frame sees another.
"""

import inspect
import math

import torch
import torch.nn.functional as F
from transformers.utils import is_flash_attn_2_available

if is_flash_attn_2_available():
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found, unused-ignore]
else:
    flash_attn_varlen_func = None

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None  # type: ignore[assignment]
# Its first versions take no scale, and their own is another once a bias is folded in.
if varlen_attn is not None and "scale" not in inspect.signature(varlen_attn).parameters:
    varlen_attn = None  # type: ignore[assignment]

HALF_PRECISION = (torch.float16, torch.bfloat16)


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scaling: float,
    key_bias: torch.Tensor | None = None,
    dropout: float = 0.0,
    implementation: str = "sdpa",
) -> torch.Tensor:
    """
    Every query of a frame attends to all keys of that frame: `softmax(scaling * q k + key_bias) v` (paper 3.2).

    query: (P_q, heads, d). key, value: (P_k, heads, d). cu_seqlens_q, cu_seqlens_k: (F + 1,) int32.
    key_bias: (P_k,) float32, added to the logits of every query towards that key; gradients reach it.
    implementation: a transformers attention name; "flash_attention_2" uses flash-attn, "eager" plain matrix products,
    every other the best that PyTorch has on this device. Returns (P_q, heads, d).
    """
    head_dim = query.shape[-1]
    if query.shape[0] == 0:
        reached = key.sum() + value.sum() if key_bias is None else key.sum() + value.sum() + key_bias.sum()
        return query * reached  # empty, and its gradients are zeros
    if key_bias is not None:
        query, key, value = fold_bias_into_keys(query, key, value, key_bias, scaling)
    backend = choose_backend(implementation, query, dropout)
    if backend == "flash_attn":
        output = flash_attn_varlen_func(
            query,
            key,
            value,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            dropout_p=dropout,
            softmax_scale=scaling,
        )
    elif backend == "torch_varlen":
        output = varlen_attn(query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale=scaling)
    else:
        attend = eager_frame_attention if backend == "eager" else F.scaled_dot_product_attention
        output = frame_by_frame(attend, query, key, value, cu_seqlens_q, cu_seqlens_k, scaling, dropout)
    return output[..., :head_dim]


def choose_backend(implementation: str, query: torch.Tensor, dropout: float = 0.0) -> str:
    """
    "flash_attn", "torch_varlen", "sdpa" or "eager". Raises `ValueError` where flash-attn is asked for and cannot run.
    """
    half = query.dtype in HALF_PRECISION
    if implementation is not None and implementation.startswith("flash_attention"):
        if flash_attn_varlen_func is None or not query.is_cuda or not half:
            raise ValueError(
                f"`attn_implementation` is {implementation!r} for the vision tower, which needs the package "
                f"flash-attn, a CUDA device and float16 or bfloat16, but the patches are {query.dtype} on "
                f"{query.device}{'' if flash_attn_varlen_func else ' and flash-attn is not installed'}. "
                "Use attn_implementation='sdpa' or change dtype and device."
            )
        return "flash_attn"
    if implementation == "eager":
        return "eager"
    flash_fits = query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    if varlen_attn is not None and query.is_cuda and half and flash_fits and dropout == 0.0:
        return "torch_varlen"
    return "sdpa"


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


def frame_by_frame(attend, query, key, value, cu_seqlens_q, cu_seqlens_k, scaling: float, dropout: float):
    """One call of `attend` per frame: on a CPU faster than masked bins, since no masked product is ever computed."""
    lengths_q, lengths_k = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    outputs = []
    for q, k, v in zip(query.split(lengths_q), key.split(lengths_k), value.split(lengths_k), strict=True):
        if k.shape[0] == 0:  # nothing to attend to: padding slots of the biased layer
            outputs.append(torch.zeros_like(q))
        elif q.shape[0]:
            q, k, v = (states.transpose(0, 1)[None] for states in (q, k, v))  # (1, heads, frame, d)
            outputs.append(attend(q, k, v, dropout_p=dropout, scale=scaling)[0].transpose(0, 1))
    return torch.cat(outputs)


def binned_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float,
    dropout: float = 0.0,
    implementation: str = "sdpa",
) -> torch.Tensor:
    """
    Attention in bins of several frames under a mask (paper Algorithm 1).

    query, key, value: (bins, capacity, heads, d). mask: (bins, 1, capacity, capacity) bool. Returns the query's shape.
    Raises `ValueError` for flash attention, which takes no mask.
    """
    if implementation is not None and implementation.startswith("flash_attention"):
        raise ValueError(
            f"`packing` is 'first_fit_descending', which needs an attention mask, but `attn_implementation` is "
            f"{implementation!r} for the vision tower. Use packing='varlen' or attn_implementation='sdpa'."
        )
    query, key, value = (states.transpose(1, 2) for states in (query, key, value))  # (bins, heads, capacity, d)
    if implementation == "eager":
        bias = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
        output = eager_frame_attention(query, key, value, dropout, scaling, bias)
    else:
        output = F.scaled_dot_product_attention(query, key, value, mask, dropout, scale=scaling)
    return output.transpose(1, 2)


def eager_frame_attention(query, key, value, dropout_p: float, scale: float, bias: torch.Tensor | float = 0.0):
    """(batch, heads, frame, d) each; softmax in float32 as transformers' eager attention does it."""
    logits = query @ key.transpose(-1, -2) * scale + bias
    return F.dropout(logits.softmax(dim=-1, dtype=torch.float32).to(value.dtype), p=dropout_p) @ value
