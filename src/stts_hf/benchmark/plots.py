"""The result as pictures: speed-up against its ideal, where the time goes, cost per frame, readers."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from stts_hf.benchmark.findings import paper_rows
from stts_hf.benchmark.measure import STOCK
from stts_hf.benchmark.stages import (
    BACKWARD,
    CONNECTOR,
    FORWARD,
    LANGUAGE_MODEL,
    OPTIMISER,
    SEQUENCE,
    TOTAL,
    VISION_TOWER,
)
from stts_hf.benchmark.statistics import median, summarise

PARTS = (VISION_TOWER, CONNECTOR, SEQUENCE, LANGUAGE_MODEL, FORWARD, BACKWARD, OPTIMISER)
COLOURS = dict(zip(PARTS, ("#3b6ea5", "#6fa8a0", "#d9a441", "#b5533c", "#7f6bb0", "#4d3f78", "#9a9a9a"), strict=True))


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Writes a PNG with what the result has to show."""
    measured = [cell for cell in result["cells"] if cell["status"] == "ok"]
    cells = [cell for cell in measured if STOCK in summarise(cell)]
    panels: list[Callable[[Axes], None]] = []
    if cells and _is_scaling(cells):
        panels.append(lambda axes: _cost_per_frame(axes, measured))  # stock may not fit where pruned videos do
        panels.append(lambda axes: _shares(axes, cells))
    elif cells:
        panels.append(lambda axes: _speed_ups(axes, cells, result))
        panels.append(lambda axes: _stage_bars(axes, cells))
    if result.get("readers"):
        panels.append(lambda axes: _readers(axes, result["readers"]))
    figure, axes = plt.subplots(1, max(len(panels), 1), figsize=(7 * max(len(panels), 1), 4.8), squeeze=False)
    for panel, place in zip(panels, axes[0], strict=False):
        panel(place)
        place.spines[["top", "right"]].set_visible(False)
    device = result["machine"].get("gpu", result["machine"]["cpu"])
    figure.suptitle(f"stts-hf bench --preset {result['preset']} ({device})", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110, format="png")
    plt.close(figure)


def _is_scaling(cells: list[Mapping[str, Any]]) -> bool:
    return len({cell["workload"]["frames"] for cell in cells}) >= 3


def _short(cell: Mapping[str, Any]) -> str:
    workload = cell["workload"]
    rows = f"{workload['batch']} x " if workload["batch"] > 1 else ""
    plain = {"varlen": "", "first_fit_descending": ", FFD"}[workload["layout"]]
    backend = "" if workload["backend"] == "sdpa" else f", {workload['backend']}"
    return f"{workload['mode']}, {rows}{workload['frames']} frames{plain}{backend}"


def _points(cell: Mapping[str, Any], value: str) -> tuple[list[float], list[float]]:
    summary = summarise(cell)
    points = sorted(
        (variant["pruning_ratio"], summary[variant["name"]][TOTAL][value])
        for variant in cell["variants"]
        if variant["name"] in summary and variant["name"] != STOCK and summary[variant["name"]][TOTAL][value]
    )
    return [100 * ratio for ratio, _ in points], [gain for _, gain in points]


def _speed_ups(axes: Axes, cells: list[Mapping[str, Any]], result: Mapping[str, Any]) -> None:
    colours = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    for cell, colour in zip(cells, colours * len(cells), strict=False):
        axes.plot(*_points(cell, "speed_up"), "o-", color=colour, label=_short(cell))
        axes.plot(*_points(cell, "ideal"), "_", color=colour, markersize=14, markeredgewidth=2)
        if result["preset"] == "paper":
            size = cell["workload"]["frames"] * cell["workload"]["batch"]
            theirs = [row for row in paper_rows(cells) if row[:2] == (cell["workload"]["mode"], size)]
            axes.plot([100 * row[2] for row in theirs], [row[3] for row in theirs], "x", color=colour)
    axes.axhline(1, color="#999999", linewidth=0.8)
    axes.plot([], [], "_", color="black", markersize=14, markeredgewidth=2, label="FLOP ideal")
    if result["preset"] == "paper":
        axes.plot([], [], "x", color="black", label="paper")
    axes.set(xlabel="pruning ratio, %", ylabel="speed-up over stock Molmo2", title="Speed-up")
    axes.set_ylim(bottom=min(0.8, axes.get_ylim()[0]))
    axes.legend(fontsize=8)


