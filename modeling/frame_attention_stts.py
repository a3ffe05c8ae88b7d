"""Attention within frames where no kernel takes variable lengths: frame by frame on a CPU, padded elsewhere.

Pure tensors and plain numbers; nothing here knows of Molmo2. Queries, keys and values are flat, `(P, heads, head_dim)`,
and cut into frames by `cu_seqlens` (F + 1,) int32.
"""

import re

import torch
import torch.nn.functional as F


def attend_within_frames(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scaling: float,
    dropout: float = 0.0,
    eager: bool = False,
) -> torch.Tensor:
    """
    Every query of a frame attends to all keys of that frame; returns (P_q, heads, d). `eager`: plain matrix products.

    A CPU knows the frames' lengths for free. Anywhere else reading them would wait for the device, so there frames are
    padded to `max_seqlen`. While compiling for a CPU the loop over frames is one operator, whose graph is the same
    whatever the lengths are.
    """
    if query.device.type == "cpu" and dropout == 0.0:
        if torch.compiler.is_compiling():
            return frame_attention(query, key, value, cu_seqlens_q, cu_seqlens_k, scaling, eager)[0]
        if not eager and not torch.is_autocast_enabled("cpu"):  # it would cast for SDPA, not for SDPA's kernel
            return FrameAttention.apply(query, key, value, cu_seqlens_q, cu_seqlens_k, scaling)
    if query.device.type == "cpu" and not torch.compiler.is_compiling():
        return frame_by_frame(query, key, value, cu_seqlens_q, cu_seqlens_k, scaling, dropout, eager)
    bounds = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return padded_frames(query, key, value, *bounds, scaling, dropout, eager)


def frame_by_frame(
    query, key, value, cu_seqlens_q, cu_seqlens_k, scaling: float, dropout: float = 0.0, eager: bool = False
) -> torch.Tensor:
    """One call per frame: on a CPU faster than masked bins, since no masked product is ever computed."""
    attend = eager_frame_attention if eager else F.scaled_dot_product_attention
    outputs = []
    for q, k, v in zip(*split_frames(cu_seqlens_q, cu_seqlens_k, query, key, value), strict=True):
        if k.shape[0] == 0:  # nothing to attend to: padding slots of the biased layer
            outputs.append(torch.zeros_like(q))
        elif q.shape[0]:
            q, k, v = (states.transpose(0, 1)[None] for states in (q, k, v))  # (1, heads, frame, d)
            outputs.append(attend(q, k, v, dropout_p=dropout, scale=scaling)[0].transpose(0, 1))
    return torch.cat(outputs)


def split_frames(cu_seqlens_q, cu_seqlens_k, query, *others) -> list[tuple[torch.Tensor, ...]]:
    """Queries by the first bounds, all others by the second, each cut into frames; reads the lengths."""
    lengths_q, lengths_k = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    return [query.split(lengths_q), *(states.split(lengths_k) for states in others)]


def padded_frames(
    query,
    key,
    value,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scaling: float,
    dropout: float = 0.0,
    eager: bool = False,
) -> torch.Tensor:
    """One call for all frames, padded to `max_seqlen` and masked: no size depends on the frames' lengths."""
    num_queries = query.shape[0]
    query, valid_queries = gather_frames(query, cu_seqlens_q, max_seqlen_q)  # (F, heads, max_seqlen_q, d)
    (key, valid), (value, _) = (gather_frames(states, cu_seqlens_k, max_seqlen_k) for states in (key, value))
    if valid is None:
        mask = None
    else:
        mask = valid | ~valid.any(-1, keepdim=True)  # a frame without keys: its values are zero, so its output is
        mask = mask[:, None, None, :]
    output = masked_attention(query, key, value, mask, scaling, dropout, eager)
    if valid_queries is None:
        return output.transpose(1, 2).flatten(0, 1)
    slots = torch.arange(num_queries, device=output.device, dtype=cu_seqlens_q.dtype)
    frame = torch.searchsorted(cu_seqlens_q[1:].contiguous(), slots, right=True)
    return output[frame, :, slots - cu_seqlens_q[frame]]


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


def masked_attention(query, key, value, mask: torch.Tensor | None, scaling: float, dropout: float, eager: bool):
    """(batch, heads, length, d) each, mask bool or None, broadcast to (batch, heads, query length, key length)."""
    if not eager:
        return F.scaled_dot_product_attention(query, key, value, mask, dropout, scale=scaling)
    if mask is None:
        return eager_frame_attention(query, key, value, dropout, scaling)
    bias = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
    return eager_frame_attention(query, key, value, dropout, scaling, bias)


def eager_frame_attention(query, key, value, dropout_p: float, scale: float, bias: torch.Tensor | float = 0.0):
    """(batch, heads, frame, d) each; softmax in float32 as transformers' eager attention does it."""
    logits = query @ key.transpose(-1, -2) * scale + bias
    return F.dropout(logits.softmax(dim=-1, dtype=torch.float32).to(value.dtype), p=dropout_p) @ value


def with_unit_stride(states: torch.Tensor) -> torch.Tensor:
    """As the kernel reads them, without looking."""
    return states if states.stride(-1) == 1 else states.contiguous()


