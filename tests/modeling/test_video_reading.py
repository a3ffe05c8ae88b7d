"""The seeking decoder against a reader that decodes everything, over the containers and accidents of real files."""

import gc
import struct
import threading
from collections.abc import Callable
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image

from stts_hf.modeling import video_reading_stts
from stts_hf.modeling.video_reading_stts import ByteStream, VideoFile, resize
from tests.clips import (
    decode_everything,
    frame_number,
    hide_beginning,
    numbered_frame,
    read_clip,
    set_display_matrix,
    shown_at,
    write_clip,
)
from tests.version_marks import since_av_17_1

# Beside those of the corpus (tests/corpus).
CLIPS: dict[str, tuple[str, dict[str, Any]]] = {
    "mp4 with one keyframe": ("a.mp4", {"max_b_frames": 2, "gop": 1000}),
    "mp4 with open groups": (
        "a.mp4",
        {"max_b_frames": 3, "codec_options": {"x264-params": "open-gop=1:keyint=10:bframes=3"}},
    ),
    "fragmented mp4": ("a.mp4", {"container_options": {"movflags": "frag_keyframe+empty_moov"}}),
    "mpeg-ts": ("a.ts", {"max_b_frames": 2}),
    "streamed mkv": ("a.mkv", {"container_options": {"live": "1"}}),
    "streamed webm": ("a.webm", {"codec": "libvpx", "container_options": {"live": "1"}}),
    "vp9 with hidden frames": (
        "a.webm",
        {"codec": "libvpx-vp9", "codec_options": {"auto-alt-ref": "1", "lag-in-frames": "10", "cpu-used": "8"}},
    ),
    "mpeg-ps": ("a.mpg", {"codec": "mpeg2video", "max_b_frames": 2}),
    "keyframes only": ("a.mov", {"codec": "mjpeg"}),
    "avi": ("a.avi", {"codec": "mpeg4", "max_b_frames": 2}),
}
WAYS: list[Callable[[float], Any]] = [
    lambda duration: [*np.arange(0, duration, 0.5), duration],
    lambda duration: np.linspace(0, duration, 9),
    lambda duration: [0.7 * duration],
    lambda duration: np.linspace(0, duration, 500),  # more than there are
]


@pytest.fixture(scope="module", params=CLIPS)
def clip(request, tmp_path_factory):
    name, options = CLIPS[request.param]
    path = write_clip(tmp_path_factory.mktemp("clip") / name, **({"num_frames": 80} | options))
    return path, *decode_everything(path)


def test_frames_are_those_a_full_decode_shows(clip):
    path, times, pictures, duration = clip

    def check(moments: Any) -> None:
        expected = sorted({shown_at(times, moment) for moment in moments})
        frames, metadata = read_clip(path, lambda _: moments)
        assert (metadata.frames_indices, metadata.num_damaged) == (expected, 0)
        assert metadata.frame_times == pytest.approx([float(times[index]) for index in expected], abs=1e-9)
        assert [frame_number(frame) for frame in frames] == expected
        assert all(np.array_equal(frame, pictures[index]) for frame, index in zip(frames, expected, strict=True))
        assert metadata.duration == pytest.approx(float(duration), abs=1e-3 if path.suffix == ".ts" else 1e-9)
        assert metadata.total_num_frames == len(times)

    for way in WAYS:
        check(way(float(duration)))


def test_raw_stream_has_the_frame_rate_it_says(tmp_path):
    options = {"x264-params": "fps=10:force-cfr=1"}
    path = write_clip(tmp_path / "a.h264", 30, container_format="h264", codec_options=options)
    with av.open(str(path)) as container:
        assert container.streams.video[0].average_rate == 25  # what FFmpeg takes raw streams for
    _, metadata = read_clip(path, lambda file: [0, 1, file.duration])
    assert (metadata.fps, metadata.duration) == (10, 3)
    assert metadata.frame_times == [0, 1, 2.9]


