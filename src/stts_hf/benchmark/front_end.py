"""What comes before the model: decoding a video and turning its frames into patches."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from stts_hf.benchmark.clips import SIZE_480P, write_clip
from stts_hf.benchmark.read_frames import read
from stts_hf.benchmark.readers import OURS, OURS_PREPROCESSED
from stts_hf.modeling.video_processing_stts import STTSVideoProcessor

SAMPLED_PER_SECOND = 2  # the paper's rate


def measure_front_end(
    frames: int,
    repeats: int,
    size: tuple[int, int] = SIZE_480P,
    on_pass: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """
    Decodes, preprocesses what was decoded before, and does both as in use, `frames` frames of a clip sampled at 2
    frames per second, in turns.

    Returns `decode`, `preprocess` and `decode_and_preprocess`, seconds of every run after one of warm-up, on the host,
    and the `video_backend` that decoded.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "clip.mp4")
        write_clip(path, frames / SAMPLED_PER_SECOND, size)
        decode, both = (
            read({"reader": reader, "path": path, "frames": frames}) for reader in (OURS, OURS_PREPROCESSED)
        )
        pictures, metadata = decode()
        processor, decoded = STTSVideoProcessor(), np.stack(pictures)  # (T, height, width, 3)
        runs: dict[str, Callable[[], Any]] = {
            "decode": decode,
            "preprocess": lambda: processor(videos=[decoded], do_sample_frames=False, return_tensors="pt"),
            "decode_and_preprocess": both,
        }
        samples: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(repeats + 1):
            for name, run in runs.items():
                started = time.perf_counter()
                run()
                samples[name].append(time.perf_counter() - started)
            on_pass("decode and preprocess")
    timed = {name: taken[1:] for name, taken in samples.items()}
    about = {"frames": frames, "height": size[0], "width": size[1], "video_backend": metadata.video_backend}
    return about | timed
