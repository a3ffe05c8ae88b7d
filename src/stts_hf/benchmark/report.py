"""A result's folder: `result.json` with the raw samples, and one table and one plot that are worked out from them."""

import dataclasses
import importlib.util
import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils.benchmark import Measurement, TaskSpec

from stts_hf.benchmark.meters import STAGES, TOTAL
from stts_hf.checkpoints.atomic_folder import atomic_file

SCHEMA = 2
RESULT, UNFINISHED, PAGE, PLOT = "result.json", "unfinished.json", "README.md", "plot.png"

# Supplement, "Detailed Throughput Tables", Molmo2-4B, 8 H100: (mode, frames in a batch) to speed-ups over
# the paper's own system without pruning. The batches per second printed beside the 1.88x in training make it 1.78x.
PAPER_SPEED_UPS = {
    ("training", 128): {0.3: 1.28, 0.4: 1.44, 0.5: 1.62},
    ("training", 256): {0.3: 1.48, 0.4: 1.88, 0.5: 2.25},
    ("inference", 128): {0.3: 1.14, 0.4: 1.30, 0.5: 1.61},
    ("inference", 256): {0.3: 1.45, 0.4: 1.71, 0.5: 2.22},
}

LEGEND = """\
Times are medians ± interquartile range of the timed passes, in ms; behind them the speed-up over the first column (the
ratio of medians), and "of" its FLOP ideal: the first column's FLOPs over this one's, by `torch.utils.flop_counter`
(matrix products and attention; nothing for norms, activations, sorting and copying), with the share of it that was
reached. Memory is the most that a pass holds beyond weights, inputs and the optimiser's state; of a reader, beyond what
its process holds after its imports. [Benchmarks](../README.md) says what the stages are."""


def check_folder(folder: Path) -> None:
    """
    Raises `ValueError` without matplotlib, or where a result in `folder` would replace files that no benchmark of this
    version wrote.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("writing a result draws a plot, which needs matplotlib: pip install 'stts-hf[bench]'")
    if any(os.path.lexists(folder / name) for name in (RESULT, UNFINISHED, PAGE, PLOT)):
        try:
            read_result(folder)
        except ValueError as error:
            raise ValueError(f"--output {folder} holds files that would be replaced; name another: {error}") from error


def write_samples(result: Mapping[str, Any], folder: Path) -> None:
    """Writes `result.json`, or `unfinished.json` beside any result of an earlier run, whole or not at all."""
    with atomic_file(folder / (RESULT if result["finished"] else UNFINISHED)) as new:
        new.write_text(json.dumps(result, indent=1) + "\n")


def write_result(result: Mapping[str, Any], folder: Path) -> None:
    """
    Writes JSON, page and picture into `folder`, each whole or not at all; with a finished result, what an unfinished
    run left goes. Other files stay. Raises `ImportError` without matplotlib.
    """
    with atomic_file(folder / PLOT) as new:
        draw(result, new)
    with atomic_file(folder / PAGE) as new:
        new.write_text(page(result))
    write_samples(result, folder)
    if result["finished"]:
        (folder / UNFINISHED).unlink(missing_ok=True)


def read_result(folder: Path) -> dict[str, Any]:
    """
    The result in `folder`; without one what a run that did not finish left. Raises `ValueError` where there is neither,
    or one of another schema.
    """
    path = next((folder / name for name in (RESULT, UNFINISHED) if (folder / name).exists()), folder / RESULT)
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a benchmark's result: {error}") from error
    if not isinstance(result, dict) or result.get("schema") != SCHEMA:
        raise ValueError(f"{path} has another schema than {SCHEMA}; measure again")
    return result


def page(result: Mapping[str, Any]) -> str:
    """The page as it stands in a folder, with the picture."""
    return markdown(result) + f"\n![plot]({PLOT})\n"


@dataclasses.dataclass(frozen=True)
class Summary:
    """Median and interquartile range in seconds. None is what cannot be said: of the baseline, or without FLOPs."""

    median: float
    iqr: float
    speed_up: float | None
    ideal: float | None

    @property
    def share(self) -> float | None:
        """Speed-up over its ideal."""
        return self.speed_up / self.ideal if self.speed_up and self.ideal else None


def summarise(cell: Mapping[str, Any]) -> dict[str, dict[str, Summary]]:
    """Each stage of each variant that was measured, compared with the cell's first variant."""
    baseline: dict[str, tuple[float, float | None]] = {}
    summary: dict[str, dict[str, Summary]] = {}
    for number, variant in enumerate(cell["variants"]):
        if variant["status"] != "ok":
            continue
        summary[variant["name"]] = {}
        for stage, found in variant["stages"].items():
            measured = Measurement(1, found["seconds"], TaskSpec(stmt=stage, setup=""))
            seconds, flops = baseline.get(stage, (None, None))
            if number == 0:
                baseline[stage] = (measured.median, found["flops"])
            summary[variant["name"]][stage] = Summary(
                measured.median,
                measured.iqr,
                seconds / measured.median if seconds else None,
                flops / found["flops"] if flops and found["flops"] else None,
            )
    return summary


