"""The moments that are shown: the paper's recipe, worked out by hand."""

import numpy as np
import pytest

from stts_hf.modeling.video_processing_stts import frame_budget, sample_indices, sample_times


@pytest.mark.parametrize(
    ("num_frames", "pruning_ratio", "budget"),
    [
        (64, 0.3, 92),
        (64, 0.4, 107),
        (64, 0.5, 128),
        (64, 0, 64),
        (7, 0.3, 10),  # 7 / (1 - 0.3) is a little more than 10 in floating point
        (9, 0.1, 10),  # and so is 9 / (1 - 0.1) when the float 0.1 is taken at its exact value
        (64, 1 - 0.36, 178),
        (64, 0.999, 64000),  # the largest that is taken
    ],
)
def test_budget_makes_up_for_what_is_pruned(num_frames, pruning_ratio, budget):
    assert frame_budget(num_frames, pruning_ratio) == budget


@pytest.mark.parametrize("ratio", [1.0, 0.9999999, 0.9991])
def test_no_sensible_budget_makes_up_for_pruning_next_to_everything(ratio):
    with pytest.raises(ValueError, match=f"at most 0.999, got {ratio}"):
        frame_budget(64, ratio)


@pytest.mark.parametrize(
    ("duration", "num_frames", "rate", "times"),
    [
        pytest.param(2.2, 64, 2, [0, 0.5, 1, 1.5, 2, 2.2], id="at the rate, plus the end"),
        pytest.param(2.0, 64, 2, [0, 0.5, 1, 1.5, 2], id="the end falls on the rate"),
        pytest.param(2.0, 5, 2, [0, 0.5, 1, 1.5, 2], id="the budget just suffices"),
        pytest.param(2.1, 5, 2, [0, 0.525, 1.05, 1.575, 2.1], id="the budget just does not suffice"),
        pytest.param(100.0, 5, 2, [0, 25, 50, 75, 100], id="spread evenly"),
        pytest.param(2.0, 3, None, [0, 1, 2], id="no rate"),
        pytest.param(2.2, None, 1, [0, 1, 2, 2.2], id="no budget"),
        pytest.param(0.04, 64, 2, [0, 0.04], id="one frame"),
        pytest.param(9.0, 2, 2, [0, 9], id="two frames"),
        pytest.param(9.0, 1, 2, [9], id="budget of one shows the last"),
    ],
)
def test_times(duration, num_frames, rate, times):
    shown = np.array([0.0, 0.1, 0.25, 0.5, 0.525, 1.0, 1.05, 1.5, 1.575, 2.0, 2.1, 25.0, 50.0, 75.0])
    shown = shown[shown < duration]
    expected = np.unique([np.flatnonzero(shown <= moment + 1e-9)[-1] for moment in times])
    assert sample_times(shown, duration, num_frames, rate) == expected.tolist()


@pytest.mark.parametrize("seed", range(5))
def test_frames_are_those_on_screen_at_each_moment_and_keep_the_budget(seed):
    rng = np.random.default_rng(seed)
    times = np.unique(np.append(0, rng.uniform(0, rng.uniform(0.01, 200), 300)))
    duration, num_frames = times[-1] + rng.uniform(0.01, 1), int(rng.integers(2, 130))
    shown = sample_times(times, duration, num_frames, 2)
    moments = np.append(np.arange(0, duration, 0.5), duration)
    if len(moments) > num_frames:
        moments = np.linspace(0, duration, num_frames)
    assert shown == np.unique(np.searchsorted(times, moments + 1e-6, side="right") - 1).tolist()
    assert len(shown) <= num_frames


@pytest.mark.parametrize(("num_frames", "rate"), [(None, 1e6), (None, 1e300), (10**12, None)])
def test_asking_for_more_frames_than_there_are_shows_each_once(num_frames, rate):
    assert sample_times(np.arange(90_000) / 25, 3600.0, num_frames, rate) == list(range(90_000))
    assert sample_indices(90_000, 25, num_frames, rate).tolist() == list(range(90_000))


@pytest.mark.parametrize(
    ("total", "fps", "num_frames", "rate", "indices"),
    [
        pytest.param(10, 10, 64, 2, [0, 5, 9], id="at the rate, plus the last"),
        pytest.param(11, 10, 64, 2, [0, 5, 10], id="the last falls on the rate"),
        pytest.param(100, 10, 4, 2, [0, 33, 66, 99], id="spread evenly"),
        pytest.param(4, 1, 64, 2, [0, 1, 2, 3], id="slower than the rate: none twice"),
        pytest.param(3, 25, 64, None, [0, 1, 2], id="fewer than asked"),
        pytest.param(2, 25, 64, 2, [0, 1], id="two"),
        pytest.param(1, 25, 64, 2, [0], id="one"),
        pytest.param(50, 25, 1, 2, [49], id="budget of one shows the last"),
        pytest.param(50, 25, None, 1, [0, 25, 49], id="no budget"),
    ],
)
def test_indices(total, fps, num_frames, rate, indices):
    assert sample_indices(total, fps, num_frames, rate).tolist() == indices
