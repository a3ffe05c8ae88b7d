"""torchcodec as the decoder: chosen where it works, the same frames as PyAV's, and what happens where it fails."""

import json
import sys
import time
import warnings

import numpy as np
import pytest

from stts_hf.benchmark.clips import repeat_clip
from stts_hf.modeling import video_torchcodec_stts
from stts_hf.modeling.video_decoding_stts import decode_video
from stts_hf.modeling.video_index_stts import VideoFile
from stts_hf.modeling.video_torchcodec_stts import TorchcodecFile, choose_decoder, torchcodec_index
from tests.clips import frame_number, set_display_matrix, write_clip

MISSING = video_torchcodec_stts._problem()
needs_torchcodec = pytest.mark.skipif(MISSING is not None, reason=f"torchcodec cannot be used here: {MISSING}")

# Decodes with PyAV what it is told to; fails on frames after 4 seconds.
STAND_IN = """
import json
from types import SimpleNamespace
import av, torch

class VideoDecoder:
    def __init__(self, source, *, stream_index, dimension_order, num_ffmpeg_threads, custom_frame_mappings):
        assert dimension_order == "NHWC"
        self.times = [frame["pts"] for frame in json.loads(custom_frame_mappings)["frames"]]
        with av.open(source) as container:
            stream = container.streams[stream_index]
            self.frames = {frame.pts: frame for frame in container.decode(stream)}

    def get_frame_at(self, index):
        frame = self.frames[self.times[index]]
        if frame.time >= 4:
            raise RuntimeError("no more frames")
        padded = torch.nn.functional.pad(torch.from_numpy(frame.to_ndarray(format="rgb24")), (0, 0, 0, 10))
        return SimpleNamespace(data=padded[:, : frame.width], pts_seconds=frame.time)
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Puts a package called torchcodec on the path, for one test."""

    def put(package, decoders=""):
        for name in [name for name in sys.modules if name.split(".")[0] == "torchcodec"]:
            monkeypatch.delitem(sys.modules, name)
        folder = tmp_path / "packages" / "torchcodec"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(package)
        (folder / "decoders.py").write_text(decoders)
        monkeypatch.syspath_prepend(folder.parent)
        video_torchcodec_stts._problem.cache_clear()

    yield put
    for name in ("torchcodec", "torchcodec.decoders"):
        sys.modules.pop(name, None)
    video_torchcodec_stts._problem.cache_clear()


@pytest.fixture
def clip(tmp_path):
    return write_clip(tmp_path / "a.mp4", 150, gop=20, max_b_frames=2)


def numbers(frames):
    return [frame_number(frame) for frame in frames]


def test_other_decoders_are_refused():
    with pytest.raises(ValueError, match=r"one of 'auto', 'pyav', 'torchcodec', got 'decord'"):
        choose_decoder("decord")


def test_pyav_where_nothing_is_installed(monkeypatch):
    monkeypatch.setattr(video_torchcodec_stts, "_is_installed", lambda: False)
    video_torchcodec_stts._problem.cache_clear()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert choose_decoder("auto") == "pyav"
        with pytest.raises(ImportError, match="pip install torchcodec"):
            choose_decoder("torchcodec")
    finally:
        video_torchcodec_stts._problem.cache_clear()


@pytest.mark.parametrize(
    ("package", "message"),
    [
        pytest.param(
            "raise RuntimeError('Could not load\\nlibtorchcodec')", "Could not load libtorchcodec", id="broken"
        ),
        pytest.param("ffmpeg_major_version = None", "finds no FFmpeg", id="without FFmpeg"),
    ],
)
def test_broken_torchcodec_is_left_with_a_warning(install, clip, package, message):
    install(package)
    with pytest.warns(UserWarning, match=f"PyAV decodes videos: .*{message}"):
        frames, metadata = decode_video(clip, lambda _: [0, 3])
    assert (numbers(frames), metadata.video_backend) == ([0, 75], "pyav")
    with pytest.raises(ImportError, match=message):
        decode_video(clip, decoder="torchcodec")


def test_working_torchcodec_is_used_unasked(install, clip):
    install("ffmpeg_major_version = 8", STAND_IN)
    frames, metadata = decode_video(clip, lambda _: [0, 1, 3.5])
    assert (numbers(frames), metadata.video_backend) == ([0, 25, 87], "torchcodec")


def test_pyav_takes_over_where_torchcodec_fails(install, clip):
    install("ffmpeg_major_version = 8", STAND_IN)
    frames, metadata = decode_video(clip, lambda _: [0, 3.5, 4, 4.2, 5.96])
    assert (numbers(frames), metadata.video_backend) == ([0, 87, 100, 105, 149], "pyav")