def nothing_measured(result: Mapping[str, Any]) -> str | None:
    """Why a result has not a single figure; None where it has one, or was to have none."""
    if any(variant["status"] == "ok" for cell in result["cells"] for variant in cell["variants"]):
        return None
    return next((f"nothing could be measured; {reason}" for reason in _failures(result["cells"])), None)


def markdown(result: Mapping[str, Any]) -> str:
    """The page for a result, ending in a newline."""
    machine = result["machine"]
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, "
    where += f"{machine['memory'] / 2**30:.0f} GiB"
    if "gpu" in machine:
        where += f"; {machine['gpu']}, {machine['gpu_memory'] / 2**30:.0f} GiB, CUDA {machine['cuda']}"
    load = f"load average {machine['load_before']:.1f} before and {machine['load_after']:.1f} after"
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if version)
    parts = [
        f"# stts-hf bench: {result['preset']}",
        f"Made by `{result['command']}` from the raw samples beside this page.",
        f"{result['started']}, {result['seconds'] / 60:.1f} minutes, {machine['device']}: {where}; {load}. {versions}.",
        table(result["cells"]),
        *_failures(result["cells"]),
        LEGEND,
    ]
    if not result["finished"]:
        parts.insert(1, f"**Unfinished**: the run ended after {len(result['cells'])} of its workloads.")
    return "\n\n".join(parts) + "\n"