def _stage_bars(axes: Axes, cells: list[Mapping[str, Any]]) -> None:
    labels, left = [], []
    widths: dict[str, list[float]] = {part: [] for part in PARTS}
    for cell in cells:
        summary = summarise(cell)
        whole = summary[STOCK][TOTAL]["median"]
        for name, stages in summary.items():
            labels.append(f"{_short(cell)}: {'stock' if name == STOCK else 'k = ' + name}")
            for part in PARTS:
                widths[part].append(stages[part]["median"] / whole if part in stages else 0.0)
    left = [0.0] * len(labels)
    places = list(range(len(labels)))[::-1]
    for part in PARTS:
        if any(widths[part]):
            axes.barh(places, widths[part], left=left, color=COLOURS[part], label=part.replace("_", " "))
            left = [start + width for start, width in zip(left, widths[part], strict=True)]
    axes.set_yticks(places, labels, fontsize=7 if len(labels) > 12 else 8)
    axes.set(xlabel="time, in parts of stock's total", title="Where the time goes")
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=4, frameon=False)


def _cost_per_frame(axes: Axes, cells: list[Mapping[str, Any]]) -> None:
    names = dict.fromkeys(name for cell in cells for name in summarise(cell))
    for name in names:
        points = sorted(
            (
                cell["workload"]["frames"] * cell["workload"]["batch"],
                1000
                * summarise(cell)[name][TOTAL]["median"]
                / (cell["workload"]["frames"] * cell["workload"]["batch"]),
            )
            for cell in cells
            if name in summarise(cell)
        )
        label = "stock Molmo2" if name == STOCK else f"k = {name}"
        axes.plot([frames for frames, _ in points], [cost for _, cost in points], "o-", label=label)
    _frames_axis(axes, cells)
    axes.set(xlabel="frames", ylabel="ms per frame", title="Cost per frame")
    axes.legend(fontsize=8)


def _frames_axis(axes: Axes, cells: list[Mapping[str, Any]]) -> None:
    frames = sorted({cell["workload"]["frames"] * cell["workload"]["batch"] for cell in cells})
    axes.set_xscale("log", base=2)
    axes.set_xticks(frames, [str(count) for count in frames])
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])


def _shares(axes: Axes, cells: list[Mapping[str, Any]]) -> None:
    names = dict.fromkeys(name for cell in cells for name in summarise(cell) if name != STOCK)
    for name in names:
        points = [
            (cell["workload"]["frames"] * cell["workload"]["batch"], summarise(cell)[name][TOTAL])
            for cell in sorted(cells, key=lambda cell: cell["workload"]["frames"] * cell["workload"]["batch"])
            if name in summarise(cell)
        ]
        frames = [count for count, _ in points]
        (line,) = axes.plot(frames, [total["speed_up"] for _, total in points], "o-", label=f"k = {name}")
        axes.plot(frames, [total["ideal"] for _, total in points], "--", color=line.get_color(), label="FLOP ideal")
    axes.axhline(1, color="#999999", linewidth=0.8)
    _frames_axis(axes, cells)
    axes.set(xlabel="frames", ylabel="speed-up over stock Molmo2", title="Speed-up")
    axes.legend(fontsize=8)


def _readers(axes: Axes, readers: Mapping[str, Any]) -> None:
    names = [reader["name"] for reader in readers["readers"]]
    seconds = [median(reader["seconds"]) for reader in readers["readers"]]
    places = list(range(len(names)))[::-1]
    bars = axes.barh(places, seconds, color="#3b6ea5")
    memory = [max(reader["peak_memory"]) / 1e6 for reader in readers["readers"]]
    texts = [f"{taken:.2f} s, {peak:.0f} MB" for taken, peak in zip(seconds, memory, strict=True)]
    axes.bar_label(bars, labels=texts, padding=4, fontsize=8)
    axes.set_yticks(places, names, fontsize=8)
    axes.set_xlim(0, 1.35 * max(seconds))
    axes.set(xlabel="seconds", title=f"{readers['frames']} frames of {readers['video']['seconds'] / 60:.0f} minutes")
