"""How a run of `stts-hf bench` ends: its exit status, and where it leaves what it measured."""

import json
import os

import pytest

from stts_hf.cli.main import main
from tests.stts_hf.benchmark.made_up import pruned_twice


@pytest.fixture
def measured(monkeypatch):
    """Replaces measuring by what it is called with: cells, or an error."""

    def install(outcome) -> None:
        def measure_workloads(*arguments):
            if isinstance(outcome, Exception):
                raise outcome
            yield from outcome

        monkeypatch.setattr("stts_hf.benchmark.run.measure_workloads", measure_workloads)

    return install


TOWER = ("bench", "--preset", "tower", "--device", "cpu")


def failing(cell: dict) -> dict:
    for variant in cell["variants"]:
        variant |= {"status": "failed", "reason": "RuntimeError: no kernel"}
    return cell


@pytest.mark.parametrize(
    "cell",
    [
        failing(pruned_twice()),
        pruned_twice() | {"status": "failed", "reason": "RuntimeError: no kernel", "variants": []},
    ],
    ids=["every variant", "the cell"],
)
def test_a_run_without_a_single_figure_ends_with_status_1(capsys, tmp_path, measured, cell):
    measured([cell])
    assert main([*TOWER, "--output", str(tmp_path)]) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(errors) == 1
    assert errors[0].startswith("stts-hf bench: error: nothing could be measured in 1 workload; tower, 8 frames")
    assert errors[0].endswith(": failed (RuntimeError: no kernel)")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "plot.png", "result.json"]


def test_one_figure_among_failures_is_a_result(tmp_path, measured):
    measured([failing(pruned_twice()), pruned_twice()])
    assert main([*TOWER, "--output", str(tmp_path)]) == 0


def test_an_error_within_a_pass_is_not_the_users_mistake(tmp_path, measured):
    measured(ValueError("a wrong shape"))
    with pytest.raises(ValueError, match="a wrong shape"):
        main([*TOWER, "--output", str(tmp_path)])


def test_a_preset_writes_to_a_folder_of_its_name_and_says_so(capsys, tmp_path, monkeypatch, measured):
    monkeypatch.chdir(tmp_path)
    measured([pruned_twice()])
    assert main([*TOWER]) == 0
    folder = tmp_path / "outputs" / "bench" / "tower"
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "plot.png", "result.json"]
    said = [
        line
        for line in capsys.readouterr().err.splitlines()
        if line.endswith(os.path.join("outputs", "bench", "tower"))
    ]
    assert len(said) == 2  # before and after
    assert "--output" not in json.loads((folder / "result.json").read_text())["command"]


def test_tiny_and_a_named_folder_write_nowhere_else(tmp_path, monkeypatch, measured):
    monkeypatch.chdir(tmp_path)
    measured([pruned_twice()])
    assert main(["bench", "--modes", "tower", "--device", "cpu"]) == 0
    assert [*tmp_path.iterdir()] == []
    assert main([*TOWER, "--output", "elsewhere"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]