def fused_frames(query, key, value, cu_seqlens_q, cu_seqlens_k, scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
    """
    `frame_by_frame` with the kernel that SDPA takes on a CPU, whose outputs go where they belong at once. Returns also
    the logits' logsumexp (P_q, heads), which the backward pass needs.
    """
    query, key, value = (with_unit_stride(states) for states in (query, key, value))
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    logsumexp = torch.empty(query.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32))
    frames = split_frames(cu_seqlens_q, cu_seqlens_k, query, key, value)
    places = split_frames(cu_seqlens_q, cu_seqlens_q, output, logsumexp)
    for q, k, v, out, log in zip(*frames, *places, strict=True):
        if k.shape[0] == 0:
            out.zero_()
        elif q.shape[0]:
            q, k, v = (states.transpose(0, 1)[None] for states in (q, k, v))  # (1, heads, frame, d)
            attended, its_log = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=scaling)
            out.copy_(attended[0].transpose(0, 1))
            log.copy_(its_log[0].transpose(0, 1))
    return output, logsumexp


def fused_frames_backward(
    gradient, query, key, value, output, logsumexp, cu_seqlens_q, cu_seqlens_k, *, scaling: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients by query, key and value."""
    gradient, query, key, value = (with_unit_stride(states) for states in (gradient, query, key, value))
    gradients = [torch.empty_like(states, memory_format=torch.contiguous_format) for states in (query, key, value)]
    of_queries = split_frames(cu_seqlens_q, cu_seqlens_q, query, gradient, output, logsumexp, gradients[0])
    of_keys = split_frames(cu_seqlens_k, cu_seqlens_k, key, value, *gradients[1:])
    for (q, g, out, log, by_q), (k, v, by_k, by_v) in zip(
        zip(*of_queries, strict=True), zip(*of_keys, strict=True), strict=True
    ):
        places = (by_q, by_k, by_v)
        if q.shape[0] == 0 or k.shape[0] == 0:
            for place in places:
                place.zero_()
            continue
        g, q, k, v, out, log = (states.transpose(0, 1)[None] for states in (g, q, k, v, out, log))
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            g, q, k, v, out, log, 0.0, False, scale=scaling
        )
        for place, part in zip(places, parts, strict=True):
            place.copy_(part[0].transpose(0, 1))
    return tuple(gradients)  # type: ignore[return-value]


class FrameAttention(torch.autograd.Function):
    """`frame_by_frame` as one step of autograd, which keeps one output, and not each frame's beside it."""

    @staticmethod
    def forward(ctx, query, key, value, cu_seqlens_q, cu_seqlens_k, scaling):
        output, logsumexp = fused_frames(query, key, value, cu_seqlens_q, cu_seqlens_k, scaling)
        ctx.save_for_backward(query, key, value, output, logsumexp, cu_seqlens_q, cu_seqlens_k)
        ctx.scaling = scaling
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        gradients = fused_frames_backward(gradient, *ctx.saved_tensors, scaling=ctx.scaling)
        return (*gradients, None, None, None)


# A checkpoint's copy of this file may live beside the package's, under another module name: each has its own operators.
OPERATORS = "stts_" + re.sub(r"\W", "_", __name__)


@torch.library.custom_op(f"{OPERATORS}::frame_attention", mutates_args=())
def frame_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    scaling: float,
    eager: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`fused_frames` as one operator, which a compiler does not look into; with `eager`, plain products' output."""
    output, logsumexp = fused_frames(query, key, value, cu_seqlens_q, cu_seqlens_k, scaling)
    if eager:
        output = frame_by_frame(query, key, value, cu_seqlens_q, cu_seqlens_k, scaling, eager=True)
    return output, logsumexp


@frame_attention.register_fake
def _(query, key, value, cu_seqlens_q, cu_seqlens_k, scaling, eager):
    logsumexp = torch.empty(query.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32), device=query.device)
    return torch.empty_like(query, memory_format=torch.contiguous_format), logsumexp


@torch.library.custom_op(f"{OPERATORS}::frame_attention_backward", mutates_args=())
def frame_attention_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`fused_frames_backward` as one operator."""
    bounds = (cu_seqlens_q, cu_seqlens_k)
    return fused_frames_backward(gradient, query, key, value, output, logsumexp, *bounds, scaling=scaling)


@frame_attention_backward.register_fake
def _(gradient, query, key, value, output, logsumexp, cu_seqlens_q, cu_seqlens_k, scaling):
    return tuple(torch.empty_like(states, memory_format=torch.contiguous_format) for states in (query, key, value))


def save_for_backward(ctx, inputs, output) -> None:
    query, key, value, cu_seqlens_q, cu_seqlens_k, ctx.scaling, _ = inputs
    ctx.save_for_backward(query, key, value, *output, cu_seqlens_q, cu_seqlens_k)


def backward(ctx, gradient, _):
    return (*frame_attention_backward(gradient, *ctx.saved_tensors, ctx.scaling), None, None, None, None)


frame_attention.register_autograd(backward, setup_context=save_for_backward)