@pytest.mark.parametrize(
    ("kind", "options", "header"),
    [
        ("h264", {}, b"\0\0\1\x41"),
        ("h264", {"max_b_frames": 2}, b"\0\0\1\x41"),
        ("hevc", {"codec": "libx265", "codec_options": {"x265-params": "log-level=none"}}, b"\0\0\1\x02\x01"),
    ],
    ids=["h264", "h264 reordered", "hevc"],
)
def test_frames_of_a_raw_stream_that_are_lost_keep_their_places(tmp_path, kind, options, header):
    path = write_clip(tmp_path / f"a.{kind}", 50, container_format=kind, **options)
    parts = path.read_bytes().split(header)
    parts[13] = b"\x98\x10" + parts[13][2:]  # refers to parameters that are not there
    path.write_bytes(header.join(parts))
    with pytest.warns(UserWarning, match="are damaged"):
        frames, metadata = read_clip(path)
    shown = dict(zip(metadata.frames_indices or [], map(frame_number, frames), strict=True))
    assert len(shown) == 50 - metadata.num_damaged < 50
    # What refers to the lost frame, up to the next keyframe, may show anything.
    assert all(number == index for index, number in shown.items() if index < 12 or index >= 30)
    assert {0, 30, 49} <= set(shown)


def test_recording_that_starts_over_is_counted(tmp_path):
    part = write_clip(tmp_path / "a.ts", 50).read_bytes()
    (tmp_path / "joined.ts").write_bytes(part + part)
    frames, metadata = read_clip(tmp_path / "joined.ts", lambda found: [0, 2.0, found.duration])
    assert [frame_number(frame) for frame in frames] == [0, 0, 49]
    assert metadata.total_num_frames == 100


def test_hidden_frames_take_no_place_where_frames_are_counted(tmp_path):
    path = write_clip(tmp_path / "a.mp4", 40)
    hide_beginning(path, 5 / 25)
    with VideoFile(path) as file:
        file.pts = None  # as of a file whose times start over
        frames, _ = file.read([0, 10, 34], (96, 128))
    assert [frame_number(frame.permute(1, 2, 0).numpy()) for frame in frames] == [5, 15, 39]


def test_leaves_out_what_lies_between(tmp_path, monkeypatch):
    path = write_clip(tmp_path / "a.mp4", 600, gop=20)
    packets = []
    decode = VideoFile._decode

    def noted(source):
        for packet in source:
            packets.append(packet)
            yield packet

    monkeypatch.setattr(VideoFile, "_decode", lambda file, source, wanted: decode(file, noted(source), wanted))
    read_clip(path, lambda _: [0, 8.4, 16.6, 23.8])
    # Frames 0, 210, 415 and 595, each from the keyframe before it, and at most one packet more.
    assert 1 + 11 + 16 + 16 <= len(packets) <= 44 + 4
    packets.clear()
    with VideoFile(path) as file:
        assert file.read([0, 210, 210], (96, 128))[1].frames_indices == [0, 210, 210]
    assert 1 + 11 <= len(packets) <= 12 + 2  # a frame wanted twice is none that is to come


def test_runs_are_decoded_by_several_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    path = write_clip(tmp_path / "a.mp4", 200, gop=20)
    both = threading.Barrier(2)
    upright = video_reading_stts.upright

    def meet(frame):
        both.wait(timeout=60)  # raises unless another thread comes here at the same time
        return upright(frame)

    monkeypatch.setattr(video_reading_stts, "upright", meet)
    frames, metadata = read_clip(path, lambda _: [1, 6], size=(96, 128))
    assert [frame_number(frame) for frame in frames] == metadata.frames_indices == [25, 150]


def test_threads_hand_over_frames_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    data = write_clip(tmp_path / "a.mp4", 400, gop=20, max_b_frames=2).read_bytes()
    frames, metadata = read_clip(data, lambda found: np.linspace(0, found.duration, 14))
    assert [frame_number(frame) for frame in frames] == metadata.frames_indices
    assert len(frames) == 14


