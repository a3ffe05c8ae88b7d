"""64 frames of an hour-long file: our reader beside transformers' PyAV reader, each run in a process of its own."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stts_hf.benchmark.clips import FPS, SIZE_480P, write_clip

OURS, OURS_PREPROCESSED, PYAV = "stts_hf", "stts_hf, resized and cut into patches", "transformers (PyAV)"
READERS = (OURS, OURS_PREPROCESSED, PYAV)
CHILD_TIMEOUT = 3600


def measure_readers(
    seconds: float,
    frames: int,
    repeats: int,
    size: tuple[int, int] = SIZE_480P,
    on_pass: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """
    Makes a video of `seconds` seconds and reads `frames` frames of it with every reader, `repeats` times, in turns.

    Every run is a fresh process, so that its peak is its own; the file has been read once before, so that it lies in
    the page cache for all. transformers' reader is told which frames ours chose. Returns the file's properties and per
    reader `seconds` and `peak_memory` (bytes above what the process held after its imports) of every run, whether the
    frames of every run were the same byte for byte, and the `video_backend` that decoded them.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "video.mp4"
        write_clip(path, seconds, size)
        on_pass("video made")
        chosen = _read(OURS, path, frames, None)
        results: dict[str, dict[str, Any]] = {
            reader: {"name": reader, "seconds": [], "peak_memory": [], "same_frames": None, "video_backend": None}
            for reader in READERS
        }
        for repeat in range(repeats):
            first = repeat % len(READERS)
            for reader in READERS[first:] + READERS[:first]:
                run = _read(reader, path, frames, chosen["indices"])
                results[reader]["seconds"].append(run["seconds"])
                results[reader]["peak_memory"].append(run["peak_memory"])
                if "frames" in run:
                    same = run["frames"] == chosen["frames"]
                    results[reader]["same_frames"] = same and results[reader]["same_frames"] is not False
                results[reader]["video_backend"] = run["video_backend"]
                on_pass(reader)
        video = {"seconds": seconds, "fps": FPS, "height": size[0], "width": size[1], "bytes": path.stat().st_size}
    return {"video": video, "frames": frames, "readers": list(results.values())}


def _read(reader: str, path: Path, frames: int, indices: list[int] | None) -> dict[str, Any]:
    job = {"reader": reader, "path": str(path), "frames": frames, "indices": indices}
    job["threads"] = torch.get_num_threads()  # as many as here, which decide how many decode side by side
    command = [sys.executable, "-m", "stts_hf.benchmark.read_frames"]
    done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, timeout=CHILD_TIMEOUT)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise RuntimeError(f"Reading with {reader} ended with status {done.returncode}: {last[0]}")
    return json.loads(done.stdout.splitlines()[-1])
