"""FLOPs of matrix products and attention, by `torch.utils.flop_counter`, the same on every version of PyTorch."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

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


class FlopClock:
    """A `Clock` that reads FLOPs."""

    def __init__(self, counter: FlopCounterMode) -> None:
        self.counter = counter

    def read(self) -> int:
        return self.counter.get_total_flops()

    def synchronize(self) -> None:
        pass

    def between(self, start: int, end: int) -> int:
        return end - start


class UncountedAttention(TorchDispatchMode):
    """Collects in `names` the attention operators that run without a formula, so that no ideal is silently wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operator = func.overloadpacket
        name = str(operator)
        if ("attn" in name or "attention" in name) and not {operator} & {*flop_registry, *CPU_ATTENTION}:
            self.names.add(name)
        return func(*args, **(kwargs or {}))
