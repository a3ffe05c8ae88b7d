"""What a run of `stts-hf bench` that does not reach its end leaves behind."""

import dataclasses
import json
import os
import signal
import tempfile
import time

import pytest
import torch

from stts_hf.benchmark import output
from stts_hf.benchmark.presets import find_preset
from stts_hf.benchmark.run import run_preset
from stts_hf.cli.main import main
from tests.stts_hf.benchmark.made_up import pruned_twice, result


@pytest.fixture
def ends_after_one(monkeypatch):
    """Makes the preset's first workload a made-up cell, and has the second raise what is called with."""

    def install(error: BaseException) -> None:
        def measure_workloads(*arguments):
            yield pruned_twice()
            raise error

        monkeypatch.setattr("stts_hf.benchmark.run.measure_workloads", measure_workloads)

    return install


@pytest.mark.parametrize("error", [TypeError, KeyboardInterrupt, SystemExit])
def test_a_run_that_dies_keeps_what_it_measured_beside_what_was_there(tmp_path, ends_after_one, error):
    output.write_result(result([pruned_twice()]), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    ends_after_one(error("late"))
    command = ["bench", "--preset", "tower", "--device", "cpu", "--output", str(tmp_path)]
    if error is KeyboardInterrupt:
        assert main(command) == 130
    else:
        with pytest.raises(error, match="late"):
            main(command)
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    kept = json.loads(after.pop("unfinished.json"))
    assert after == before
    assert (kept["finished"], len(kept["cells"]), kept["workloads"]) == (False, 1, 2)


def test_every_part_is_kept_as_soon_as_it_is_measured(monkeypatch):
    monkeypatch.setattr("stts_hf.benchmark.run.measure_front_end", lambda frames, *_: {"frames": frames})
    monkeypatch.setattr("stts_hf.benchmark.run.measure_workloads", lambda *_: iter([{"cell": 1}, {"cell": 2}]))
    monkeypatch.setattr("stts_hf.benchmark.run.measure_readers", lambda *_: {"readers": []})
    seen = []

    def on_progress(found):
        assert found["finished"] is False
        seen.append((len(found["front_end"]), len(found["cells"]), found["readers"] is not None))

    preset = dataclasses.replace(find_preset("tiny"), video_seconds=1.0)
    found = run_preset(preset, torch.device("cpu"), "stts-hf bench", on_progress=on_progress)
    assert seen == [(1, 0, False), (1, 1, False), (1, 2, False), (1, 2, True)]
    assert found["finished"] is True


def test_the_page_of_a_run_that_died_can_be_drawn(tmp_path, ends_after_one):
    ends_after_one(TypeError("late"))
    with pytest.raises(TypeError):
        main(["bench", "--preset", "tower", "--device", "cpu", "--output", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["unfinished.json"]
    assert main(["bench", "--render", "--output", str(tmp_path)]) == 0
    page = (tmp_path / "README.md").read_text()
    assert "after 1 of 2 workloads" in page
    assert "raw samples in `unfinished.json`" in page
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "plot.png", "unfinished.json"]


def test_a_finished_run_takes_the_place_of_an_unfinished_one(tmp_path):
    output.write_result(result([pruned_twice()], finished=False, workloads=2), tmp_path)
    output.keep_unfinished(result([pruned_twice()], finished=False, workloads=2), tmp_path)
    output.write_result(result([pruned_twice()], finished=True, workloads=1), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "plot.png", "result.json"]
    assert output.read_result(tmp_path)["finished"] is True


def test_sigterm_takes_temporary_files_along(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def measure_front_end(*_):
        with tempfile.TemporaryDirectory():
            assert [*tmp_path.iterdir()]
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)

    monkeypatch.setattr("stts_hf.benchmark.run.measure_front_end", measure_front_end)

    # Should the command not take the signal, this test fails and not the process that runs it.
    def missed(*_):
        raise AssertionError("SIGTERM was not taken")

    before = signal.signal(signal.SIGTERM, missed)
    try:
        with pytest.raises(SystemExit) as ended:
            main(["bench", "--device", "cpu"])
        assert signal.getsignal(signal.SIGTERM) is missed
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 128 + signal.SIGTERM
    assert [*tmp_path.iterdir()] == []
