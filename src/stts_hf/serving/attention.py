"""Attention of a step's vision tokens, who see each other in both directions, over vLLM's paged cache.

vLLM's backends are causal, or know ranges within which all see all. A video is no such range: its frames' tokens see
those of all frames, but not the timestamps between that come later. So the backend does all tokens causally, and what
vision tokens get is computed again with their mask.
"""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadata

from stts_hf.serving.digits import from_digits, to_digits

_QUERIES_AT_ONCE = 1024  # a mask has a row for each, as long as the sequence


class VisionStep:
    """Which tokens of the step that is computed are vision tokens; all layers share one."""

    def __init__(self) -> None:
        self.is_vision: torch.Tensor | None = None  # (tokens,) bool; None without any

    def requests(self, metadata: CPUAttentionMetadata) -> Iterator[tuple[int, slice, int]]:
        """Per request with vision tokens in this step: its row, its tokens in the step, tokens computed before."""
        if self.is_vision is None:
            return
        starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        has_vision = self.is_vision.cumsum(0).tolist()
        for row, (start, end) in enumerate(itertools.pairwise(starts)):
            if end > start and has_vision[end - 1] > (has_vision[start - 1] if start else 0):
                yield row, slice(start, end), lengths[row] - (end - start)


class VisionAttention:
    """vLLM's CPU attention of one layer, `impl`, with the right mask for vision tokens."""

    def __init__(self, impl: CPUAttentionBackendImpl, step: VisionStep):
        self.impl, self.step = impl, step

    def __getattr__(self, name: str) -> Any:  # whatever else vLLM asks of an attention
        return getattr(self.impl, name)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """As in vLLM, query (tokens, heads, head size), key and value (tokens, key heads, head size); into `output`."""
        self.impl.forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        if attn_metadata is None:
            return output
        for row, new, num_before in self.step.requests(attn_metadata):
            keys, values = key[new], value[new]
            if num_before:
                keys, values = cached_keys_and_values(
                    layer, kv_cache, attn_metadata.block_table[row], num_before + len(keys), key.shape[1]
                )
            see_each_other = self.step.is_vision[new]  # type: ignore[index]  # there are requests only where it is set
            for places in see_each_other.nonzero()[:, 0].split(_QUERIES_AT_ONCE):
                seen = vision_mask(places, see_each_other, num_before)
                q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query[new][places], keys, values))
                attended = nn.functional.scaled_dot_product_attention(
                    q, k, v, seen, scale=self.impl.scale, enable_gqa=True
                )
                output[new][places] = attended[0].transpose(0, 1).to(output.dtype)
        return output


def vision_mask(places: torch.Tensor, is_vision: torch.Tensor, num_before: int) -> torch.Tensor:
    """What vision tokens (Q,) of a step see, (Q, num_before + L) bool: all before them, and every vision token."""
    seen = (torch.arange(len(is_vision), device=places.device) <= places[:, None]) | is_vision
    return nn.functional.pad(seen, (num_before, 0), value=True)


def cached_keys_and_values(
    layer: Any, kv_cache: torch.Tensor, blocks: torch.Tensor, length: int, num_heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Keys and values (length, heads, head size) of a sequence from the paged cache (blocks, heads, block size, 2 * head
    size), which the CPU backend fills in an order that fits its kernels. blocks: (n,) of the sequence.
    """
    block_size, head_size = kv_cache.shape[2], kv_cache.shape[3] // 2
    blocks = blocks[: -(-length // block_size)].long()
    halves = kv_cache[blocks].view(len(blocks), num_heads, 2, block_size * head_size).unbind(2)
    orders = cache_order(layer.isa, block_size, head_size, kv_cache.dtype)
    return tuple(  # type: ignore[return-value]  # two
        half[..., order].view(len(blocks), num_heads, block_size, head_size).transpose(1, 2).flatten(0, 1)[:length]
        for half, order in zip(halves, orders, strict=True)
    )


@functools.cache
def cache_order(isa: str, block_size: int, head_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Where in a block's memory the kernels for `isa` put the elements of keys and of values, (block size * head size,)
    each: found by writing numbers through them, in digits that every dtype holds exactly.
    """
    size = block_size * head_size
    found = []
    for digit in to_digits(torch.arange(size)).unbind(-1):
        block = torch.zeros(1, 1, 2 * block_size, head_size, dtype=dtype)
        keys, values = block.chunk(2, dim=2)
        written = digit.to(dtype).view(block_size, 1, head_size)
        slots = torch.arange(block_size)
        ops.cpu_attn_reshape_and_cache(
            written, written, keys, values, slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
        )
        found.append(block.view(2, size))
    keys_at, values_at = from_digits(torch.stack(found, dim=-1))
    return torch.argsort(keys_at), torch.argsort(values_at)
