"""Every file of the corpus gives the right frames or one clear error, in bounded time and memory; FFmpeg's own decoding
is the yardstick."""

import re
from pathlib import Path

import av
import numpy as np
import pytest
from packaging.version import Version

from tests.corpus.files import BROKEN, CASES, WHOLE, Case
from tests.corpus.measuring import NUM_FRAMES, RATE, Outcome, read_measured
from tests.corpus.yardstick import COMMAND, by_command, by_libraries, by_libraries_as_far_as_they_get, expected_indices

SECONDS = 5  # of processor time; measured are 1 at most
MEMORY = 100_000_000  # bytes; about 20 MB of them is code that a new process touches
CLEAR = "|".join(
    [
        "Cannot read .* as a video: it is not a video file of a known format, or is cut off",
        "There is no video in",
        "holds no video frames",
        "Not one frame of .* can be decoded",
        "has no decoder for",
    ]
)
# Every day a third of the files; of damages to every file, a third of each kind, which differs from file to file.
SHOWN, REFUSED = (
    [
        pytest.param(name, marks=[pytest.mark.slow] if number % 3 else [])
        for number, name in enumerate(name for name, case in CASES.items() if (case.refused is None) == is_shown)
    ]
    for is_shown in (True, False)
)
DAMAGES = [
    pytest.param(kind, damage, marks=[pytest.mark.spare] if (number + place) % 3 else [])
    for number, (kind, damages) in enumerate(BROKEN.items())
    for place, damage in enumerate(damages)
]


def check_bounds(outcome: Outcome, limit: int = MEMORY) -> None:
    assert outcome.ended is None
    assert outcome.seconds < SECONDS
    assert outcome.memory < limit


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_video_is_refused_at_once(tmp_path, name):
    outcome = read_measured(CASES[name].make(tmp_path))
    check_bounds(outcome, CASES[name].limit)
    kind, words = outcome.error or ("none", str(outcome))
    assert kind == "ValueError"
    assert re.search(CASES[name].refused or "", words)


@pytest.mark.parametrize("name", SHOWN)
def test_frames_are_those_of_a_full_decode(tmp_path, name):
    case = CASES[name]
    path = case.make(tmp_path)
    outcome = read_measured(path)
    check_bounds(outcome, case.limit)
    assert not outcome.warnings
    decoded = times, pictures, duration = by_libraries(path, case.stream, case.is_timed)
    expected = expected_indices(decoded, NUM_FRAMES, RATE)
    assert outcome.indices == expected
    assert outcome.total == len(times)
    assert outcome.times == pytest.approx([float(times[index]) for index in expected], abs=1e-6)
    # MPEG-TS rounds, and PyAV before 16 does not tell how long the last frame of an mp4 with an uneven rate lasts.
    tolerance = 0.01 if Version(av.__version__) < Version("16") else 1e-3
    assert outcome.duration == pytest.approx(float(duration), abs=tolerance)
    for frame, index in zip(outcome.frames, expected, strict=True):
        picture = case.turn(pictures[index])
        # Pictures that change their size midway get that of the first one; test_video_reading.py looks at these.
        assert np.array_equal(frame, picture) or picture.shape != case.turn(pictures[0]).shape == frame.shape

    if COMMAND is not None and case.same_command:
        compare_with_the_command(outcome, path, case)


def compare_with_the_command(outcome: Outcome, path: Path, case: Case) -> None:
    times, pictures = by_command(path)
    assert outcome.total == len(pictures)
    for frame, index in zip(outcome.frames, outcome.indices, strict=True):
        assert np.abs(frame - pictures[index].astype(float)).mean() <= case.tolerance
    if case.is_timed:  # where it is not, the command leaves times out or makes them up
        assert outcome.times == pytest.approx([float(times[index]) for index in outcome.indices], abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "damage"), DAMAGES)
def test_a_damaged_file_shows_what_can_be_decoded(tmp_path, kind, damage):
    whole = WHOLE[kind.partition(": ")[2]](tmp_path)
    broken = whole.with_name(f"broken{whole.suffix}")
    broken.write_bytes(BROKEN[kind][damage](whole.read_bytes()))
    outcome = read_measured(broken, every=True)
    check_bounds(outcome)
    original, decodable = map(by_libraries_as_far_as_they_get, (whole, broken))
    shown = dict(zip(outcome.pts or [], outcome.frames, strict=outcome.pts is not None))
    if outcome.error is not None:
        assert outcome.error[0] == "ValueError"
        assert re.search(CLEAR, outcome.error[1])
    elif outcome.pts is None:
        known = {frame.tobytes() for frames in (original, decodable) for found in frames.values() for frame in found}
        assert {frame.tobytes() for frame in outcome.frames} <= known
        return
    for pts, frame in shown.items():
        found = decodable.get(pts, []) + original.get(pts, [])
        assert any(np.array_equal(frame, picture) for picture in found), f"the frame at {pts} is made up"
    whole_ones = {
        pts for pts, found in decodable.items() if pts in original and np.array_equal(found[0], original[pts][0])
    }
    assert whole_ones <= shown.keys()
