"""FLOPs of matrix products and attention, by `torch.utils.flop_counter`, the same on every version of PyTorch."""

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

Shape = torch.Size


def attention_flops(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """Two products, logits and output. query: (B, heads, L, d); key, value: (B, heads or fewer, S, d)."""
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[-2] * (width + value[-1])


def attention_backward_flops(gradient: Shape, query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """Five products: logits once more, and two gradients of each product of the forward pass."""
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[-2] * (3 * width + 2 * value[-1])


# PyTorch before 2.15 has no formula for the attention kernel of a CPU and counts nothing there.
CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
}


def flop_counter() -> FlopCounterMode:
    """PyTorch's counter, with formulas for the attention kernel of a CPU."""
    return FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION)
