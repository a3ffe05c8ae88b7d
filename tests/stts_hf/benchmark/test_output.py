"""What a run of `stts-hf bench` leaves behind, how it ends, and what it refuses to replace."""

import json

import pytest

from stts_hf.benchmark import report
from stts_hf.cli.main import main
from tests.stts_hf.benchmark.made_up import pruned_twice, result

TOWER = ("bench", "--preset", "tower", "--device", "cpu")
WRITTEN = ["README.md", "result.json"]


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def measured(monkeypatch):
    """Replaces measuring by cells, and by an error after them."""

    def install(cells: list[dict], error: BaseException | None = None) -> None:
        def measure_workloads(*arguments):
            yield from cells
            if error is not None:
                raise error

        monkeypatch.setattr("stts_hf.benchmark.measure.measure_workloads", measure_workloads)

    return install


def failing(cell: dict) -> dict:
    return cell | {"variants": [{**found, "status": "failed", "reason": "no kernel"} for found in cell["variants"]]}


@pytest.mark.parametrize("error", [TypeError, KeyboardInterrupt])
def test_a_run_that_dies_keeps_what_it_measured_beside_what_was_there(tmp_path, measured, error):
    report.write_result(result([pruned_twice()]), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    measured([pruned_twice()], error("late"))
    if error is KeyboardInterrupt:
        assert main([*TOWER, "--output", str(tmp_path)]) == 130
    else:
        with pytest.raises(error, match="late"):
            main([*TOWER, "--output", str(tmp_path)])
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    kept = json.loads(after.pop("unfinished.json"))
    assert after == before
    assert (kept["finished"], len(kept["cells"])) == (False, 1)


def test_a_run_without_a_single_figure_ends_with_status_1(capsys, tmp_path, measured):
    measured([failing(pruned_twice())])
    assert main([*TOWER, "--output", str(tmp_path)]) == 1
    assert "stts-hf bench: error: nothing could be measured; tower, 8 frames" in capsys.readouterr().err
    assert names(tmp_path) == WRITTEN


def test_a_preset_writes_to_a_folder_of_its_name_and_replaces_no_result(tmp_path, monkeypatch, measured):
    monkeypatch.chdir(tmp_path)
    measured([pruned_twice()])
    for _ in range(2):
        assert main([*TOWER]) == 0
    assert names(tmp_path / "outputs" / "bench") == ["tower", "tower-2"]
    assert names(tmp_path / "outputs" / "bench" / "tower-2") == WRITTEN


@pytest.mark.parametrize(
    ("name", "content"), [("README.md", "{}"), ("result.json", "[]"), ("result.json", '{"schema": 1}')]
)
def test_files_that_no_benchmark_wrote_are_not_replaced(capsys, tmp_path, name, content):
    (tmp_path / name).write_text(content)
    assert main([*TOWER, "--output", str(tmp_path)]) == 2
    assert "holds files that would be replaced; name another: " in capsys.readouterr().err
    assert (tmp_path / name).read_text() == content
