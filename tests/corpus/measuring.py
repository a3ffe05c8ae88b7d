"""What reading a file gives, in a process of its own: frames or an error, seconds and memory."""

import multiprocessing
import resource
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stts_hf.modeling.video_processing_stts import sample_times
from stts_hf.modeling.video_reading_stts import VideoFile
from stts_hf.video.processors import measure

NUM_FRAMES, RATE = 8, 2.0  # at most 8 frames, 2 a second
TIMEOUT = 60.0  # seconds until a process is taken to hang
_MOST_MEMORY = 4 * 2**30  # bytes more than the process begins with: what asks for more ends there


@dataclass
class Outcome:
    """
    error: type and words, None where there are frames. frames: uint8 `(T, height, width, 3)`. indices, times, duration:
    as in their metadata. seconds: of processor time, which other processes do not lengthen.
    memory: bytes that the peak rose by. ended: how the process ended
    where it brought nothing.
    """

    error: tuple[str, str] | None = None
    frames: np.ndarray = field(default_factory=lambda: np.empty((0, 0, 0, 3), np.uint8))
    indices: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    pts: list[int] | None = None
    total: int = 0
    duration: float = 0.0
    warnings: list[str] = field(default_factory=list)
    seconds: float = 0.0
    memory: int = 0
    ended: str | None = None

    def __str__(self) -> str:
        return self.ended or ": ".join(self.error or (f"{len(self.frames)} of {self.total} frames",))


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB


def _read(connection: Any, source: Any, every: bool) -> None:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + _MOST_MEMORY, resource.RLIM_INFINITY))
    outcome, peak, started = Outcome(), _peak(), time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with VideoFile(source) as file:
                chosen = None if every else sample_times(file.times, file.duration, NUM_FRAMES, RATE)
                frames, shown = file.read(chosen, measure(file, chosen or range(len(file.times))))
        except Exception as error:
            outcome.error = type(error).__name__, str(error)
        else:
            outcome.frames = frames.permute(0, 2, 3, 1).numpy()
            outcome.indices, outcome.times = shown.frames_indices or [], shown.timestamps
            outcome.pts = None if file.pts is None else file.pts[outcome.indices].tolist()
            outcome.total, outcome.duration = int(shown.total_num_frames), float(shown.duration or 0)
    outcome.seconds, outcome.memory = time.process_time() - started, _peak() - peak
    outcome.warnings = [str(warning.message) for warning in caught]
    connection.send(outcome)


def read_measured(source: Any, every: bool = False) -> Outcome:
    """Reads a source as `STTSVideoProcessor` samples it, or `every` frame."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # PyTorch is imported once, not by each process
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_read, args=(sending, source, every))
    process.start()
    sending.close()
    try:
        if receiving.poll(TIMEOUT):
            return receiving.recv()
        return Outcome(ended=f"hangs for {TIMEOUT:g} s")
    except EOFError:
        process.join()
        return Outcome(ended=f"the process ended with status {process.exitcode}")
    finally:
        process.kill()
        process.join()
        receiving.close()
