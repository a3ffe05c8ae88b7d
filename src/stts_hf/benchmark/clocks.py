"""What a pass is measured in: seconds, or FLOPs of matrix products and attention."""

import time
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

Shape = torch.Size


class Clock:
    """
    Seconds on the host, or on CUDA between events in the current stream, where time in which the device is idle counts
    for the stage that it is in. `read` forces no host-device sync; `synchronize` has to run before `between`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_cuda = device, device.type == "cuda"

    def read(self) -> Any:
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def synchronize(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize(self.device)

    def between(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) / 1000 if self.on_cuda else end - start


def clock_of(device: torch.device) -> Clock:
    """The clock for work on `device`."""
    return Clock(device)


class FlopClock(Clock):
    """Reads FLOPs."""

    def __init__(self, counter: FlopCounterMode) -> None:
        super().__init__(torch.device("cpu"))
        self.counter = counter

    def read(self) -> int:
        return self.counter.get_total_flops()


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


class UncountedAttention(TorchDispatchMode):
    """Collects in `names` the attention operators that run without a formula, so that no ideal is silently wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket)
        known = func.overloadpacket in flop_registry or func.overloadpacket in CPU_ATTENTION
        if ("attn" in name or "attention" in name) and not known:
            self.names.add(name)
        return func(*args, **(kwargs or {}))
