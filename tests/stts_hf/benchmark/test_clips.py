"""The files that readers are measured on, and what a reader's process reports."""

import sys

import av
import numpy as np
import pytest

from stts_hf.benchmark import read_frames, readers
from stts_hf.benchmark.clips import repeat_clip, write_clip
from stts_hf.benchmark.front_end import measure_front_end
from stts_hf.benchmark.readers import OURS, OURS_PREPROCESSED, PYAV, measure_readers
from stts_hf.visualize.sample_clip import write_sample_clip
from tests.clips import read_clip

SMALL = (64, 96)


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    path = tmp_path_factory.mktemp("clips") / "clip.mp4"
    write_sample_clip(path, seconds=2.0, fps=25, size=SMALL)
    return path


def test_a_repeated_clip_shows_the_same_frames_again(clip, tmp_path):
    repeat_clip(clip, tmp_path / "long.mp4", 3)
    once, _ = read_clip(clip)
    frames, metadata = read_clip(tmp_path / "long.mp4")
    assert metadata.duration == pytest.approx(6.0)
    assert len(frames) == 150
    assert all(np.array_equal(frame, once[place % 50]) for place, frame in enumerate(frames))
    assert not np.array_equal(once[0], once[25])


def test_the_container_says_how_many_frames_there_are(clip, tmp_path):
    # transformers' reader relies on it.
    repeat_clip(clip, tmp_path / "long.mp4", 3)
    with av.open(str(tmp_path / "long.mp4")) as container:
        assert container.streams.video[0].frames == 150


def test_a_clip_is_at_least_as_long_as_asked(tmp_path, monkeypatch):
    monkeypatch.setattr("stts_hf.benchmark.clips._DRAWN_SECONDS", 1.0)
    write_clip(tmp_path / "clip.mp4", 2.4, SMALL)
    _, metadata = read_clip(tmp_path / "clip.mp4", lambda found: [0.0])
    assert metadata.duration == pytest.approx(3.0)


def job(clip, reader):
    return {"reader": reader, "path": str(clip), "frames": 4, "indices": [0, 16, 33, 49]}


def test_a_reader_in_a_process_of_its_own_reports_what_it_read(clip, monkeypatch):
    monkeypatch.setattr("torch.get_num_threads", lambda: 3)
    run = readers._read(OURS, clip, 4, None)
    assert run["threads"] == 3
    assert run["video_backend"] == read_frames.read(job(clip, OURS))()[1].video_backend
    assert run["indices"] == [0, 16, 33, 49]
    assert len(set(run["frames"])) == 4
    assert run["seconds"] > 0
    # Four small frames and a decoder; far below the hundreds of megabytes that the imports take.
    assert 0 < run["peak_memory"] < 60e6


def test_both_readers_give_the_same_frames(clip):
    ours, _ = read_frames.read(job(clip, OURS))()
    theirs, _ = read_frames.read(job(clip, PYAV))()
    assert len(ours) == 4
    assert np.array_equal(np.stack(ours), theirs)


def test_preprocessing_reads_the_same_moments(clip):
    _, metadata = read_frames.read(job(clip, OURS_PREPROCESSED))()
    assert list(metadata.frames_indices) == [0, 16, 33, 49]


def test_readers_take_turns_and_are_compared_frame_by_frame(monkeypatch):
    order = []

    def read(reader, path, frames, indices):
        first = reader not in order
        order.append(reader)
        frames = {"frames": ["other" if reader == PYAV and first else "same"]}
        about = {"seconds": 1.0, "peak_memory": 1, "indices": [0], "video_backend": f"backend of {reader}"}
        return about | (frames if reader in (OURS, PYAV) else {})

    monkeypatch.setattr(readers, "_read", read)
    found = measure_readers(1.0, 1, 2, SMALL)
    ours, preprocessed, pyav = readers.READERS
    assert order == [ours, ours, preprocessed, pyav, preprocessed, pyav, ours]  # the first tells the indices
    assert {reader["name"]: reader["same_frames"] for reader in found["readers"]} == {
        ours: True,
        preprocessed: None,
        pyav: False,  # in one run of two
    }
    assert all(reader["video_backend"] == f"backend of {reader['name']}" for reader in found["readers"])


def test_a_reader_that_fails_says_why(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho Traceback >&2\necho 'ValueError: no such video' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(RuntimeError, match="Reading with stts_hf ended with status 1: ValueError: no such video"):
        readers._read(OURS, tmp_path / "clip.mp4", 4, None)


def test_decoding_is_part_of_decoding_and_preprocessing():
    found = measure_front_end(8, 2, (240, 320))
    assert [len(found[part]) for part in ("decode", "preprocess", "decode_and_preprocess")] == [2, 2, 2]
    assert found["video_backend"] == "pyav"
    assert min(found["preprocess"]) > 0
    assert 0 < min(found["decode"]) < min(found["decode_and_preprocess"])
