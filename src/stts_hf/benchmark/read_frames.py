"""One run of one reader in a process of its own (`python -m stts_hf.benchmark.read_frames`): JSON in, JSON out."""

import hashlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.video_utils import VideoMetadata, read_video_pyav

from stts_hf.benchmark.readers import OURS, PYAV
from stts_hf.modeling.video_processing_stts import STTSVideoProcessor
from stts_hf.modeling.video_reading_stts import VideoFile


def read(job: dict[str, Any]) -> Callable[[], tuple[Any, Any]]:
    """Returns what is to be timed: reads the frames of a job, `(frames, metadata)`; only PyAV needs `indices`."""
    path, count = job["path"], job["frames"]
    if job["reader"] == OURS:
        return lambda: _read_file(path, count)
    if job["reader"] == PYAV:
        return lambda: read_video_pyav(path, lambda metadata: job["indices"])
    processor = STTSVideoProcessor(num_frames=count, max_fps=None)

    def preprocess() -> tuple[Any, VideoMetadata]:
        outputs = processor(videos=[path], return_metadata=True, return_tensors="pt")
        return None, outputs["video_metadata"][0]

    return preprocess


def _read_file(path: str, count: int) -> tuple[np.ndarray, VideoMetadata]:
    with VideoFile(path) as file:
        frames, metadata = file.read(file.sample(count, None))
    return frames.permute(0, 2, 3, 1).numpy(), metadata  # (T, height, width, 3), as transformers' readers return


def main() -> None:
    """
    Runs the job on stdin and prints seconds, peak memory in bytes, threads, video backend, indices and a hash of every
    frame.
    """
    job = json.load(sys.stdin)
    torch.set_num_threads(job["threads"])
    run = read(job)
    before = _status("VmRSS")
    # A process begins with its parent's high-water mark, and so does what getrusage says of it.
    Path("/proc/self/clear_refs").write_text("5")
    started = time.perf_counter()
    frames, metadata = run()
    seconds = time.perf_counter() - started
    result: dict[str, Any] = {"seconds": seconds, "peak_memory": _status("VmHWM") - before}
    result["threads"], result["video_backend"] = torch.get_num_threads(), metadata.video_backend
    result["indices"] = [int(index) for index in metadata.frames_indices]
    if frames is not None:
        result["frames"] = [hashlib.sha256(np.ascontiguousarray(frame).tobytes()).hexdigest() for frame in frames]
    print(json.dumps(result))


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}; peak memory of a reader is measured on Linux only")


if __name__ == "__main__":
    main()