def test_error_of_a_thread_is_raised_and_ends_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    path = write_clip(tmp_path / "a.mp4", 400, gop=20)

    def fail(frame):
        raise KeyError

    monkeypatch.setattr(video_reading_stts, "upright", fail)
    with pytest.raises(KeyError):
        read_clip(path, lambda found: np.linspace(0, found.duration, 14))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read_video")]


def test_frames_are_resized_as_they_are_decoded(tmp_path):
    path = write_clip(tmp_path / "a.mp4", 30)
    with VideoFile(path) as file:
        frames, metadata = file.read([0, 29], (42, 56))
        whole, _ = file.read([0, 29], (96, 128))
    assert frames.shape == (2, 3, 42, 56)
    assert torch.equal(frames, torch.stack([resize(frame, (42, 56)) for frame in whole]))
    assert (metadata.height, metadata.width) == (96, 128)


@pytest.mark.slow
def test_no_frame_waits_for_the_garbage_collector(tmp_path):
    def count_frames() -> int:
        return sum(type(thing) is av.VideoFrame for thing in gc.get_objects())

    path = write_clip(tmp_path / "a.mp4")
    gc.collect()
    gc.disable()
    try:
        before = count_frames()  # other tests keep some
        read_clip(path, lambda found: np.linspace(0, found.duration, 6))
        assert count_frames() == before
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["as it is", "mirrored and turned", pytest.param("exif", marks=since_av_17_1)])
def test_frames_are_upright(tmp_path, kind):
    if kind == "exif":  # side data of a kind that PyAV 18 does not know
        exif = Image.Exif()
        exif[274] = 6
        Image.fromarray(numbered_frame(5)).save(tmp_path / "a.png", exif=exif)
        assert np.array_equal(read_clip(tmp_path / "a.png")[0][0], np.rot90(numbered_frame(5), -1))
        return
    path = write_clip(tmp_path / "a.mp4", 5)
    _, (picture, *_), _ = decode_everything(path)
    set_display_matrix(path, (1, 0, 0, 1) if kind == "as it is" else (0, 1, 1, 0))
    assert np.array_equal(read_clip(path)[0][0], picture if kind == "as it is" else picture.swapaxes(0, 1))


def test_frames_that_change_their_size_get_that_of_the_first(tmp_path):
    parts = [write_clip(tmp_path / f"{height}.ts", 20, size=(height, 128)).read_bytes() for height in (96, 64)]
    frames, _ = read_clip(b"".join(parts))
    assert {frame.shape for frame in frames} == {(96, 128, 3)}
    rows = np.arange(64) * 3 // 2  # of 96, as the smaller ones had them
    assert [frame_number(frame) for frame in frames[:20]] == list(range(20))
    assert [frame_number(frame[rows]) for frame in frames[20:]] == list(range(20))


def test_names_in_other_encodings_do_not_matter(tmp_path):
    path = write_clip(tmp_path / "a.mkv", 20)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"Lavf", b"L\xe4vf"))  # who wrote it, in Latin-1
    assert path.read_bytes() != data
    assert len(read_clip(path)[0]) == 20


@pytest.mark.parametrize("kind", ["path", "bytes"])
def test_places_that_files_do_not_have_are_none_of_the_readers_errors(tmp_path, kind):
    path = write_clip(tmp_path / "a.mp4", 2)
    stream = ByteStream(str(path) if kind == "path" else path.read_bytes())
    assert stream.seek(-5) == -1  # as FFmpeg is led to by damaged files
    assert stream.seek(4) == 4
    assert stream.read(4) == b"ftyp"
    stream.close()


def test_frames_of_too_many_pixels_are_not_decoded(tmp_path, monkeypatch):
    path = write_clip(tmp_path / "a.mp4", 5)
    monkeypatch.setattr(video_reading_stts, "MAX_FRAME_PIXELS", 96 * 128 - 1)
    with pytest.raises(ValueError, match=r"Not one frame .* at most 12,287 pixels"):
        read_clip(path)


