"""The picture draws every figure that was measured."""

import pytest
from matplotlib import pyplot as plt

from stts_hf.benchmark.plots import draw
from tests.stts_hf.benchmark.made_up import cell, result, variant


@pytest.fixture
def panels(tmp_path, monkeypatch):
    """Draws a result; returns its panels by their titles."""
    monkeypatch.setattr(plt, "close", lambda figure: None)

    def panels(*arguments):
        draw(result(*arguments), tmp_path / "plot.png")
        return {axes.get_title(): axes for axes in plt.gcf().axes}

    yield panels
    monkeypatch.undo()
    plt.close("all")


def test_cost_per_frame_is_drawn_where_stock_did_not_fit(panels):
    cells = [
        cell([variant(None, {"total": ([stock], 2)}), variant(0.5, {"total": ([stock / 2], 1)})], frames=frames)
        for frames, stock in ((8, 8.0), (16, 16.0), (32, 32.0), (64, 64.0))
    ]
    cells[3]["variants"][0] = {"name": "stock", "pruning_ratio": None, "status": "out of memory", "reason": "1 TB"}
    drawn = panels(cells, "scaling")
    lines = {line.get_label(): list(line.get_xdata()) for line in drawn["Cost per frame"].get_lines()}
    assert lines == {"stock Molmo2": [8, 16, 32], "k = 0.5": [8, 16, 32, 64]}
    assert [list(line.get_xdata()) for line in drawn["Speed-up"].get_lines()[:1]] == [[8, 16, 32]]
