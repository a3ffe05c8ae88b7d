"""Some frames of a video file: our reader beside transformers' PyAV reader, each run in a process of its own.

The files are made on the spot: a short clip is drawn and encoded, longer ones repeat its packets.
"""

import hashlib
import math
import multiprocessing
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import av
import numpy as np
import psutil
from transformers.video_utils import Path as VideoPath
from transformers.video_utils import read_video_pyav

from stts_hf.benchmark.measure import take_turns
from stts_hf.benchmark.meters import TOTAL
from stts_hf.modeling.video_processing_stts import STTSVideoProcessor, sample_times
from stts_hf.modeling.video_reading_stts import VideoFile
from stts_hf.video.processors import measure

from ..clips.sample_clip import draw_sample_clip

PYAV, OURS, PREPROCESSED = "transformers (PyAV)", "stts_hf", "stts_hf, resized and cut into patches"
READERS = (PYAV, OURS, PREPROCESSED)
FPS = 25
DRAWN_SECONDS = 30.0  # of a clip are drawn and encoded at most; a longer one repeats them


def measure_clip(seconds: float, repeats: int, frames: int = 64, size: tuple[int, int] = (480, 854)) -> dict[str, Any]:
    """
    Makes a clip of this size (lines, columns) and at least this length, and reads frames of it with every reader,
    `repeats` times, in turns. Returns a cell of the result.

    Every run is a new process, so that its peak memory is its own; the file lies in the page cache for all. A variant
    is a reader: seconds of every run, the highest peak in bytes above what the process held after its imports, and
    whether the frames of every run were byte for byte those that our reader gave first. transformers' reader is told
    which frames to read.
    """
    title = f"{frames} frames of {seconds:g} s of {size[1]}x{size[0]} H.264 at {FPS} frames per second"
    variants: list[dict[str, Any]] = [
        {"name": reader, "status": "ok", "peak_memory": 0, "stages": {TOTAL: {"flops": None, "seconds": []}}}
        for reader in READERS
    ]
    with tempfile.TemporaryDirectory() as folder:
        path, piece = f"{folder}/video.mp4", f"{folder}/piece.mp4"
        drawn = min(seconds, DRAWN_SECONDS)
        draw_sample_clip(piece, seconds=drawn, fps=FPS, size=size)
        repeat_clip(piece, path, math.ceil(seconds / drawn))
        chosen = _read_in_new_process(OURS, path, frames, [])

        def run(variant: dict[str, Any]) -> None:
            reader = variant["name"]
            done = _read_in_new_process(reader, path, frames, chosen["indices"])
            same = (
                None if reader == PREPROCESSED else variant.get("same_frames", True) and done["hash"] == chosen["hash"]
            )
            variant |= {"peak_memory": max(variant["peak_memory"], done["peak_memory"]), "same_frames": same}
            variant["stages"][TOTAL]["seconds"].append(done["seconds"])

        take_turns(title, variants, repeats, lambda variant: None, run)
    return {"title": title, "status": "ok", "variants": variants}


def read_once(reader: str, path: str, frames: int, indices: list[int]) -> dict[str, Any]:
    """Reads `frames` frames: seconds, peak memory in bytes, indices and a hash of the frames. For a new process."""
    processor = STTSVideoProcessor(num_frames=frames, max_fps=None)

    def read() -> tuple[Any, Any]:
        if reader == PYAV:
            return read_video_pyav(VideoPath(path), lambda metadata: indices)
        if reader == PREPROCESSED:
            outputs = processor(videos=[path], return_metadata=True, return_tensors="pt")
            return (), outputs["video_metadata"][0]
        with VideoFile(path) as file:
            chosen = sample_times(file.times, file.duration, frames, None)
            pictures, metadata = file.read(chosen, measure(file, chosen))
        return pictures.permute(0, 2, 3, 1).numpy(), metadata  # (T, height, width, 3), as transformers' readers do

    if not psutil.LINUX:
        raise RuntimeError("Peak memory of a reader is measured on Linux only.")
    before = psutil.Process().memory_info().rss
    # A process begins with its parent's high-water mark, and so does what getrusage says of it.
    Path("/proc/self/clear_refs").write_text("5")
    started = time.perf_counter()
    pictures, metadata = read()
    seconds = time.perf_counter() - started
    peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])  # in kB
    digest = hashlib.sha256()
    for picture in pictures:
        digest.update(np.ascontiguousarray(picture).tobytes())
    chosen = [int(index) for index in metadata.frames_indices]
    return {"seconds": seconds, "peak_memory": 1024 * peak - before, "indices": chosen, "hash": digest.hexdigest()}


def _read_in_new_process(*arguments: Any) -> dict[str, Any]:
    """`read_once`; passes on what it raises."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(read_once, *arguments).result()


def repeat_clip(source: str | os.PathLike, destination: str | os.PathLike, times: int) -> None:
    """
    Writes the video of `source` `times` times over into `destination`, packet by packet: that takes seconds where
    encoding an hour would take most of one. A decoder cannot tell: every repetition begins with a keyframe.
    """
    with av.open(os.fspath(source)) as read, av.open(os.fspath(destination), "w") as written:
        stream = read.streams.video[0]
        copy = written.add_stream_from_template(stream)
        copy.time_base = stream.time_base
        start, length = stream.start_time or 0, stream.duration or 0
        for repetition in range(times):
            read.seek(start, stream=stream)
            for packet in read.demux(stream):
                if packet.size and packet.pts is not None and packet.dts is not None:
                    packet.pts, packet.dts = packet.pts + repetition * length, packet.dts + repetition * length
                    packet.stream = copy
                    written.mux(packet)