def test_cut_off_before_the_index_is_refused(tmp_path):
    data = write_clip(tmp_path / "a.mp4", 80).read_bytes()
    (tmp_path / "cut.mp4").write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match="cut off before its index"):
        read_clip(tmp_path / "cut.mp4")


@pytest.mark.parametrize(
    ("name", "options"),
    [("a.mkv", {}), ("a.mp4", {"container_options": {"movflags": "faststart"}})],
    ids=["mkv", "mp4 with its index in front"],
)
def test_cut_off_file_gives_what_is_there_and_warns(tmp_path, name, options):
    path = write_clip(tmp_path / name, 150, **options)
    _, pictures, _ = decode_everything(path)
    path.write_bytes(path.read_bytes()[: int(0.6 * path.stat().st_size)])
    with pytest.warns(UserWarning, match="may be cut off"):
        frames, metadata = read_clip(path, lambda found: np.linspace(0, found.duration, 6))
    assert len(frames) >= 4
    assert 0 < (metadata.duration or 0) < 5
    for frame, time in zip(frames, metadata.frame_times or [], strict=True):
        assert np.array_equal(frame, pictures[round(25 * time)])


def test_damaged_frames_are_left_out_with_a_warning(tmp_path):
    path = write_clip(tmp_path / "a.mkv", 150)
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 3000] = np.random.default_rng(0).bytes(3000)
    path.write_bytes(data)
    with pytest.warns(UserWarning, match="are damaged"):
        frames, metadata = read_clip(path)
    assert len(frames) < 150
    assert metadata.num_damaged == metadata.total_num_frames - len(frames) > 0
    assert frame_number(frames[0]) == 0
    assert frame_number(frames[-1]) == 149
    assert (metadata.frame_times or [0.0])[-1] == 5.96


def test_frames_whose_times_contradict_their_order_are_found_by_time(tmp_path):
    path = write_clip(tmp_path / "clip.mp4", 30, max_b_frames=2)
    content = bytearray(path.read_bytes())
    fourth = content.index(b"ctts") + 12 + 8 + 4  # after the entry of the first frame; of a count and an offset each
    offset = struct.unpack_from(">i", content, fourth)[0]
    struct.pack_into(">i", content, fourth, offset + 5400)  # frame 3 claims a time between those of frames 4 and 5
    path.write_bytes(content)
    frames, metadata = read_clip(path)
    assert [frame_number(frame) for frame in frames[:7]] == [0, 1, 2, 4, 3, 5, 6]
    assert metadata.num_damaged == 0
    with VideoFile(path) as file:
        assert file.read([3], (96, 128))[1].frames_indices == [3]
        assert file.read([3, 3, 4], (96, 128))[1].frames_indices == [3, 3, 4]


def test_streams_that_begin_midway_end_no_reading(tmp_path, monkeypatch):
    """PyAV reads past the end of a list for them, so it fails in some runs; here in each."""
    path = write_clip(tmp_path / "clip.ts", 10)

    class Stumbling:
        def __init__(self, *args, **options):
            self.container = av_open(*args, **options)

        def __getattr__(self, name):
            return getattr(self.container, name)

        def demux(self, stream):
            yield from self.container.demux(stream)
            raise IndexError("list index out of range")

    av_open = av.open
    monkeypatch.setattr(av, "open", Stumbling)
    assert len(read_clip(path)[0]) == 10


def test_frame_rate_is_measured_where_the_header_is_wrong(tmp_path):
    path = write_clip(tmp_path / "a.mkv", times=[0, 1, 3, 4])
    with av.open(str(path)) as container:
        assert container.streams.video[0].average_rate == 25
    _, metadata = read_clip(path, lambda _: [0])
    assert metadata.fps == 0.75  # three steps in four seconds


def test_import_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(video_reading_stts, "av", None)
    with pytest.raises(ImportError, match="pip install av"):
        read_clip(tmp_path / "a.mp4")
