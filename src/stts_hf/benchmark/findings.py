"""What a result means: where pruning does not pay, where it breaks even, and the paper's rows beside ours."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from stts_hf.benchmark.measure import STOCK, variant_name
from stts_hf.benchmark.paper import SPEED_UPS
from stts_hf.benchmark.stages import DECODE_TOKEN, SELECT_AND_PACK, TOTAL, VISION_TOWER
from stts_hf.benchmark.statistics import (
    break_even_frames,
    break_even_ratio,
    end_to_end,
    median,
    summarise,
)

MOST_SELECT_AND_PACK = 0.02  # of the vision tower's time


def verdicts(result: Mapping[str, Any]) -> list[str]:
    """Sentences on where pruning pays and where it does not, from the result's own samples."""
    lines: list[str] = []
    for cell in result["cells"]:
        lines += _of_cell(cell, result.get("front_end", []))
    return lines + _over_frames(result["cells"])


def nothing_measured(result: Mapping[str, Any]) -> str | None:
    """What to say of a result none of whose workloads gave a single figure; None where one did, or there is none."""
    failures = []
    for cell in result["cells"]:
        if cell["status"] != "ok":
            failures.append((cell["title"], cell))
        for variant in cell["variants"]:
            if variant["status"] == "ok":
                return None
            failures.append((f"{cell['title']}, {variant['name']}", variant))
    if not failures:
        return None
    what, failure = failures[0]
    count = f"{len(result['cells'])} workload{'s' * (len(result['cells']) > 1)}"
    return f"nothing could be measured in {count}; {what}: {failure['status']} ({failure['reason']})"


def _of_cell(cell: Mapping[str, Any], front_end: Sequence[Mapping[str, Any]]) -> list[str]:
    summary = summarise(cell)
    title, lines = cell["title"], []
    packing = {
        name: stages[SELECT_AND_PACK]["median"] / stages[VISION_TOWER]["median"]
        for name, stages in summary.items()
        if SELECT_AND_PACK in stages
    }
    too_long = [f"k = {name}: {_above(share)}" for name, share in packing.items() if share > MOST_SELECT_AND_PACK]
    if too_long:
        limit = f"{MOST_SELECT_AND_PACK:.0%}"
        lines.append(
            f"**Select and pack takes more than {limit} of the vision tower** ({title}): {'; '.join(too_long)}."
        )
    if STOCK not in summary:
        return lines
    stock = summary[STOCK]
    losing = []
    for name, stages in summary.items():
        gain = stages[TOTAL]["speed_up"]
        if name != STOCK and gain is not None and gain < 1:
            losing.append(f"k = {name}: {gain:.3f}x" + (f", {1 / gain - 1:.1%} over stock" if name == "0" else ""))
    if losing:
        lines.append(f"**Does not pay** ({title}): " + "; ".join(losing) + ".")
    if len(cell["workload"]["ratios"]) > 1:
        ratio = break_even_ratio(cell)
        where = "none of the measured ratios reaches stock" if ratio is None else f"k = {ratio:.2f}"
        smallest = " (the smallest measured)" if ratio == min(cell["workload"]["ratios"]) else ""
        lines.append(f"Break-even ratio ({title}): {where}{smallest}.")
    best = max(
        (name for name in summary if name != STOCK), default=None, key=lambda name: summary[name][TOTAL]["speed_up"]
    )
    if best is None:
        return lines
    fastest = summary[best]
    if DECODE_TOKEN in stock:
        saved = stock[TOTAL]["median"] - fastest[TOTAL]["median"]
        extra = fastest[DECODE_TOKEN]["median"] - stock[DECODE_TOKEN]["median"]
        spread = max(fastest[DECODE_TOKEN]["spread"], stock[DECODE_TOKEN]["spread"])
        if extra > spread and saved > 0:
            lines.append(
                f"Answer length at which the gain is used up ({title}, k = {best}): {saved / extra:.0f} tokens, at "
                f"{1000 * extra:.2f} ms more for each."
            )
    for before in front_end:
        if before["frames"] == cell["workload"]["frames"] and cell["workload"]["mode"] != "tower":
            lines.append(_with_front_end(cell, before, best, stock[TOTAL]["median"], fastest[TOTAL]["median"]))
    return lines


def _above(share: float) -> str:
    """A share above the limit with two decimals, or as many as show that it is above."""
    digits = 2
    while round(share, digits + 2) <= MOST_SELECT_AND_PACK:
        digits += 1
    return f"{share:.{digits}%}"


