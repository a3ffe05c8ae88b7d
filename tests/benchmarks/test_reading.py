"""The files that readers are measured on, and what a run of a reader reports."""

import numpy as np
import pytest

from examples.benchmarks import reading
from examples.benchmarks.reading import OURS, PREPROCESSED, PYAV, read_once, repeat_clip
from examples.clips.sample_clip import draw_sample_clip
from tests.clips import read_clip

SMALL = (64, 96)


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    path = tmp_path_factory.mktemp("clips") / "clip.mp4"
    draw_sample_clip(path, seconds=2.0, fps=25, size=SMALL)
    return path


def test_a_repeated_clip_shows_the_same_frames_again(clip, tmp_path):
    repeat_clip(clip, tmp_path / "long.mp4", 3)
    once, _ = read_clip(clip)
    frames, metadata = read_clip(tmp_path / "long.mp4")
    assert metadata.duration == pytest.approx(6.0)
    assert len(frames) == 150
    assert all(np.array_equal(frame, once[place % 50]) for place, frame in enumerate(frames))
    assert not np.array_equal(once[0], once[25])


@pytest.mark.slow
def test_a_run_in_a_new_process_reports_its_own_memory(clip):
    run = reading._read_in_new_process(OURS, str(clip), 4, [])
    assert run["indices"] == [0, 16, 33, 49]
    assert run["seconds"] > 0
    # Four small frames and a decoder; far below the hundreds of megabytes that the imports take.
    assert 0 < run["peak_memory"] < 60e6


def test_both_readers_give_the_same_frames_and_preprocessing_the_same_moments(clip):
    ours, theirs, preprocessed = (
        read_once(reader, str(clip), 4, [0, 16, 33, 49]) for reader in (OURS, PYAV, PREPROCESSED)
    )
    assert ours["hash"] == theirs["hash"] != preprocessed["hash"]
    assert ours["indices"] == preprocessed["indices"] == [0, 16, 33, 49]
