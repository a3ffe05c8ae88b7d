"""Progress of commands where nobody sees a bar, and how many threads they compute with."""

import io
import re
import sys
from types import SimpleNamespace

import pytest
import torch

from stts_hf.cli import progress
from stts_hf.cli.checkpoint_options import SMALL, use_one_thread
from stts_hf.cli.options import FORMATS
from stts_hf.modeling import video_reading_stts


def test_a_log_gets_a_line_now_and_then_with_rate_and_time_left(monkeypatch, capsys):
    clock = iter([0.0, 5.0, 10.0, 40.0, 69.0, 70.0, 100.0])
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(clock))
    bar = progress.progress_bar(106, "row", done=100)
    with bar:
        for _ in range(6):
            bar.update()
    lines = capsys.readouterr().err.splitlines()
    # 5 s a row, then 14 s; the last row needs no line.
    assert lines == [
        "  102 of 106 rows, 0.2 per second, 0:00:20 left",
        "  105 of 106 rows, 0.0714 per second, 0:00:14 left",
    ]


def test_a_terminal_gets_a_bar(monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := io.StringIO())
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    with progress.progress_bar(2, "row") as bar:
        bar.update()
    assert "row" in terminal.getvalue()


@pytest.fixture
def two_threads(monkeypatch):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def model(device: str = "cpu", size: int = SMALL - 1) -> SimpleNamespace:
    return SimpleNamespace(device=torch.device(device), num_parameters=lambda: size)


def test_a_small_model_on_a_cpu_gets_one_thread_and_it_is_said(two_threads, capsys):
    use_one_thread(model())
    assert torch.get_num_threads() == 1
    assert re.search(r"one CPU thread.*OMP_NUM_THREADS", capsys.readouterr().err)


@pytest.mark.parametrize("other", [model("meta"), model(size=SMALL)], ids=["device", "size"])
def test_other_models_keep_their_threads(two_threads, other, capsys):
    use_one_thread(other)
    assert torch.get_num_threads() == 2
    assert capsys.readouterr().err == ""


def test_what_the_user_set_stays(two_threads, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    use_one_thread(model())
    assert torch.get_num_threads() == 2


def test_the_formats_that_are_let_through_before_pytorch_are_those_that_are_read():
    assert FORMATS == video_reading_stts._FORMATS