def table(cells: Sequence[Mapping[str, Any]]) -> str:
    """One row for each figure of each cell, one column for each variant."""
    names = list(dict.fromkeys(variant["name"] for cell in cells for variant in cell["variants"]))
    lines = [["", *map(_label, names)], ["---", *["---:"] * len(names)]]
    for cell in cells:
        summary, variants = summarise(cell), {variant["name"]: variant for variant in cell["variants"]}
        rounds = f", {len(cell['order'])} rounds" if "order" in cell else ""
        states = [variants[name]["status"] if name in variants else "" for name in names]
        lines.append([f"**{cell['title']}**{rounds}", *("" if state == "ok" else state for state in states)])
        for stage in STAGES:
            texts = [_time(summary.get(name, {}).get(stage)) for name in names]
            if any(texts):
                lines.append([stage.replace("_", " "), *texts])
        figures = [_figures(cell, variants[name], summary[name]) if name in summary else {} for name in names]
        for row in dict.fromkeys(row for found in figures for row in found):
            lines.append([row, *(str(found.get(row, "")) for found in figures)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _time(found: Summary | None) -> str:
    if found is None:
        return ""
    text = f"{_milliseconds(found.median)} ± {_milliseconds(found.iqr)}"
    if found.speed_up is None:
        return text
    ideal = f" of {found.ideal:.3f} ({found.share:.1%})" if found.ideal and found.share else ""
    return f"{text}, {found.speed_up:.3f}x{ideal}"


def _milliseconds(seconds: float) -> str:
    value = 1000 * seconds
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _figures(cell: Mapping[str, Any], variant: Mapping[str, Any], stages: Mapping[str, Summary]) -> dict[str, Any]:
    """What is known of a variant besides its times."""
    figures: dict[str, Any] = {"memory, MiB": f"{variant['peak_memory'] / 2**20:.4g}"}
    if flops := variant["stages"][TOTAL]["flops"]:
        figures["GFLOP"] = f"{flops / 1e9:.4g}"
    if workload := cell.get("workload"):
        figures["frames/s"] = f"{workload['frames'] * workload['batch'] / stages[TOTAL].median:.3g}"
        figures["tokens of a row"] = variant["tokens"]
    if motion := variant.get("motion"):
        figures["correlation with motion"] = _median(motion["correlation"])
        figures["kept of what moves"] = _median(motion["kept"], ".0%")
    for same in ("same_frames", "same_tokens"):
        if same in variant:
            figures[same.replace("_", " ")] = {True: "yes", False: "**no**", None: ""}[variant[same]]
    if paper := _paper_speed_up(cell, variant):
        figures["speed-up in the paper"] = paper
    return figures


def _median(values: Sequence[float], form: str = ".2f") -> str:
    """Median and extremes of what is a number."""
    known = sorted(value for value in values if not math.isnan(value))
    low, middle, high = (format(value, form) for value in (known[0], statistics.median(known), known[-1]))
    return f"{middle} ({low} to {high}, {len(known)} clips)"


def _paper_speed_up(cell: Mapping[str, Any], variant: Mapping[str, Any]) -> float | None:
    workload = cell.get("workload")
    if not workload or workload["geometry"] != "molmo2-4b":
        return None
    of_paper = PAPER_SPEED_UPS.get((workload["mode"], workload["frames"] * workload["batch"]), {})
    return of_paper.get(variant["pruning_ratio"])


def _failures(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Why variants have no figures, or no FLOPs."""
    lines = []
    for cell in cells:
        for found in [cell, *cell["variants"]]:
            name = cell["title"] if found is cell else f"{cell['title']}, {_label(found['name'])}"
            if found["status"] != "ok":
                lines.append(f"{name}: {found['status']} ({found['reason']}).")
            elif found.get("not_counted"):
                lines.append(f"{name}: FLOPs were not counted; {found['not_counted']}.")
    return lines


def _label(name: str) -> str:
    return f"k = {name}" if name.replace(".", "").isdigit() else name


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Writes a PNG: a bar for the total speed-up of each variant, with marks at its FLOP ideal and in the paper."""
    from matplotlib.figure import Figure

    labels, speed_ups, ideals, papers = [], [], [], []
    words = [cell["title"].split(", ") for cell in result["cells"]]
    shared = set.intersection(*map(set, words))
    for cell, own in zip(result["cells"], words, strict=True):
        summary = summarise(cell)
        for variant in cell["variants"][1:]:
            total = summary.get(variant["name"], {}).get(TOTAL)
            if total is not None and total.speed_up:
                labels.append(", ".join([word for word in own if word not in shared] + [_label(variant["name"])]))
                speed_ups.append(total.speed_up)
                ideals.append(total.ideal)
                papers.append(_paper_speed_up(cell, variant))
    figure = Figure(figsize=(9, 1.5 + 0.3 * len(labels)), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(range(len(labels)), speed_ups, color="#3b6ea5")
    axes.bar_label(bars, fmt="%.2f", label_type="center", color="white", fontsize=8)
    for marks, sign, name in ((ideals, "|", "FLOP ideal"), (papers, "x", "paper")):
        places = [(value, place) for place, value in enumerate(marks) if value]
        if places:
            axes.plot(*zip(*places, strict=True), sign, color="black", markersize=12, label=name)
            axes.legend(fontsize=8)
    axes.axvline(1, color="#999999", linewidth=0.8)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="speed-up of the total")
    figure.suptitle(f"{result['preset']} ({result['machine'].get('gpu', 'CPU')})")
    if shared:  # what all bars are of stands once, above them
        axes.set_title(", ".join(word for word in words[0] if word in shared), fontsize=8, loc="left")
    figure.savefig(path, dpi=110, format="png", bbox_inches="tight")
