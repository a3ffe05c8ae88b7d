"""Three ways to read off how far a pass has come: seconds on the host, seconds on a CUDA device, FLOPs.

Each has `read()`, which never waits for the device, and `between(start, end)` for two readings after `wait()`.
"""

import time
from typing import Any, Protocol

import torch
from torch.utils.flop_counter import FlopCounterMode


class Clock(Protocol):
    """What a `StageRecorder` reads."""

    def read(self) -> Any: ...

    def wait(self) -> None: ...

    def between(self, start: Any, end: Any) -> float: ...


class HostClock:
    """Seconds of wall time, for devices that are done when a call returns."""

    def read(self) -> float:
        return time.perf_counter()

    def wait(self) -> None:
        pass

    def between(self, start: float, end: float) -> float:
        return end - start


class CudaClock:
    """
    Seconds on a CUDA device by events in its stream, so that nothing waits in the middle of a pass.

    A stage that the device waits for the host in counts in full: the next event is recorded after it.
    """

    def __init__(self, device: torch.device):
        self.device = device

    def read(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)

    def between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) / 1000


class FlopClock:
    """FLOPs dispatched so far by `torch.utils.flop_counter`, which counts matrix products and attention only."""

    def __init__(self, counter: FlopCounterMode):
        self.counter = counter

    def read(self) -> int:
        return self.counter.get_total_flops()

    def wait(self) -> None:
        pass

    def between(self, start: int, end: int) -> int:
        return end - start


def clock_of(device: torch.device) -> Clock:
    """The clock that tells the time of work on `device`."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
