"""What the raw samples say: medians, spread, speed-up, the ideal that FLOPs imply, and where pruning breaks even."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from stts_hf.benchmark.measure import STOCK
from stts_hf.benchmark.stages import TOTAL


def median(samples: Sequence[float]) -> float:
    """The median. Raises `ValueError` for no samples."""
    if not samples:
        raise ValueError("`samples` is empty, but a median needs at least one.")
    return statistics.median(samples)


def interquartile_range(samples: Sequence[float]) -> float:
    """Distance between the quartiles, which are interpolated between samples; 0 for a single one."""
    if len(samples) < 2:
        return 0.0
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return high - low


def speed_up(stock: Sequence[float], other: Sequence[float]) -> float:
    """How many times faster than `stock`: the ratio of medians."""
    return median(stock) / median(other)


def summarise(cell: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """
    For each variant of a cell and each of its stages: `median` and `spread` (IQR) in seconds, `flops`, `speed_up` over
    stock, `ideal` (the ratio of FLOPs) and `share` of the ideal that was reached. What cannot be said is None: there is
    no speed-up without stock, and no ideal for a stage without matrix products.
    """
    measured = {variant["name"]: variant for variant in cell["variants"] if variant["status"] == "ok"}
    stock = measured.get(STOCK, {"stages": {}})["stages"]
    summary: dict[str, dict[str, dict[str, Any]]] = {}
    for name, variant in measured.items():
        stages = summary[name] = {}
        for stage, found in variant["stages"].items():
            gain = ideal = None
            if stage in stock:
                gain = speed_up(stock[stage]["seconds"], found["seconds"])
                if found["flops"] and stock[stage]["flops"]:
                    ideal = stock[stage]["flops"] / found["flops"]
            stages[stage] = {
                "median": median(found["seconds"]),
                "spread": interquartile_range(found["seconds"]),
                "flops": found["flops"],
                "speed_up": gain,
                "ideal": ideal,
                "share": gain / ideal if gain is not None and ideal is not None else None,
            }
    return summary


def crossing(points: Sequence[tuple[float, float]], level: float = 1.0) -> float | None:
    """
    The `x` from which on the line through `points` (x ascending, y) stays at `level` or above, by interpolation between
    neighbours; the first `x` where it never is below, None where it ends below.
    """
    reached: float | None = None
    before = None
    for x, y in points:
        if y < level:
            reached = None
        elif reached is None:
            reached = x if before is None else before[0] + (level - before[1]) * (x - before[0]) / (y - before[1])
        before = (x, y)
    return reached


def break_even_ratio(cell: Mapping[str, Any]) -> float | None:
    """The smallest pruning ratio at which a pass takes no longer than stock's, between those measured; or None."""
    summary = summarise(cell)
    points = []
    for variant in cell["variants"]:
        if variant["name"] in summary and variant["name"] != STOCK:
            gain = summary[variant["name"]][TOTAL]["speed_up"]
            if gain is not None:
                points.append((variant["pruning_ratio"], gain))
    return crossing(sorted(points))


def break_even_frames(cells: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """The number of frames from which variant `name` takes no longer than stock, over cells that differ in frames."""
    points = []
    for cell in cells:
        gain = summarise(cell).get(name, {}).get(TOTAL, {}).get("speed_up")
        if gain is not None:
            points.append((cell["workload"]["frames"], gain))
    return crossing(sorted(points))


def end_to_end(before_model: float, stock_seconds: float, other_seconds: float) -> float:
    """Speed-up of the whole way where `before_model` seconds of decoding and preprocessing come first on both sides."""
    return (before_model + stock_seconds) / (before_model + other_seconds)