def _with_front_end(
    cell: Mapping[str, Any], before: Mapping[str, Any], best: str, stock_seconds: float, seconds: float
) -> str:
    ahead = median(before["decode_and_preprocess"]) * cell["workload"]["batch"]
    whole = end_to_end(ahead, stock_seconds, seconds)
    bound = "**Bound by decoding**: " if ahead > seconds else ""
    return (
        f"{bound}file to result ({cell['title']}, k = {best}): {whole:.2f}x where decoding and preprocessing "
        f"({ahead:.2f} s) come first and nothing overlaps, {stock_seconds / seconds:.2f}x without them."
    )


def _over_frames(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Break-even in frames, wherever cells differ in nothing else."""
    groups: dict[tuple, list[Mapping[str, Any]]] = {}
    for cell in cells:
        workload = {
            key: value for key, value in cell["workload"].items() if key not in ("frames", "ratios", "text_tokens")
        }
        groups.setdefault(tuple(sorted((key, str(value)) for key, value in workload.items())), []).append(cell)
    lines = []
    for group in groups.values():
        names = {variant["name"] for cell in group for variant in cell["variants"]} - {STOCK}
        for name in sorted(names):
            with_it = [cell for cell in group if name in summarise(cell) and STOCK in summarise(cell)]
            if len(with_it) < 2:
                continue
            mode, frames = with_it[0]["workload"]["mode"], break_even_frames(with_it, name)
            fewest = min(cell["workload"]["frames"] for cell in with_it)
            where = "at none of the measured counts" if frames is None else f"from {math.ceil(frames)} frames on"
            note = " (the fewest measured)" if frames == fewest else ""
            lines.append(f"Break-even in frames ({mode}, k = {name}): {where}{note}.")
    return lines


def flatness(cells: Sequence[Mapping[str, Any]], name: str, least: int = 16, most: int = 256) -> float | None:
    """Largest over smallest cost per frame of variant `name` from `least` to `most` frames; None without two cells."""
    costs = []
    for cell in cells:
        frames = cell["workload"]["frames"] * cell["workload"]["batch"]
        summary = summarise(cell)
        if name in summary and least <= frames <= most:
            costs.append(summary[name][TOTAL]["median"] / frames)
    return max(costs) / min(costs) if len(costs) > 1 else None


def paper_rows(cells: Sequence[Mapping[str, Any]]) -> list[tuple[str, int, float, float, float | None, float | None]]:
    """
    The paper's speed-ups beside ours: `(mode, frames, ratio, paper, ours, ideal)`, None where ours was not measured.

    Of several backends and layouts the fastest counts, on both sides.
    """
    rows = []
    for (mode, frames, ratio), theirs in SPEED_UPS.items():
        stock_seconds, seconds, ideals = [], [], []
        for cell in cells:
            workload = cell["workload"]
            if workload["mode"] != mode or workload["frames"] * workload["batch"] != frames:
                continue
            summary = summarise(cell)
            if STOCK in summary:
                stock_seconds.append(summary[STOCK][TOTAL]["median"])
            ours = summary.get(variant_name(ratio))
            if ours:
                seconds.append(ours[TOTAL]["median"])
                ideals.append(ours[TOTAL]["ideal"])
        ours_speed_up = min(stock_seconds) / min(seconds) if stock_seconds and seconds else None
        ideal = next((value for value in ideals if value is not None), None)
        rows.append((mode, frames, ratio, theirs, ours_speed_up, ideal))
    return rows


def best_backend_rows(cells: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, float, str, str]]:
    """
    Where several backends or layouts were measured: `(what, variant, speed-up, its backend, stock's backend)`, the
    fastest of each side.
    """
    groups: dict[tuple, list[Mapping[str, Any]]] = {}
    for cell in cells:
        workload = cell["workload"]
        key = tuple(workload[name] for name in ("mode", "geometry", "frames", "batch", "dtype", "checkpointing"))
        groups.setdefault(key, []).append(cell)
    rows = []
    for key, group in groups.items():
        if len(group) < 2:
            continue
        best: dict[str, tuple[float, str]] = {}
        for cell in group:
            how = f"{cell['workload']['backend']}, {cell['workload']['layout']}"
            for name, stages in summarise(cell).items():
                found = (stages[TOTAL]["median"], cell["workload"]["backend"] if name == STOCK else how)
                best[name] = min(best.get(name, found), found)
        if STOCK in best:
            what = f"{key[0]}, {key[3]} x {key[2]} frames, {key[1]}, {key[4]}"
            rows += [
                (what, name, best[STOCK][0] / seconds, how, best[STOCK][1])
                for name, (seconds, how) in best.items()
                if name != STOCK
            ]
    return rows
