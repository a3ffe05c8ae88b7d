"""What comes before the model: decoding a video and turning its frames into patches."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stts_hf.benchmark.clips import SIZE_480P, write_clip
from stts_hf.modeling.frame_sampling_stts import sample_times
from stts_hf.modeling.video_decoding_stts import decode_video
from stts_hf.modeling.video_processing_stts import STTSVideoProcessor

SAMPLED_PER_SECOND = 2  # the paper's rate


def measure_front_end(
    frames: int,
    repeats: int,
    size: tuple[int, int] = SIZE_480P,
    on_pass: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """
    Decodes, and decodes and preprocesses, `frames` frames of a clip sampled at 2 frames per second, in turns.

    Returns `decode` and `decode_and_preprocess`, seconds of every run after one of warm-up, on the host.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "clip.mp4")
        write_clip(path, frames / SAMPLED_PER_SECOND, size)
        processor = STTSVideoProcessor(num_frames=frames, max_fps=None)

        def decode() -> None:
            decode_video(path, lambda found: sample_times(found.duration, frames, None))

        def preprocess() -> None:
            processor(videos=[path], return_tensors="pt")

        samples: dict[str, list[float]] = {"decode": [], "decode_and_preprocess": []}
        for _ in range(repeats + 1):
            for name, run in (("decode", decode), ("decode_and_preprocess", preprocess)):
                started = time.perf_counter()
                run()
                samples[name].append(time.perf_counter() - started)
            on_pass("decode and preprocess")
    timed = {name: taken[1:] for name, taken in samples.items()}
    return {"frames": frames, "height": size[0], "width": size[1], **timed}
