"""The picture of a training run's results: what it says of losses, and that it never costs a run."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from stts_hf.cli import train as command
from stts_hf.cli.errors import CommandError
from stts_hf.visualize import results
from tests.checkpoints import TINY, weights_of
from tests.training_files import train, write_config, write_data

pytest.importorskip("accelerate")
VOCABULARY = 1024  # a uniform guess has ln 1024 = 6.93 nats


def test_a_loss_above_a_uniform_guess_is_called_worse_than_chance():
    (said,) = results.meanings({"task_loss": [17.2, 13.1]}, VOCABULARY)
    assert said.startswith("Task loss 17.2 to 13.1 nats per token: worse than chance; ")
    assert "ln 1,024 = 6.9" in said


def test_a_loss_below_it_is_a_probability_and_a_temporal_one_a_miss():
    task, temporal = results.meanings({"task_loss": [9.0, math.log(4)], "temporal_loss": [0.09, 0.04]}, VOCABULARY)
    assert "probability of 0.25" in task
    assert "ln 1,024 = 6.9" in task
    assert "by 0.2 " in temporal


@pytest.mark.parametrize("target", ["temporal_loss", "worth_loss"])
def test_a_rank_correlation_says_that_a_scorer_of_answers_need_not_follow_it(target):
    *_, ranked = results.meanings({target: [0.5, 0.4], "rank_correlation": [0.0, 0.82]}, VOCABULARY)
    assert ranked.startswith("Rank correlation 0.00 to 0.82 of scores with 1 - cosine similarity")
    assert ("not meant to follow" in ranked) == (target == "worth_loss")


def test_every_logged_loss_has_a_curve_over_its_steps():
    same = {"kept_share": 0.5, "rank_correlation": -0.25}
    history = [{"step": step, "task_loss": 10.0 / step, **same} for step in (1, 2, 3)]
    figure = results.curves([*history, {"step": 3, "eval_task_loss": 4.0}, {"step": 3, "train_loss": 5.0}], VOCABULARY)
    lines: dict[Any, Any] = {line.get_label(): line for axes in figure.axes for line in axes.lines}
    assert {*lines} == {"task loss", "eval task loss", "uniform guess", "kept share", "rank correlation"}
    assert lines["task loss"].get_xydata().tolist() == [[1, 10], [2, 5], [3, 10 / 3]]
    assert set(np.ravel(lines["uniform guess"].get_ydata())) == {math.log(VOCABULARY)}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Trains one step into a new folder each time; returns exit status and folder."""
    data = write_data(tmp_path_factory.mktemp("data"))

    def run() -> tuple[int, Path]:
        folder = tmp_path_factory.mktemp("run")
        return train(write_config(folder, data, folder / "out", model=TINY)), folder / "out"

    return run


@pytest.mark.slow
def test_a_run_ends_with_a_picture_and_looking_changes_no_weight(run, monkeypatch, capsys):
    status, drawn = run()
    assert status == 0
    with Image.open(drawn / "results.png") as picture:
        assert picture.height > 2 * picture.width / 3  # curves above two clips
    assert "](results.png)" in (drawn / "README.md").read_text()
    monkeypatch.setattr(command, "need_extras", refuse_drawing)
    status, plain = run()
    assert status == 0
    assert "results.png is not drawn: matplotlib is missing" in capsys.readouterr().err
    assert not (plain / "results.png").exists()
    assert "results.png" not in (plain / "README.md").read_text()
    before, after = weights_of(drawn), weights_of(plain)
    assert all(before[name].equal(after[name]) for name in before)


def refuse_drawing(what: str, *extras: str) -> None:
    if "visualize" in extras:
        raise CommandError("matplotlib is missing")


@pytest.mark.parametrize(
    ("name", "is_drawn"),
    [
        pytest.param("comparison", True, marks=pytest.mark.slow, id="after"),
        pytest.param("curves", False, id="curves"),
    ],
)
def test_what_fails_is_logged_and_the_run_is_kept(run, monkeypatch, name, is_drawn):
    said: list[str] = []

    def fail(*args, **kwargs):
        raise RuntimeError("no such ink")

    monkeypatch.setattr(results, name, fail)
    monkeypatch.setattr(results.logger, "warning", said.append)
    status, folder = run()
    assert status == 0
    assert (folder / "model.safetensors").is_file()
    assert (folder / "results.png").is_file() == is_drawn
    assert said
    assert all("not drawn: RuntimeError: no such ink" in line for line in said)
