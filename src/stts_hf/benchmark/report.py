"""A result's folder: `result.json` with the raw samples, and a page with one table that is worked out from them."""

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
RESULT, UNFINISHED, PAGE = "result.json", "unfinished.json", "README.md"

# Supplement, "Detailed Throughput Tables", Molmo2-4B, 8 H100: speed-ups over the paper's own system without pruning,
# by mode, frames in a batch and pruning ratio. The batches per second printed beside the 1.88x make it 1.78x.
PAPER_SPEED_UPS = {
    ("training", 128): {0.3: 1.28, 0.4: 1.44, 0.5: 1.62},
    ("training", 256): {0.3: 1.48, 0.4: 1.88, 0.5: 2.25},
    ("inference", 128): {0.3: 1.14, 0.4: 1.30, 0.5: 1.61},
    ("inference", 256): {0.3: 1.45, 0.4: 1.71, 0.5: 2.22},
}

# The order of the table's rows.
ROWS = [*STAGES, "memory, MiB", "GFLOP", "frames/s", "tokens of a row", "correlation with motion", "kept of what moves"]
ROWS += ["same_frames", "same_tokens", "speed-up in the paper"]

LEGEND = """\
Times are medians ± interquartile range of the timed passes, in ms; behind them the speed-up over the first column (the
ratio of medians), and "of" its FLOP ideal: the first column's FLOPs over this one's, by `torch.utils.flop_counter`
(matrix products and attention; nothing for norms, activations, sorting and copying), with the share of it that was
reached. Memory is the most that a pass holds beyond weights, inputs and the optimiser's state; of a reader, beyond what
its process holds after its imports. [Benchmarks](../README.md) says what the stages are."""


def check_folder(folder: Path) -> None:
    """Raises `ValueError` if a result in `folder` would replace files that no benchmark of this version wrote."""
    if any(os.path.lexists(folder / name) for name in (RESULT, UNFINISHED, PAGE)):
        try:
            read_result(folder)
        except ValueError as error:
            raise ValueError(f"--output {folder} holds files that would be replaced; name another: {error}") from error


def write_result(result: Mapping[str, Any], folder: Path) -> None:
    """Writes a finished result and its page; an unfinished one goes into `unfinished.json` alone."""
    with atomic_file(folder / (RESULT if result["finished"] else UNFINISHED)) as new:
        new.write_text(json.dumps(result, indent=1) + "\n")
    if result["finished"]:
        write_page(result, folder)
        (folder / UNFINISHED).unlink(missing_ok=True)


def write_page(result: Mapping[str, Any], folder: Path) -> None:
    with atomic_file(folder / PAGE) as new:
        new.write_text(markdown(result))


def read_result(folder: Path) -> dict[str, Any]:
    """The result in `folder`, or else what an unfinished run left there. Raises `ValueError` if it holds neither."""
    path = next((folder / name for name in (RESULT, UNFINISHED) if (folder / name).exists()), folder / RESULT)
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a benchmark's result: {error}") from error
    if not isinstance(result, dict) or result.get("schema") != SCHEMA:
        raise ValueError(f"{path} has another schema than {SCHEMA}; measure again")
    return result


def why_nothing_measured(result: Mapping[str, Any]) -> str | None:
    """The first failure of a result without a single figure; None if it has one, or has no cells."""
    measured = any(variant["status"] == "ok" for cell in result["cells"] for variant in cell["variants"])
    return None if measured else next(iter(_failures(result["cells"])), None)


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
    """One row per figure of each cell, one column per variant."""
    names = list(dict.fromkeys(variant["name"] for cell in cells for variant in cell["variants"]))
    lines = [["", *map(_label, names)], ["---", *["---:"] * len(names)]]
    for cell in cells:
        variants = {variant["name"]: variant for variant in cell["variants"]}
        columns = [variants.get(name, {"status": ""}) for name in names]
        timed = [len(found["seconds"]) for it in cell["variants"] for found in it.get("stages", {}).values()]
        rounds = f", {max(timed)} rounds" if timed else ""
        lines.append([f"**{cell['title']}**{rounds}", *(it["status"].removeprefix("ok") for it in columns)])
        figures = [_figures(cell, it) if it["status"] == "ok" else {} for it in columns]
        for row in sorted({row for found in figures for row in found}, key=ROWS.index):
            lines.append([row.replace("_", " "), *(str(found.get(row, "")) for found in figures)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _figures(cell: Mapping[str, Any], variant: Mapping[str, Any]) -> dict[str, Any]:
    """A variant's column of the table, by names of `ROWS`."""
    first, total = cell["variants"][0], variant["stages"][TOTAL]
    stock = first["stages"] if first is not variant and first["status"] == "ok" else {}
    figures: dict[str, Any] = {
        stage: _time(found, stock.get(stage)) for stage, found in variant["stages"].items() if stage in STAGES
    }
    figures["memory, MiB"] = f"{variant['peak_memory'] / 2**20:.4g}"
    if total["flops"]:
        figures["GFLOP"] = f"{total['flops'] / 1e9:.4g}"
    if workload := cell.get("workload"):
        frames = workload["frames"] * workload["batch"]
        figures["frames/s"] = f"{frames / statistics.median(total['seconds']):.3g}"
        figures["tokens of a row"] = variant["tokens"]
        if workload["geometry"].startswith("molmo2-4b"):
            paper = PAPER_SPEED_UPS.get((workload["mode"], frames), {}).get(variant["pruning_ratio"])
            figures |= {"speed-up in the paper": paper} if paper else {}
    if motion := variant.get("motion"):
        figures["correlation with motion"] = _median(motion["correlation"])
        figures["kept of what moves"] = _median(motion["kept"], ".0%")
    for same in {"same_frames", "same_tokens"} & variant.keys():
        figures[same] = {True: "yes", False: "**no**", None: ""}[variant[same]]
    return figures


def _time(found: Mapping[str, Any], stock: Mapping[str, Any] | None) -> str:
    """Median and spread of a stage; beside the stock model's, also speed-up, FLOP ideal and the share reached."""
    measured = Measurement(1, found["seconds"], TaskSpec(stmt="", setup=""))
    text = f"{_milliseconds(measured.median)} ± {_milliseconds(measured.iqr)}"
    if stock is None:
        return text
    speed_up = statistics.median(stock["seconds"]) / measured.median
    if not (stock["flops"] and found["flops"]):
        return f"{text}, {speed_up:.3f}x"
    ideal = stock["flops"] / found["flops"]
    return f"{text}, {speed_up:.3f}x of {ideal:.3f} ({speed_up / ideal:.1%})"


def _milliseconds(seconds: float) -> str:
    value = 1000 * seconds
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _median(values: Sequence[float], form: str = ".2f") -> str:
    """Median and extremes, without NaN."""
    known = sorted(value for value in values if not math.isnan(value))
    low, middle, high = (format(value, form) for value in (known[0], statistics.median(known), known[-1]))
    return f"{middle} ({low} to {high}, {len(known)} clips)"


def _failures(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Why cells and variants have no figures."""
    lines = []
    for cell in cells:
        titles = [(cell["title"], cell)]
        titles += [(f"{cell['title']}, {_label(variant['name'])}", variant) for variant in cell["variants"]]
        lines += [f"{title}: {it['status']} ({it['reason']})." for title, it in titles if it["status"] != "ok"]
    return lines


def _label(name: str) -> str:
    return f"k = {name}" if name.replace(".", "").isdigit() else name
