"""Memory of reading a video file: full frames are not kept, and what lies between them costs a few numbers each."""

import json
import subprocess
import sys

import pytest

from examples.benchmarks.reading import repeat_clip
from tests.clips import write_clip

FULL_HD = (1080, 1920)  # 3.1 MB a frame as it is decoded, 6.2 MB in RGB
# Measures each job, (path, frames), in a fork of its own: what one leaves to be used again would hide what the
# next takes.
MEASURED = """
import json, multiprocessing, re, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from stts_hf.modeling.video_processing_stts import STTSVideoProcessor

def status(field):
    return int(re.search(field + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

def read(path, frames):
    processor = STTSVideoProcessor(size={"height": 42, "width": 42}, num_frames=frames, max_fps=None)
    return processor(path, return_tensors="pt", return_metadata=True)

def peak(job):
    path, frames = job
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # a process begins with its parent's high-water mark
    outputs = read(path, frames)
    after = status("VmHWM")
    assert outputs["video_grids"][0, 0] == frames
    return after - before

small, jobs = json.load(sys.stdin)
read(*small)  # what is imported late
with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
    print(json.dumps(pool.map(peak, jobs, chunksize=1)))
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc"),
]


@pytest.fixture(scope="module")
def peaks(tmp_path_factory):
    """Bytes that reading takes at most: all 8 and 40 frames of full HD, 16 frames of 6 minutes and of an hour."""
    folder = tmp_path_factory.mktemp("clips")
    large = write_clip(folder / "large.mp4", 4, size=FULL_HD)
    repeat_clip(large, folder / "few.mp4", 2)
    repeat_clip(large, folder / "many.mp4", 10)
    piece = write_clip(folder / "piece.mp4", 50, gop=25)
    repeat_clip(piece, folder / "minutes.mp4", 180)
    repeat_clip(piece, folder / "hour.mp4", 1800)
    jobs = [("few.mp4", 8), ("many.mp4", 40), ("minutes.mp4", 16), ("hour.mp4", 16)]
    result = subprocess.run(
        [sys.executable, "-c", MEASURED],
        input=json.dumps([(str(piece), 4), [(str(folder / name), n) for name, n in jobs]]),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    return dict(zip(jobs, json.loads(result.stdout.splitlines()[-1]), strict=True))


def test_more_frames_of_full_hd_take_little_more_memory(peaks):
    # 32 frames more: 0.8 MB in the model's size, but 99 MB as decoded. The allocator scatters up to 26 MB.
    assert peaks["many.mp4", 40] - peaks["few.mp4", 8] < 40e6


def test_a_longer_file_takes_little_more_memory(peaks):
    # 81,000 frames more: 8 to 10 MB of times, here and in the demuxer. A tuple for each would make it 16 or more.
    assert peaks["hour.mp4", 16] - peaks["minutes.mp4", 16] < 14e6
