"""What a pass is measured in: seconds on the host, seconds on a CUDA device, or FLOPs (`flops.py`)."""

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """`between` compares two readings, once `synchronize` has run after them; `read` forces no host-device sync."""

    def read(self) -> Any: ...

    def synchronize(self) -> None: ...

    def between(self, start: Any, end: Any) -> float: ...


class HostClock:
    """Seconds of wall time, for devices whose work is done when a call returns."""

    def read(self) -> float:
        return time.perf_counter()

    def synchronize(self) -> None:
        pass

    def between(self, start: float, end: float) -> float:
        return end - start


class CudaClock:
    """Seconds by CUDA events in the current stream. Time in which the device is idle counts for the stage it is in."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def read(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) / 1000


def clock_of(device: torch.device) -> Clock:
    """The clock for work on `device`."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