def test_frames_lie_without_gaps_in_memory(install, clip):
    install("ffmpeg_major_version = 8", STAND_IN)
    frames, metadata = decode_video(clip, lambda _: [0, 1])
    assert metadata.video_backend == "torchcodec"
    assert all(frame.flags.c_contiguous for frame in frames)


def test_index_counts_small_distances_as_the_file_does_and_leaves_out_the_rest(tmp_path):
    with VideoFile(write_clip(tmp_path / "a.mp4", 1000, gop=100, max_b_frames=2)) as file:
        index = torchcodec_index(file, [5, 250, 252, 999])
        listed = json.loads(index.mappings)["frames"]
        positions = np.searchsorted(file.ticks, [frame["pts"] for frame in listed]).tolist()
    expected = [0, 4, 5, *range(183, 201), 249, 250, 251, 252, *range(883, 901), 998, 999]
    assert positions == expected
    assert {position for position, frame in zip(positions, listed, strict=True) if frame["key_frame"]} == {0, 200, 900}
    assert index.places == {position: expected.index(position) for position in (5, 250, 252, 999)}


def test_wrong_frame_is_not_taken(install, clip):
    install("ffmpeg_major_version = 8", STAND_IN)
    with VideoFile(clip) as file:
        index = torchcodec_index(file, [3])
        file.ticks = file.ticks + 1  # as if torchcodec counted other frames
        assert TorchcodecFile(file, index).read(3) is None


@pytest.mark.parametrize("name", ["a.h264", "mirrored.mp4"])
def test_files_beyond_it_are_left_to_pyav(install, tmp_path, name):
    install("ffmpeg_major_version = 8", STAND_IN)
    path = write_clip(tmp_path / name, 50, container_format="h264" if name == "a.h264" else None)
    if name == "mirrored.mp4":
        set_display_matrix(path, (-1, 0, 0, 1))
    expected, _ = decode_video(path, decoder="pyav")
    frames, metadata = decode_video(path)
    assert metadata.video_backend == "pyav"
    assert np.array_equal(frames, expected)


@needs_torchcodec
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a.mp4", {"max_b_frames": 2}),
        ("a.mp4", {"start": 3.0, "audio": True}),
        ("a.mkv", {"times": np.cumsum(np.random.default_rng(0).uniform(0.01, 0.4, 80)).round(3).tolist()}),
        ("a.webm", {"codec": "libvpx-vp9", "codec_options": {"auto-alt-ref": "1", "cpu-used": "8"}}),
    ],
    ids=["mp4", "late mp4 with sound", "uneven mkv", "vp9"],
)
@pytest.mark.parametrize("form", ["path", "bytes"])
def test_frames_are_those_of_pyav(tmp_path, name, options, form):
    path = write_clip(tmp_path / name, 80, **options)
    source = path if form == "path" else path.read_bytes()
    moments = np.linspace(0, 3, 9)
    expected, expected_metadata = decode_video(source, lambda _: moments, decoder="pyav")
    frames, metadata = decode_video(source, lambda _: moments, decoder="torchcodec")
    assert metadata.video_backend == "torchcodec"
    assert metadata.frames_indices == expected_metadata.frames_indices
    assert numbers(frames) == metadata.frames_indices
    # Another build of FFmpeg may turn YUV to RGB with other roundings.
    assert np.abs(np.stack(frames).astype(int) - np.stack(expected)).max() <= 3


@needs_torchcodec
@pytest.mark.parametrize("matrix", [(0, 1, -1, 0), (-1, 0, 0, -1), (0, -1, 1, 0)], ids=str)
def test_frames_are_upright(tmp_path, matrix):
    path = write_clip(tmp_path / "a.mp4", 5)
    set_display_matrix(path, matrix)
    (expected,), _ = decode_video(path, lambda _: [0], decoder="pyav")
    (frame,), metadata = decode_video(path, lambda _: [0], decoder="torchcodec")
    assert metadata.video_backend == "torchcodec"
    assert frame.shape == expected.shape
    assert np.abs(frame.astype(int) - expected).max() <= 3


@needs_torchcodec
def test_long_gaps_are_skipped(tmp_path):
    """Decoding all that lies between would take 30 times as long."""
    path = tmp_path / "long.mp4"
    repeat_clip(write_clip(tmp_path / "piece.mp4", 100, gop=100, max_b_frames=2, size=(360, 640)), path, 40)
    with VideoFile(path) as file:
        positions = list(range(100, 4000, 1300))
        reader = TorchcodecFile(file, torchcodec_index(file, positions))
        assert reader.read(100) is not None  # opens it
        started = time.process_time()
        assert all(reader.read(position) is not None for position in positions[1:])
        skipping = time.process_time() - started
        whole = TorchcodecFile(file, torchcodec_index(file, range(len(file.ticks))))
        started = time.process_time()
        assert all(whole.read(position) is not None for position in range(1300))
        assert skipping < (time.process_time() - started) / 4
